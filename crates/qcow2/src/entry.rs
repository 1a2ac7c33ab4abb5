//! Entries of L1 and L2 tables.
//!
//! Decoding an L2 entry is the inner loop of building the map of a chain, so an [`EntryFormat`] holds every
//! mask worked out beforehand: a valid standard entry costs two tests and one mask. The reason why an entry is
//! invalid is worked out on a cold path.
//!
//! Invariants: whatever [`EntryFormat::l2`] accepts, [`EntryFormat::encode_l2`] turns back into the same bits, but for a
//! COPIED flag that says nothing and, in an extended entry, the zero flag; no host offset it returns lies in the first cluster, so 0 is free to mean something else.
//! The COPIED flag is passed on as found; only in the active tables does it mean "refcount is one". Without an offset and on
//! compressed clusters it says nothing: readers pass over it, as QEMU does.
//!
//! Source: the specification, "Cluster mapping".

mod subclusters;

use std::fmt;

use thiserror::Error;
use vmstrata_types::{ClusterBits, HostOffset};

pub use subclusters::{SubclusterState, Subclusters};

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

/// An entry of an L2 table as the file has it: 8 bytes, or 16 with subclusters ([`EntryFormat::entry_len`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawEntry {
    /// Flags and offset.
    pub word: u64,
    /// The subcluster bitmap of an extended entry ([`Subclusters`]); 0 in an entry of 8 bytes.
    pub subclusters: u64,
}

impl RawEntry {
    /// An entry that says nothing.
    pub const EMPTY: Self = Self::standard(0);

    /// An entry of 8 bytes.
    #[inline]
    pub const fn standard(word: u64) -> Self {
        Self { word, subclusters: 0 }
    }

    /// Whether the entry says nothing.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.word | self.subclusters == 0
    }
}

impl fmt::Display for RawEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.word)?;
        if self.subclusters != 0 {
            write!(f, " with subclusters {:#018x}", self.subclusters)?;
        }
        Ok(())
    }
}

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
    /// Subclusters that are allocated and read as zeros.
    #[error("entry {raw}: subclusters are marked both allocated and zero")]
    SubclustersTwice {
        /// The entry.
        raw: RawEntry,
    },
    /// Subclusters that are allocated, of no cluster.
    #[error("entry {raw}: allocated subclusters without a host offset")]
    SubclustersNowhere {
        /// The entry.
        raw: RawEntry,
    },
    /// Compressed clusters have no subclusters.
    #[error("entry {raw}: a compressed cluster with subclusters")]
    SubclustersCompressed {
        /// The entry.
        raw: RawEntry,
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
    /// Subclusters that differ, or a cluster none of which is used yet. In images with extended entries only.
    Subclusters {
        /// The cluster; there is one where a subcluster is allocated.
        host: Option<HostOffset>,
        /// Whether its refcount is exactly one.
        copied: bool,
        /// What each subcluster is.
        states: Subclusters,
    },
}

impl L2Entry {
    /// What extended entries say of a cluster: one thing, where all subclusters are alike.
    pub const fn of_subclusters(host: Option<HostOffset>, copied: bool, states: Subclusters) -> Self {
        match (host, states.allocated, states.zero) {
            (None, 0, 0) => Self::Unallocated,
            (Some(host), u32::MAX, _) => Self::Data { host, copied },
            (host, _, u32::MAX) => Self::Zero { host, copied },
            (host, ..) => Self::Subclusters { host, copied, states },
        }
    }

    /// The cluster that the entry has for itself, in use or not; compressed ones share theirs.
    #[inline]
    pub const fn host(self) -> Option<HostOffset> {
        match self {
            Self::Data { host, .. } => Some(host),
            Self::Zero { host, .. } | Self::Subclusters { host, .. } => host,
            Self::Unallocated | Self::Compressed { .. } => None,
        }
    }

    /// The cluster that the entry has for itself, if its refcount is exactly one: it may be written in place.
    #[inline]
    pub const fn own_host(self) -> Option<HostOffset> {
        match self {
            Self::Data { host, copied: true } => Some(host),
            Self::Zero { host, copied: true } | Self::Subclusters { host, copied: true, .. } => host,
            _ => None,
        }
    }

    /// What each thirty-second of the cluster is. All of a compressed cluster is data.
    #[inline]
    pub const fn states(self) -> Subclusters {
        match self {
            Self::Unallocated => Subclusters::NOTHING,
            Self::Zero { .. } => Subclusters::ZERO,
            Self::Data { .. } | Self::Compressed { .. } => Subclusters::ALLOCATED,
            Self::Subclusters { states, .. } => states,
        }
    }
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
    /// Whether L2 entries have a subcluster bitmap.
    is_extended: bool,
}

impl EntryFormat {
    /// The 8-byte entries of an image of this version (2 or 3) and cluster size.
    pub const fn new(version: u32, cluster_bits: ClusterBits) -> Self {
        let misaligned = OFFSET_MASK & (cluster_bits.size() - 1);
        let zero_flag = if version < 3 { ZERO_FLAG } else { 0 };
        Self {
            cluster_bits,
            l1_invalid: L1_RESERVED | misaligned,
            l2_invalid: L2_RESERVED | misaligned | zero_flag,
            sectors_shift: 62 - (cluster_bits.get() - 8),
            is_extended: false,
        }
    }

    /// The entries of a version 3 image with subclusters.
    pub const fn extended(cluster_bits: ClusterBits) -> Self {
        Self { is_extended: true, ..Self::new(3, cluster_bits) }
    }

    /// Whether L2 entries have a subcluster bitmap.
    #[inline]
    pub const fn is_extended(&self) -> bool {
        self.is_extended
    }

    /// Bytes of an L2 entry in the file.
    #[inline]
    pub const fn entry_len(&self) -> usize {
        if self.is_extended { 16 } else { 8 }
    }

    /// The entries of a piece of an L2 table; what is left of the last one is left out.
    #[inline]
    pub fn raw_entries(&self, bytes: &[u8]) -> impl Iterator<Item = RawEntry> {
        bytes.chunks_exact(self.entry_len()).map(|entry| {
            let (word, rest) = entry.split_first_chunk().expect("an entry has 8 bytes at least");
            let subclusters = rest.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
            RawEntry { word: u64::from_be_bytes(*word), subclusters }
        })
    }

    /// Appends the bytes of an L2 entry.
    ///
    /// # Panics
    /// With a subcluster bitmap, where entries have none.
    #[inline]
    pub fn put_raw(&self, raw: RawEntry, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&raw.word.to_be_bytes());
        if self.is_extended {
            bytes.extend_from_slice(&raw.subclusters.to_be_bytes());
        } else {
            assert!(raw.subclusters == 0, "an entry of 8 bytes has no subclusters");
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
    /// the header; a subcluster bitmap that contradicts itself or the rest of the entry.
    #[inline]
    pub const fn l2(&self, raw: RawEntry) -> Result<L2Entry, EntryError> {
        if self.is_extended { self.extended_l2(raw) } else { self.standard_l2(raw.word) }
    }

    #[inline]
    const fn standard_l2(&self, raw: u64) -> Result<L2Entry, EntryError> {
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

    /// In an extended entry the zero flag says nothing.
    const fn extended_l2(&self, raw: RawEntry) -> Result<L2Entry, EntryError> {
        let RawEntry { word, subclusters } = raw;
        if word & COMPRESSED_FLAG != 0 {
            if subclusters != 0 {
                return Err(EntryError::SubclustersCompressed { raw });
            }
            return self.compressed(word);
        }
        if word & self.l2_invalid != 0 {
            return Err(self.why_not_standard(word, L2_RESERVED));
        }
        let states = Subclusters::from_bits(subclusters);
        if states.allocated & states.zero != 0 {
            return Err(EntryError::SubclustersTwice { raw });
        }
        let host = match word & OFFSET_MASK {
            0 if states.allocated != 0 => return Err(EntryError::SubclustersNowhere { raw }),
            0 => None,
            offset => Some(HostOffset::new(offset)),
        };
        let copied = host.is_some() && word & COPIED != 0;
        Ok(L2Entry::of_subclusters(host, copied, states))
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

    /// The bits of an L2 entry. The length of a compressed cluster is rounded up to whole sectors.
    ///
    /// # Panics
    /// When the entry is one [`EntryFormat::l2`] would refuse or cannot have made: a misaligned or too high
    /// offset, data at offset 0, a zero cluster in version 2, a compressed cluster of no bytes or too many, subclusters
    /// without extended entries, alike, or allocated nowhere.
    #[inline]
    pub const fn encode_l2(&self, entry: L2Entry) -> RawEntry {
        let (host, copied, states) = match entry {
            L2Entry::Unallocated => return RawEntry::EMPTY,
            L2Entry::Compressed { host, len } => {
                return RawEntry::standard(self.encode_compressed(host, len));
            }
            L2Entry::Data { host, copied } => (Some(host), copied, Subclusters::ALLOCATED),
            L2Entry::Zero { host, copied } => (host, copied, Subclusters::ZERO),
            L2Entry::Subclusters { host, copied, states } => {
                assert!(self.is_extended, "only extended entries have subclusters");
                let is_alike = states.allocated == u32::MAX || states.zero == u32::MAX;
                assert!(states.is_valid() && !is_alike, "subclusters that are alike, or two things at once");
                assert!(
                    host.is_some() || states.allocated == 0 && states.zero != 0,
                    "data without a cluster"
                );
                (host, copied, states)
            }
        };
        let offset = match host {
            Some(host) => {
                assert!(host.get() != 0, "data cannot lie over the header");
                host.get()
            }
            None => {
                assert!(!copied, "nothing cannot have a refcount of one");
                0
            }
        };
        let is_zero = matches!(entry, L2Entry::Zero { .. }) && !self.is_extended;
        let word = offset | flag(copied) | if is_zero { ZERO_FLAG } else { 0 };
        assert!(word & (self.l2_invalid | COMPRESSED_FLAG) == 0, "L2 entry outside the format");
        RawEntry { word, subclusters: if self.is_extended { states.bits() } else { 0 } }
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

/// The entries of a table that are 8 bytes long, as all but those of some L2 tables are: big-endian words; what is left of the
/// last one is left out.
#[inline]
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word))
}

#[cfg(test)]
mod tests;
