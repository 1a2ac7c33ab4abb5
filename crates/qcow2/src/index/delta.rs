//! Delta records: what one layer says of the disk, as runs of units, sorted and apart.
//!
//! ```text
//!   byte 0            4 5         7 8                                15
//!   ┌──────────────────┬───────────┬──────────────────────────────────┐
//!   │ first unit       │ units     │ map word of the first unit       │
//!   └──────────────────┴───────────┴──────────────────────────────────┘
//! ```
//!
//! The layer in a word is 0: which layer a record belongs to follows from its place in the root. Runs are packed into
//! pages, which a tree of inner pages leads to.

use super::{PAGE_LEN, Page, PagePointer, le};

/// Most records of an index.
pub const MAX_DELTAS: usize = 64;
/// Most runs of all records of an index: 2 MiB in memory.
pub const MAX_DELTA_RUNS: u32 = 128 << 10;
/// Runs in a page.
pub const PAGE_RUNS: usize = PAGE_LEN / DeltaRun::LEN;

/// Where a delta record lies, and how long it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltaPointer {
    /// Top of the tree of its pages.
    pub top: PagePointer,
    /// Number of its runs.
    pub runs: u32,
}

impl DeltaPointer {
    /// Pages that the runs fill.
    pub const fn pages(&self) -> u64 {
        (self.runs as u64).div_ceil(PAGE_RUNS as u64)
    }
}

/// A run of units of which the layer says one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaRun {
    place: u64,
    word: u64,
}

const FIRST_BITS: u32 = 40;

impl DeltaRun {
    /// Bytes of a run.
    pub const LEN: usize = 16;
    /// Most units of a run. Runs are cut at multiples of this, which are multiples of any larger unit, too.
    pub const MAX_UNITS: u64 = 1 << 23;
    /// Units that a run can begin at.
    pub const FIRST_END: u64 = 1 << FIRST_BITS;

    /// The run of `units` units from `first` on; `word` is that of the first.
    ///
    /// # Panics
    /// When `units` is 0 or more than [`DeltaRun::MAX_UNITS`], or `first` does not fit 40 bits.
    pub const fn new(first: u64, units: u64, word: u64) -> Self {
        assert!(first < Self::FIRST_END && units > 0 && units <= Self::MAX_UNITS);
        Self { place: units << FIRST_BITS | first, word }
    }

    /// The first unit.
    pub const fn first(self) -> u64 {
        self.place & (Self::FIRST_END - 1)
    }

    /// Number of units.
    pub const fn units(self) -> u64 {
        self.place >> FIRST_BITS
    }

    /// The unit after the run.
    pub const fn end(self) -> u64 {
        self.first() + self.units()
    }

    /// The map word of the first unit, without its layer.
    pub const fn word(self) -> u64 {
        self.word
    }
}

/// A page of these runs.
///
/// # Panics
/// When there are more than [`PAGE_RUNS`].
pub fn encode_runs(runs: &[DeltaRun]) -> Box<Page> {
    assert!(runs.len() <= PAGE_RUNS, "a page has room for {PAGE_RUNS}");
    let mut page = Box::new([0; PAGE_LEN]);
    for (bytes, run) in page.chunks_exact_mut(DeltaRun::LEN).zip(runs) {
        bytes[..8].copy_from_slice(&run.place.to_le_bytes());
        bytes[8..].copy_from_slice(&run.word.to_le_bytes());
    }
    page
}

/// The runs of a page, as they are in it: those of the last page are followed by zeros.
pub fn decode_runs(page: &Page) -> impl Iterator<Item = DeltaRun> {
    page.chunks_exact(DeltaRun::LEN)
        .map(|bytes| DeltaRun { place: le::u64(bytes, 0), word: le::u64(bytes, 8) })
}
