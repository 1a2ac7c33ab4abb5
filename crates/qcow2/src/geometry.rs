//! Which entry of which table maps a guest offset.
//!
//! The L1 table has one 8-byte entry per L2 table; an L2 table is one cluster of entries of 8 bytes, or of 16 with
//! subclusters, each mapping one guest cluster.

use vmstrata_types::{ClusterBits, GuestOffset};

/// Bytes of an L1 entry, of a refcount table entry, and of a standard L2 entry.
pub const ENTRY_LEN: u64 = 8;

/// The smallest clusters that can have subclusters.
pub const MIN_EXTENDED: ClusterBits = ClusterBits::from_size(16 << 10).expect("a power of two");
/// Base-2 logarithm of the subclusters of a cluster.
pub const SUBCLUSTERS_BITS: u32 = 5;

/// The shape of an image's mapping tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Base-2 logarithm of the number of entries in an L2 table.
    pub l2_bits: u32,
}

impl Geometry {
    /// The tables of an image with standard (8-byte) L2 entries.
    pub const fn new(cluster_bits: ClusterBits) -> Self {
        Self { cluster_bits, l2_bits: cluster_bits.get() - 3 }
    }

    /// The tables of an image with extended (16-byte) L2 entries.
    ///
    /// # Panics
    /// With clusters smaller than [`MIN_EXTENDED`].
    pub const fn extended(cluster_bits: ClusterBits) -> Self {
        assert!(cluster_bits.get() >= MIN_EXTENDED.get(), "a subcluster has a sector at least");
        Self { cluster_bits, l2_bits: cluster_bits.get() - 4 }
    }

    /// Whether L2 entries are extended.
    #[inline]
    pub const fn is_extended(self) -> bool {
        self.l2_bits + 4 == self.cluster_bits.get()
    }

    /// The smallest run of bytes that entries tell apart: a subcluster with extended entries, else a cluster.
    #[inline]
    pub const fn unit(self) -> ClusterBits {
        if !self.is_extended() {
            return self.cluster_bits;
        }
        ClusterBits::new(self.cluster_bits.get() - SUBCLUSTERS_BITS)
            .expect("a subcluster has a sector at least")
    }

    /// Entries in an L2 table.
    #[inline]
    pub const fn l2_entries(self) -> usize {
        1 << self.l2_bits
    }

    /// Base-2 logarithm of [`Geometry::l2_span`].
    #[inline]
    pub const fn l2_span_bits(self) -> u32 {
        self.cluster_bits.get() + self.l2_bits
    }

    /// Guest bytes that one L2 table maps.
    #[inline]
    pub const fn l2_span(self) -> u64 {
        1 << self.l2_span_bits()
    }

    /// The L1 entry that leads to `at`.
    #[inline]
    pub const fn l1_index(self, at: GuestOffset) -> usize {
        (at.get() >> self.l2_span_bits()) as usize
    }

    /// The entry of its L2 table that maps `at`.
    #[inline]
    pub const fn l2_index(self, at: GuestOffset) -> usize {
        (at.get() >> self.cluster_bits.get()) as usize & (self.l2_entries() - 1)
    }

    /// The first guest byte mapped by entry `l2_index` of the L2 table at `l1_index`.
    ///
    /// Both must be in range for a disk below 2^64 bytes.
    #[inline]
    pub const fn guest_offset(self, l1_index: usize, l2_index: usize) -> GuestOffset {
        GuestOffset::new(
            ((l1_index as u64) << self.l2_span_bits()) + ((l2_index as u64) << self.cluster_bits.get()),
        )
    }

    /// L1 entries a disk of `size` bytes needs.
    #[inline]
    pub const fn l1_entries(self, size: u64) -> u64 {
        size.div_ceil(self.l2_span())
    }
}

#[cfg(test)]
mod tests;
