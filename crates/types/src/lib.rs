//! Offsets, indices, counts and sizes that cannot be mistaken for one another.
//!
//! A guest offset and a host offset are both a number of bytes, yet adding one to a file's length and the
//! other to a disk's is how images get corrupted. Every crate above this one speaks in these types; raw
//! integers stay inside `qcow2`, where they are the on-disk format.
//!
//! No I/O, no dependencies.

mod path_text;
pub mod time;
mod told;

pub use path_text::{path_from_text, path_to_text, percent_decode, percent_encode};
pub use told::told;

use std::fmt;

/// Declares a byte offset: arithmetic with lengths is allowed, with other kinds of offset it is not.
macro_rules! byte_offset {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Offset 0.
            pub const ZERO: Self = Self(0);

            /// Wraps a number of bytes.
            pub const fn new(bytes: u64) -> Self {
                Self(bytes)
            }

            /// The offset as a number of bytes.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// This offset moved up by `len` bytes, or `None` past 2^64.
            pub const fn checked_add(self, len: u64) -> Option<Self> {
                match self.0.checked_add(len) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Bytes from the start of the cluster that holds this offset.
            pub const fn within(self, bits: ClusterBits) -> u64 {
                self.0 & (bits.size() - 1)
            }

            /// The start of the cluster that holds this offset.
            pub const fn align_down(self, bits: ClusterBits) -> Self {
                Self(self.0 & !(bits.size() - 1))
            }

            /// The first cluster boundary at or above this offset (saturating at the top).
            pub const fn align_up(self, bits: ClusterBits) -> Self {
                Self(self.0.saturating_add(bits.size() - 1) & !(bits.size() - 1))
            }

            /// Whether this offset is a cluster boundary.
            pub const fn is_aligned(self, bits: ClusterBits) -> bool {
                self.within(bits) == 0
            }
        }

        impl std::ops::Add<u64> for $name {
            type Output = Self;
            fn add(self, len: u64) -> Self {
                Self(self.0 + len)
            }
        }

        impl std::ops::Sub for $name {
            type Output = u64;
            fn sub(self, earlier: Self) -> u64 {
                self.0 - earlier.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

byte_offset! {
    /// A byte of the disk as the guest sees it.
    GuestOffset
}

byte_offset! {
    /// A byte of a file on the host.
    HostOffset
}

/// Base-2 logarithm of a cluster size: 9 (512 B) to 21 (2 MiB), the range qcow2 allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct ClusterBits(u8);

impl ClusterBits {
    /// 512 B clusters.
    pub const MIN: Self = Self(9);
    /// 2 MiB clusters.
    pub const MAX: Self = Self(21);
    /// 64 KiB clusters, what every tool makes unless told otherwise.
    pub const DEFAULT: Self = Self(16);

    /// The cluster size `1 << bits`, or `None` outside 9..=21.
    pub const fn new(bits: u32) -> Option<Self> {
        if bits >= Self::MIN.0 as u32 && bits <= Self::MAX.0 as u32 { Some(Self(bits as u8)) } else { None }
    }

    /// From a size in bytes; `None` unless it is a power of two from 512 B to 2 MiB.
    pub const fn from_size(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Self::new(bytes.trailing_zeros()) } else { None }
    }

    /// The logarithm itself.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// Bytes in a cluster.
    pub const fn size(self) -> u64 {
        1 << self.0
    }
}

/// A layer's place in its chain, counted from the bottom: 0 is the base, the highest is the active layer.
///
/// Counting from the bottom makes the number a property of the frozen layer: a layer has the same index in
/// every disk that is built on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct LayerIndex(u16);

impl LayerIndex {
    /// The base of the chain.
    pub const BASE: Self = Self(0);

    /// Wraps a distance from the bottom of the chain.
    pub const fn new(depth: u16) -> Self {
        Self(depth)
    }

    /// The distance from the bottom of the chain.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// As an index into an array of layers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for LayerIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The longest chain that can be opened: layer indices are 16 bits wide and one value stays unused.
pub const MAX_LAYERS: usize = 65_535;

/// A run of guest bytes, `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GuestRange {
    /// First byte.
    pub start: GuestOffset,
    /// Number of bytes.
    pub len: u64,
}

impl GuestRange {
    /// The run of `len` bytes at `start`.
    pub const fn new(start: GuestOffset, len: u64) -> Self {
        Self { start, len }
    }

    /// The first byte after the run, or `None` past 2^64.
    pub const fn checked_end(self) -> Option<GuestOffset> {
        self.start.checked_add(self.len)
    }

    /// The first byte after the run.
    ///
    /// # Panics
    /// When the run passes 2^64: check requests with [`GuestRange::fits`] where they come in.
    pub const fn end(self) -> GuestOffset {
        self.checked_end().expect("range checked when it was taken")
    }

    /// Whether the whole run lies on a disk of `disk_size` bytes.
    pub const fn fits(self, disk_size: u64) -> bool {
        match self.checked_end() {
            Some(end) => end.get() <= disk_size,
            None => false,
        }
    }
}

impl fmt::Display for GuestRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:#x}", self.start, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_bits_accept_only_what_qcow2_allows() {
        assert_eq!(ClusterBits::new(8), None);
        assert_eq!(ClusterBits::new(22), None);
        assert_eq!(ClusterBits::from_size(65536), Some(ClusterBits::DEFAULT));
        assert_eq!(ClusterBits::from_size(65537), None);
    }

    #[test]
    fn alignment_rounds_to_cluster_boundaries() {
        let bits = ClusterBits::DEFAULT;
        let at = GuestOffset::new(0x1_2345);
        assert_eq!(at.align_down(bits).get(), 0x1_0000);
        assert_eq!(at.align_up(bits).get(), 0x2_0000);
        assert_eq!(at.within(bits), 0x2345);
    }

    #[test]
    fn a_range_past_the_end_or_past_2_64_does_not_fit() {
        assert!(GuestRange::new(GuestOffset::new(10), 6).fits(16));
        assert!(!GuestRange::new(GuestOffset::new(10), 7).fits(16));
        assert!(!GuestRange::new(GuestOffset::new(u64::MAX), 2).fits(u64::MAX));
    }
}
