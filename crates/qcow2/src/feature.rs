//! Feature bits of version 3 headers and the compression type.
//!
//! Unknown compatible and autoclear bits are kept, so that rewriting a header preserves or deliberately drops
//! them; unknown incompatible bits never get past [`crate::Header::parse`].

use bitflags::bitflags;

bitflags! {
    /// Features without which the image must not be opened.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Incompatible: u64 {
        /// Refcounts may be too low or too high; they must be rebuilt before anything is allocated.
        const DIRTY = 1 << 0;
        /// Some structure was found corrupt: the image may be read, not written.
        const CORRUPT = 1 << 1;
        /// Guest data lies in another file.
        const EXTERNAL_DATA = 1 << 2;
        /// Compressed clusters are not zlib.
        const COMPRESSION_TYPE = 1 << 3;
        /// L2 entries are 16 bytes long and map 32 subclusters each.
        const EXTENDED_L2 = 1 << 4;
    }
}

bitflags! {
    /// Features that may be ignored.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Compatible: u64 {
        /// Refcount updates may be postponed while [`Incompatible::DIRTY`] is set.
        const LAZY_REFCOUNTS = 1 << 0;
        // Bits others may have set are kept.
        const _ = !0;
    }
}

bitflags! {
    /// Features whose bit a writer that does not know them must clear first.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Autoclear: u64 {
        /// The bitmaps extension is consistent.
        const BITMAPS = 1 << 0;
        /// The external data file reads as a raw image of the disk.
        const RAW_EXTERNAL = 1 << 1;
        /// The index extension leads to an index ([`crate::index`]); ours.
        const INDEX = 1 << 31;
        // Bits others may have set are kept.
        const _ = !0;
    }
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CompressionType {
    /// Raw deflate (no zlib header), with a 4 KiB window.
    #[default]
    Zlib,
    /// Zstandard.
    Zstd,
}

impl CompressionType {
    /// From the byte in the header; `None` for types not yet invented.
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Zlib),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// The byte in the header.
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Zlib => 0,
            Self::Zstd => 1,
        }
    }
}
