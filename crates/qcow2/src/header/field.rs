//! Where each field of the header lies, in bytes from the start of the file, for parsing, for error messages
//! and for rewriting one field in place.

/// `QFI\xfb`.
pub const MAGIC: u64 = 0;
/// 4 bytes.
pub const VERSION: u64 = 4;
/// 8 bytes.
pub const BACKING_FILE_OFFSET: u64 = 8;
/// 4 bytes.
pub const BACKING_FILE_SIZE: u64 = 16;
/// 4 bytes.
pub const CLUSTER_BITS: u64 = 20;
/// 8 bytes.
pub const SIZE: u64 = 24;
/// 4 bytes.
pub const CRYPT_METHOD: u64 = 32;
/// 4 bytes.
pub const L1_SIZE: u64 = 36;
/// 8 bytes.
pub const L1_TABLE_OFFSET: u64 = 40;
/// 8 bytes. Together with [`REFCOUNT_TABLE_CLUSTERS`] these are 12 bytes in a row within one 512-byte sector,
/// so that a table can be moved by one write.
pub const REFCOUNT_TABLE_OFFSET: u64 = 48;
/// 4 bytes.
pub const REFCOUNT_TABLE_CLUSTERS: u64 = 56;
/// 4 bytes.
pub const SNAPSHOT_COUNT: u64 = 60;
/// 8 bytes.
pub const SNAPSHOTS_OFFSET: u64 = 64;
/// 8 bytes, version 3.
pub const INCOMPATIBLE: u64 = 72;
/// 8 bytes, version 3.
pub const COMPATIBLE: u64 = 80;
/// 8 bytes, version 3.
pub const AUTOCLEAR: u64 = 88;
/// 4 bytes, version 3.
pub const REFCOUNT_ORDER: u64 = 96;
/// 4 bytes, version 3.
pub const HEADER_LENGTH: u64 = 100;
/// 1 byte, version 3 with a header longer than this.
pub const COMPRESSION_TYPE: u64 = 104;
/// First byte this crate does not know by name; bytes from here to the header's end are kept.
pub const ADDITIONAL: u64 = 105;
