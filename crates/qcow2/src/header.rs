//! The image header: the first 72 bytes (version 2) or 104 and more (version 3).
//!
//! [`Header::parse`] checks every field before anything else of the file is looked at, so the engine can
//! allocate by the sizes in it. What only makes writing unsafe ([`Incompatible::CORRUPT`],
//! [`Incompatible::DIRTY`]) is reported, not refused.
//!
//! Invariants of a parsed header: tables lie on cluster boundaries, not over the header or each other; the L1 table maps the
//! whole disk; sizes keep within QEMU's limits. L1 table and refcount table may reach past the end of the file, where they
//! read as zeros: a tool that never wrote them left them so.
//!
//! Source: the specification, "Header".

mod check;
mod encode;
pub mod field;
mod parse;

pub use encode::EncodeError;
pub use parse::is_qcow2;
use vmstrata_types::{ClusterBits, HostOffset};

use crate::entry::EntryFormat;
use crate::feature::{Autoclear, Compatible, CompressionType, Incompatible};
use crate::geometry::Geometry;
use crate::refcount::RefcountOrder;

/// `QFI\xfb`, big-endian.
pub const MAGIC: u32 = 0x5146_49fb;
/// Bytes of a version 2 header.
pub const V2_LEN: u32 = 72;
/// Least bytes of a version 3 header, and what [`Header::parse`] wants to see of any image.
pub const V3_MIN_LEN: u32 = 104;
/// Bytes of the version 3 headers this crate makes: up to the compression type, padded.
pub const V3_LEN: u32 = 112;
/// Most entries of an L1 table: 32 MiB, QEMU's limit.
pub const MAX_L1_ENTRIES: u32 = 4 << 20;
/// Most bytes of a refcount table, QEMU's limit.
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Most internal snapshots, QEMU's limit.
pub const MAX_SNAPSHOTS: u32 = 65_536;
/// Most bytes of a backing file name.
pub const MAX_BACKING_NAME_LEN: u32 = 1023;

/// Where the backing file's name lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingName {
    /// First byte, within the first cluster.
    pub offset: HostOffset,
    /// Bytes, 1 to [`MAX_BACKING_NAME_LEN`], no zero byte at the end.
    pub len: u32,
}

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The backing file's name, if there is a backing file.
    pub backing_file: Option<BackingName>,
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Size of the disk in bytes; whole sectors, rounded down as QEMU does.
    pub size: u64,
    /// Always 0: encrypted images are refused.
    pub crypt_method: u32,
    /// Entries in the active L1 table.
    pub l1_size: u32,
    /// The active L1 table. Offset 0 only with no entries.
    pub l1_table_offset: HostOffset,
    /// The refcount table.
    pub refcount_table_offset: HostOffset,
    /// Clusters of the refcount table, at least 1.
    pub refcount_table_clusters: u32,
    /// Internal snapshots.
    pub snapshot_count: u32,
    /// The snapshot table; without meaning when there are no snapshots.
    pub snapshots_offset: HostOffset,
    /// Features that must be understood. Empty in version 2.
    pub incompatible: Incompatible,
    /// Features that may be ignored. Empty in version 2.
    pub compatible: Compatible,
    /// Features to be cleared by writers that do not know them. Empty in version 2.
    pub autoclear: Autoclear,
    /// Width of refcounts.
    pub refcount_order: RefcountOrder,
    /// Bytes of the header; extensions start here.
    pub header_length: u32,
    /// How compressed clusters are compressed.
    pub compression_type: CompressionType,
    /// Header bytes from [`field::ADDITIONAL`] to `header_length`, which later formats may give a meaning to;
    /// kept when the header is rewritten.
    pub additional: Vec<u8>,
}

impl Header {
    /// How L1 and L2 entries of this image are to be read.
    pub fn entry_format(&self) -> EntryFormat {
        match self.has_subclusters() {
            true => EntryFormat::extended(self.cluster_bits),
            false => EntryFormat::new(self.version, self.cluster_bits),
        }
    }

    /// The shape of this image's mapping tables.
    pub fn geometry(&self) -> Geometry {
        if self.has_subclusters() {
            Geometry::extended(self.cluster_bits)
        } else {
            Geometry::new(self.cluster_bits)
        }
    }

    /// Whether L2 entries are extended.
    pub fn has_subclusters(&self) -> bool {
        self.incompatible.contains(Incompatible::EXTENDED_L2)
    }

    /// Entries in the refcount table.
    pub fn refcount_table_entries(&self) -> usize {
        ((u64::from(self.refcount_table_clusters) << self.cluster_bits.get()) / 8) as usize
    }

    /// Where header extensions end at the latest: at the backing file name or with the first cluster.
    pub fn extensions_end(&self) -> usize {
        match self.backing_file {
            Some(name) => name.offset.get() as usize,
            None => self.cluster_bits.size() as usize,
        }
    }
}

#[cfg(test)]
mod tests;
