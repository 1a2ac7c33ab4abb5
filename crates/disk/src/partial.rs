//! Clusters of which only some parts are written: copying the rest up is put off.
//!
//! A word in place of an L2 entry, in memory and in the volatile journal only. No image ever has it: a table is written
//! without it ([`crate::changes`]), and what a damaged or hostile image has in its place is not taken for it
//! ([`Partial::never_from_an_image`]).
//!
//! ```text
//!   63   61 60                               16 (9) 15 (7)                0
//!  ┌───────┬──────────────────────────────────────┬────────────────────────┐
//!  │  001  │  host offset of the cluster          │  a bit a part: written │
//!  └───────┴──────────────────────────────────────┴────────────────────────┘
//! ```
//!
//! A cluster has 16 parts, one of less than 64 KiB has 8 (its offset leaves no room for more). What is not written of it
//! is what lies below the active layer: only a cluster that had no entry at all becomes one of these.

use vmstrata_qcow2::RawEntry;
use vmstrata_qcow2::entry::COPIED;
use vmstrata_types::{ClusterBits, HostOffset};

/// Of a standard entry's reserved bits.
const FLAG: u64 = 1 << KIND_SHIFT;
const KIND_SHIFT: u32 = 61;
/// Another reserved bit, which keeps a damaged entry of an image damaged.
const OTHER_RESERVED: u64 = 1 << 60;
const OFFSET_BITS: u32 = 56;

/// See the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partial {
    pub(crate) host: HostOffset,
    written: u32,
    bits: ClusterBits,
}

/// Whether an entry is a [`Partial`]'s.
pub(crate) const fn is_partial(raw: RawEntry) -> bool {
    raw.word >> KIND_SHIFT == 1
}

/// A run of a cluster's bytes that are all written, or all not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartRun {
    /// Offset in the cluster.
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) is_written: bool,
}

/// Parts of a cluster, a bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts(u32);

impl Parts {
    /// The parts that `len` bytes from `within` on consist of; `None` when they are no whole parts.
    pub(crate) fn of(bits: ClusterBits, within: u64, len: u64) -> Option<Self> {
        let part = part_size(bits);
        let is_whole = (within | len) & (part - 1) == 0;
        is_whole.then(|| Self(((1 << (len / part)) - 1) << (within / part)))
    }
}

fn count(bits: ClusterBits) -> u32 {
    if bits.get() < 16 { 8 } else { 16 }
}

fn part_size(bits: ClusterBits) -> u64 {
    bits.size() / u64::from(count(bits))
}

impl Partial {
    /// A cluster at `host` of which nothing is written yet.
    pub(crate) fn new(host: HostOffset, bits: ClusterBits) -> Self {
        Self { host, written: 0, bits }
    }

    /// What an entry says, if it is one of these.
    #[inline]
    pub(crate) fn from_raw(raw: RawEntry, bits: ClusterBits) -> Option<Self> {
        let host = raw.word & ((1 << OFFSET_BITS) - 1) & !(bits.size() - 1);
        let written = (raw.word & ((1 << count(bits)) - 1)) as u32;
        is_partial(raw).then(|| Self { host: HostOffset::new(host), written, bits })
    }

    pub(crate) fn raw(self) -> RawEntry {
        RawEntry::standard(FLAG | self.host.get() | u64::from(self.written))
    }

    /// The entry of the same cluster once it is complete.
    pub(crate) fn complete(self) -> RawEntry {
        RawEntry::standard(self.host.get() | COPIED)
    }

    /// An entry read from an image: one that looks like one of these is damage.
    pub(crate) fn never_from_an_image(raw: RawEntry) -> RawEntry {
        let word = raw.word ^ FLAG | OTHER_RESERVED;
        if is_partial(raw) { RawEntry { word, ..raw } } else { raw }
    }

    /// The same with all parts written.
    pub(crate) fn filled(self) -> Self {
        Self { written: (1 << count(self.bits)) - 1, ..self }
    }

    /// The same with `parts` written, too.
    pub(crate) fn with(self, parts: Parts) -> Self {
        Self { written: self.written | parts.0, ..self }
    }

    pub(crate) fn is_complete(self) -> bool {
        self == self.filled()
    }

    /// The run that begins `within` bytes into the cluster.
    pub(crate) fn run(self, within: u64) -> PartRun {
        let part = part_size(self.bits);
        let first = (within / part) as u32;
        let is_written = self.written >> first & 1 == 1;
        let alike = if is_written { self.written } else { !self.written } >> first;
        let end = u64::from(first + alike.trailing_ones()) * part;
        PartRun { start: within, len: end.min(self.bits.size()) - within, is_written }
    }

    /// What is not written, in order.
    pub(crate) fn missing(self) -> impl Iterator<Item = PartRun> {
        let runs = std::iter::successors(Some(self.run(0)), move |run| {
            let next = run.start + run.len;
            (next < self.bits.size()).then(|| self.run(next))
        });
        runs.filter(|run| !run.is_written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vmstrata_qcow2::entry::EntryFormat;

    #[test]
    fn a_word_is_no_entry_of_the_format_and_no_image_has_it() {
        for bits in (9..=21).map(|bits| ClusterBits::new(bits).unwrap()) {
            let host = HostOffset::new((1 << 55) - bits.size());
            let parts = Parts::of(bits, 0, part_size(bits)).unwrap();
            let partial = Partial::new(host, bits).with(parts);
            let raw = partial.raw();
            assert_eq!(Partial::from_raw(raw, bits), Some(partial));
            EntryFormat::new(3, bits).l2(raw).unwrap_err();
            let read = Partial::never_from_an_image(raw);
            assert!(Partial::from_raw(read, bits).is_none());
            EntryFormat::new(3, bits).l2(read).unwrap_err();
        }
        for whole in [0, 1 << 63 | 0x5_0000, 1 << 62 | 1 << 61 | 0x5_0000, 1 << 63 | 1 << 61] {
            let whole = RawEntry::standard(whole);
            assert_eq!(Partial::never_from_an_image(whole), whole);
        }
    }

    #[test]
    fn only_whole_parts_can_be_written() {
        let bits = ClusterBits::DEFAULT;
        assert_eq!(Parts::of(bits, 4096, 8192), Some(Parts(0b110)));
        assert_eq!(Parts::of(bits, 0, 65536), Some(Parts(0xFFFF)));
        assert_eq!(Parts::of(bits, 512, 4096), None);
        assert_eq!(Parts::of(bits, 4096, 512), None);
        assert_eq!(Parts::of(ClusterBits::MIN, 64, 128), Some(Parts(0b110)));
    }

    proptest! {
        #[test]
        fn runs_are_what_the_parts_say(bits in 9u32..=21, written in any::<u16>(), within in any::<u64>()) {
            let bits = ClusterBits::new(bits).unwrap();
            let written = u32::from(written) & ((1 << count(bits)) - 1);
            let partial = Partial { host: HostOffset::new(1 << 30), written, bits };
            let is_written = |at: u64| written >> (at / part_size(bits)) & 1 == 1;
            let run = partial.run(within % bits.size());
            let end = run.start + run.len;
            prop_assert!((run.start..end).step_by(64).all(|at| is_written(at) == run.is_written));
            prop_assert!(end == bits.size() || is_written(end) != run.is_written);
            let missing: u64 = partial.missing().map(|run| run.len).sum();
            prop_assert_eq!(missing, u64::from(count(bits) - written.count_ones()) * part_size(bits));
            prop_assert_eq!(partial.is_complete(), missing == 0);
        }
    }
}
