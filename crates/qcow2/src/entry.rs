//! Entries of L1 and L2 tables.
//!
//! Decoding an L2 entry is the inner loop of building the map of a chain, so an [`EntryFormat`] holds every
//! mask worked out beforehand: a valid standard entry costs two tests and one mask. The reason why an entry is
//! invalid is worked out on a cold path.
//!
//! Invariants: whatever [`EntryFormat::l2`] accepts, [`EntryFormat::encode_l2`] turns back into the same 64 bits, but for a
//! COPIED flag that says nothing; no host offset it returns lies in the first cluster, so 0 is free to mean something else.
//! The COPIED flag is passed on as found; only in the active tables does it mean "refcount is one". Without an offset and on
//! compressed clusters it says nothing: readers pass over it, as QEMU does.
//!
//! Source: the specification, "Cluster mapping".

use thiserror::Error;
use vmstrata_types::{ClusterBits, HostOffset};

/// The cluster (L2) or L2 table (L1) has a refcount of exactly one and may be written in place.
pub const COPIED: u64 = 1 << 63;
/// The rest of an L2 entry is a compressed cluster descriptor.
pub const COMPRESSED_FLAG: u64 = 1 << 62;
/// The cluster reads as zeros whatever else is in the entry (version 3, standard descriptors only).
pub const ZERO_FLAG: u64 = 1;
/// Host offset in an L1 entry and in a standard cluster descriptor: bits 9 to 55.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits of an L1 entry that must be zero.
pub const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Bits of a standard L2 entry that must be zero in version 3. Version 2 reserves [`ZERO_FLAG`] too.
pub const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// One more than the highest host offset any entry can hold.
pub const HOST_OFFSET_LIMIT: u64 = 1 << 56;

/// Unit in which the length of a compressed cluster is counted.
const SECTOR: u64 = 512;

/// Why a table entry is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EntryError {
    /// Bits that must be zero are not.
    #[error("entry {raw:#018x}: reserved bits {bits:#x} are set")]
    Reserved {
        /// The entry.
        raw: u64,
        /// The bits at fault.
        bits: u64,
    },
    /// The zero flag, which version 2 does not have. QEMU answers such a read with an I/O error too.
    #[error("entry {raw:#018x}: zero flag in a version 2 image")]
    ZeroFlagInVersion2 {
        /// The entry.
        raw: u64,
    },
    /// The offset is not the start of a cluster.
    #[error("entry {raw:#018x}: host offset {offset} is not on a cluster boundary")]
    Misaligned {
        /// The entry.
        raw: u64,
        /// The offset in it.
        offset: HostOffset,
    },
    /// "Refcount is one" of no L2 table at all. Only a check reports it: readers pass over the flag, as QEMU does.
    #[error("entry {raw:#018x}: copied flag without a host offset")]
    CopiedWithoutOffset {
        /// The entry.
        raw: u64,
    },
    /// Compressed clusters are never written in place, so they never have the flag. Only a check reports it: readers pass
    /// over the flag, as QEMU does.
    #[error("entry {raw:#018x}: copied flag on a compressed cluster")]
    CopiedCompressed {
        /// The entry.
        raw: u64,
    },
    /// A compressed cluster above 2^56, which small cluster sizes have bits to spell.
    #[error("entry {raw:#018x}: compressed cluster at {offset}, above the format's limit")]
    CompressedTooHigh {
        /// The entry.
        raw: u64,
        /// The offset in it.
        offset: HostOffset,
    },
    /// A compressed cluster in the first cluster, where the header is.
    #[error("entry {raw:#018x}: compressed cluster at {offset}, over the header")]
    CompressedOverHeader {
        /// The entry.
        raw: u64,
        /// The offset in it.
        offset: HostOffset,
    },
}

/// An entry of an L1 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L1Entry {
    /// Where the L2 table lies; `None` when none of its clusters is allocated.
    pub table: Option<HostOffset>,
    /// Whether the L2 table's refcount is exactly one.
    pub copied: bool,
}

/// An entry of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Entry {
    /// The layer says nothing: read the backing file, or zeros without one.
    Unallocated,
    /// Reads as zeros.
    Zero {
        /// A cluster kept for later writes; its content is not to be read.
        host: Option<HostOffset>,
        /// Whether that cluster's refcount is exactly one.
        copied: bool,
    },
    /// One cluster of plain data.
    Data {
        /// Start of the cluster.
        host: HostOffset,
        /// Whether its refcount is exactly one.
        copied: bool,
    },
    /// Compressed data of one guest cluster.
    Compressed {
        /// First byte; no alignment.
        host: HostOffset,
        /// Bytes up to the end of the last sector that holds some of it; decompression may stop earlier.
        len: u64,
    },
}

/// How to read the table entries of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFormat {
    cluster_bits: ClusterBits,
    /// Bits that no valid L1 entry has.
    l1_invalid: u64,
    /// Bits that no valid standard L2 entry has.
    l2_invalid: u64,
    /// First bit of a compressed descriptor's sector count.
    sectors_shift: u32,
}

impl EntryFormat {
    /// The entries of an image of this version (2 or 3) and cluster size.
    pub const fn new(version: u32, cluster_bits: ClusterBits) -> Self {
        let misaligned = OFFSET_MASK & (cluster_bits.size() - 1);
        let zero_flag = if version < 3 { ZERO_FLAG } else { 0 };
        Self {
            cluster_bits,
            l1_invalid: L1_RESERVED | misaligned,
            l2_invalid: L2_RESERVED | misaligned | zero_flag,
            sectors_shift: 62 - (cluster_bits.get() - 8),
        }
    }

    /// Bits that make a standard (not compressed) L2 entry invalid: reserved ones, those below the cluster
    /// size, and the zero flag in version 2. For scanners that look at raw entries.
    #[inline]
    pub const fn l2_invalid_bits(&self) -> u64 {
        self.l2_invalid
    }

    /// Decodes an L1 entry.
    ///
    /// # Errors
    /// Reserved bits, or an offset off a cluster boundary.
    #[inline]
    pub const fn l1(&self, raw: u64) -> Result<L1Entry, EntryError> {
        let offset = raw & OFFSET_MASK;
        if raw & self.l1_invalid != 0 {
            return Err(self.why_not_standard(raw, L1_RESERVED));
        }
        let table = if offset == 0 { None } else { Some(HostOffset::new(offset)) };
        Ok(L1Entry { table, copied: table.is_some() && raw & COPIED != 0 })
    }

    /// Decodes an L2 entry.
    ///
    /// # Errors
    /// Reserved bits, an offset off a cluster boundary, the zero flag in version 2, a compressed cluster above 2^56 or over
    /// the header.
    #[inline]
    pub const fn l2(&self, raw: u64) -> Result<L2Entry, EntryError> {
        if raw == 0 {
            return Ok(L2Entry::Unallocated);
        }
        if raw & COMPRESSED_FLAG != 0 {
            return self.compressed(raw);
        }
        let offset = raw & OFFSET_MASK;
        if raw & self.l2_invalid != 0 {
            return Err(self.why_not_standard(raw, L2_RESERVED));
        }
        let (host, copied) = (HostOffset::new(offset), raw & COPIED != 0);
        Ok(match (raw & ZERO_FLAG != 0, offset) {
            (true, 0) => L2Entry::Zero { host: None, copied: false },
            (true, _) => L2Entry::Zero { host: Some(host), copied },
            (false, 0) => L2Entry::Unallocated,
            (false, _) => L2Entry::Data { host, copied },
        })
    }

    #[inline]
    const fn compressed(&self, raw: u64) -> Result<L2Entry, EntryError> {
        let descriptor = raw & !(COPIED | COMPRESSED_FLAG);
        let offset = descriptor & ((1 << self.sectors_shift) - 1);
        let sectors = (descriptor >> self.sectors_shift) + 1;
        let host = HostOffset::new(offset);
        if offset >= HOST_OFFSET_LIMIT {
            return Err(EntryError::CompressedTooHigh { raw, offset: host });
        }
        if offset < self.cluster_bits.size() {
            return Err(EntryError::CompressedOverHeader { raw, offset: host });
        }
        Ok(L2Entry::Compressed { host, len: sectors * SECTOR - offset % SECTOR })
    }

    /// Says what is wrong with an entry already known to be wrong.
    #[cold]
    const fn why_not_standard(&self, raw: u64, reserved: u64) -> EntryError {
        if raw & reserved != 0 {
            return EntryError::Reserved { raw, bits: raw & reserved };
        }
        if raw & self.l2_invalid & ZERO_FLAG != 0 {
            return EntryError::ZeroFlagInVersion2 { raw };
        }
        EntryError::Misaligned { raw, offset: HostOffset::new(raw & OFFSET_MASK) }
    }

    /// The 64 bits of an L1 entry.
    ///
    /// # Panics
    /// When the entry is one [`EntryFormat::l1`] would refuse.
    #[inline]
    pub const fn encode_l1(&self, entry: L1Entry) -> u64 {
        let raw = match entry.table {
            Some(table) => table.get(),
            None => 0,
        } | flag(entry.copied);
        assert!(raw & self.l1_invalid == 0 && raw != COPIED, "L1 entry outside the format");
        raw
    }

    /// The 64 bits of an L2 entry. The length of a compressed cluster is rounded up to whole sectors.
    ///
    /// # Panics
    /// When the entry is one [`EntryFormat::l2`] would refuse or cannot have made: a misaligned or too high
    /// offset, data at offset 0, a zero cluster in version 2, a compressed cluster of no bytes or too many.
    #[inline]
    pub const fn encode_l2(&self, entry: L2Entry) -> u64 {
        let raw = match entry {
            L2Entry::Unallocated => return 0,
            L2Entry::Compressed { host, len } => return self.encode_compressed(host, len),
            L2Entry::Data { host, copied } => {
                assert!(host.get() != 0, "data cannot lie over the header");
                host.get() | flag(copied)
            }
            L2Entry::Zero { host: Some(host), copied } => {
                assert!(host.get() != 0, "data cannot lie over the header");
                host.get() | flag(copied) | ZERO_FLAG
            }
            L2Entry::Zero { host: None, copied } => {
                assert!(!copied, "nothing cannot have a refcount of one");
                ZERO_FLAG
            }
        };
        assert!(raw & (self.l2_invalid | COMPRESSED_FLAG) == 0, "L2 entry outside the format");
        raw
    }

    const fn encode_compressed(&self, host: HostOffset, len: u64) -> u64 {
        let offset = host.get();
        let in_file = offset >= self.cluster_bits.size() && offset < self.compressed_offset_limit().get();
        assert!(in_file, "compressed cluster over the header or too high in the file");
        assert!(len > 0 && len <= self.max_compressed_len(host), "compressed cluster of impossible length");
        let more_sectors = (offset % SECTOR + len).div_ceil(SECTOR) - 1;
        COMPRESSED_FLAG | more_sectors << self.sectors_shift | offset
    }

    /// One more than the highest offset a compressed cluster can start at: 2^56 or less with big clusters.
    #[inline]
    pub const fn compressed_offset_limit(&self) -> HostOffset {
        HostOffset::new(if self.sectors_shift < 56 { 1 << self.sectors_shift } else { HOST_OFFSET_LIMIT })
    }

    /// The most bytes a compressed cluster that starts at `host` can have: two clusters less what lies before
    /// it in its first sector.
    #[inline]
    pub const fn max_compressed_len(&self, host: HostOffset) -> u64 {
        self.cluster_bits.size() * 2 - host.get() % SECTOR
    }
}

#[inline]
const fn flag(copied: bool) -> u64 {
    if copied { COPIED } else { 0 }
}

/// The entries of a table: big-endian words; what is left of the last one is left out.
#[inline]
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word))
}

#[cfg(test)]
mod tests;
