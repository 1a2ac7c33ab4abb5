//! Delta records in memory: what one layer says of the disk, as sorted runs of units.
//!
//! ```text
//!   full index of layer 128          leaf ──► 512 words
//!   delta records of 129, 130, 131   each puts its runs over them, oldest first
//! ```
//!
//! Invariants: runs are sorted and apart, and end with the disk's last leaf; their words name layer 0, something else than
//! a hole, and data within the layer's file.

use std::ops::Range;

use vmstrata_qcow2::index::{
    DeltaPointer, DeltaRun, IndexError, LEAF_WORDS, MAX_DELTA_RUNS, MAX_DELTAS, PAGE_RUNS, Page, PagePointer,
    Root, decode_runs, encode_runs,
};
use vmstrata_types::{ClusterBits, LayerIndex};

use super::IndexLayer;
use super::tree::Tree;
use crate::entry::{MapEntry, Mapping};
use crate::error::Result;
use crate::levels::Words;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) layer: LayerIndex,
    /// Of the runs: the finest of the index.
    unit: ClusterBits,
    pub(super) pointer: DeltaPointer,
    runs: Box<[DeltaRun]>,
}

impl Delta {
    /// A record that is not written yet.
    pub(super) fn new(layer: LayerIndex, unit: ClusterBits, runs: Vec<DeltaRun>) -> Self {
        let count = u32::try_from(runs.len()).expect("bounded by who collected them");
        let pointer = DeltaPointer { top: PagePointer::HOLE, runs: count };
        Self { layer, unit, pointer, runs: runs.into() }
    }

    /// Writes the record.
    ///
    /// # Errors
    /// Those of `write`.
    pub(super) fn write(&mut self, write: &mut impl FnMut(&Page) -> Result<PagePointer>) -> Result<()> {
        let mut pages = Tree::new(self.pointer.pages());
        for (number, runs) in (0..).zip(self.runs.chunks(PAGE_RUNS)) {
            pages.set(number, write(&encode_runs(runs))?);
        }
        pages.seal(write)?;
        self.pointer.top = pages.top();
        Ok(())
    }

    /// Reads the record of `layer`, of an index with this root, which bounds the number of runs.
    ///
    /// # Errors
    /// Those of `read`, and runs that no writer makes.
    pub(super) fn read(
        layer: LayerIndex,
        pointer: DeltaPointer,
        (root, known): (&Root, &IndexLayer),
        read: &mut impl FnMut(PagePointer, &'static str) -> Result<Box<Page>>,
    ) -> Result<Self> {
        let pages =
            Tree::load(pointer.top, pointer.pages(), layer, &mut |pointer| read(pointer, "inner page"))?;
        let mut runs = Vec::with_capacity(pointer.runs as usize);
        for number in 0..pages.leaves() {
            let page = pages.get(number);
            if page.is_hole() {
                return Err(IndexError::Missing.into());
            }
            let left = pointer.runs as usize - runs.len();
            runs.extend(decode_runs(&*read(page, "delta record")?).take(left));
        }
        check(&runs, root, known)?;
        Ok(Self { pointer, ..Self::new(layer, root.fine_unit, runs) })
    }

    /// Puts what the layer says over page `number` of words for `unit`. A unit of which it says a part is split.
    pub(super) fn put(&self, number: u64, unit: ClusterBits, words: &mut Words) {
        let page = page_bytes(number, unit);
        for run in self.within(&page) {
            let (bytes, entry) = (self.bytes_of(run), MapEntry::from_word(run.word()).of_layer(self.layer));
            let (start, end) = (bytes.start.max(page.start), bytes.end.min(page.end));
            for at in (start >> unit.get()..end.div_ceil(unit.size())).map(|number| number << unit.get()) {
                let entry = match entry.mapping(self.unit) {
                    _ if at < bytes.start || at + unit.size() > bytes.end => MapEntry::split(self.layer),
                    Mapping::Data(layer, host) => MapEntry::data(layer, host + (at - bytes.start), unit),
                    _ => entry,
                };
                words[((at - page.start) >> unit.get()) as usize] = entry.word();
            }
        }
    }

    /// Whether the layer says anything about page `number` of words for `unit`.
    pub(super) fn touches(&self, number: u64, unit: ClusterBits) -> bool {
        self.within(&page_bytes(number, unit)).next().is_some()
    }

    /// Marks the pages of words for `unit` that the layer says anything about.
    pub(super) fn mark(&self, unit: ClusterBits, pages: &mut [bool]) {
        let page = (LEAF_WORDS as u64) << unit.get();
        for run in &self.runs {
            let bytes = self.bytes_of(*run);
            let end = pages.len().min(bytes.end.div_ceil(page) as usize);
            pages[end.min((bytes.start / page) as usize)..end].fill(true);
        }
    }

    /// The runs that say anything about some bytes of the disk.
    fn within(&self, bytes: &Range<u64>) -> impl Iterator<Item = DeltaRun> {
        let end = bytes.end;
        let from = self.runs.partition_point(|run| self.bytes_of(*run).end <= bytes.start);
        self.runs[from..].iter().copied().take_while(move |run| self.bytes_of(*run).start < end)
    }

    fn bytes_of(&self, run: DeltaRun) -> Range<u64> {
        run.first() << self.unit.get()..run.end() << self.unit.get()
    }
}

fn page_bytes(number: u64, unit: ClusterBits) -> Range<u64> {
    let page = (LEAF_WORDS as u64) << unit.get();
    number * page..(number + 1) * page
}

/// Whether an index adds `delta` to the index below, whose records are `below`; otherwise it is a full one, of `leaves` leaves
/// at most.
///
/// An index has at most [`MAX_DELTAS`] records, with [`MAX_DELTA_RUNS`] together, and a record takes at most as many pages
/// as the leaves of a full index might.
pub(super) fn adds_delta(below: &[DeltaPointer], delta: DeltaPointer, leaves: usize) -> bool {
    let known: u32 = below.iter().map(|delta| delta.runs).sum();
    let fits = below.len() < MAX_DELTAS && known + delta.runs <= MAX_DELTA_RUNS;
    fits && delta.pages() <= leaves as u64
}

/// Refuses runs that no writer makes for the layer `known` in an index of this root.
fn check(runs: &[DeltaRun], root: &Root, known: &IndexLayer) -> Result<(), IndexError> {
    let wrong = |field, value| Err(IndexError::Field { field, value });
    let unit = root.fine_unit;
    let end = (root.leaves() * LEAF_WORDS as u64) << (root.unit.get() - unit.get());
    let mut from = 0;
    for run in runs {
        if run.first() < from || run.end() > end {
            return wrong("first unit of a run", run.first());
        }
        if run.units() == 0 || run.units() > DeltaRun::MAX_UNITS {
            return wrong("units of a run", run.units());
        }
        let entry = MapEntry::from_word(run.word());
        let is_known = match entry.mapping(unit) {
            Mapping::Hole => false,
            Mapping::Data(_, host) => {
                let last = host.checked_add((run.units() - 1) << unit.get());
                last.is_some_and(|last| known.has_cluster_at(last))
            }
            Mapping::Zero(_) | Mapping::Compressed(_) | Mapping::Damaged(_) => known.record.tables.is_some(),
        };
        if !is_known || entry.is_split() || entry.layer() != LayerIndex::BASE {
            return wrong("word of a run", run.word());
        }
        from = run.end();
    }
    Ok(())
}

/// Collects the runs of a layer from its entries, unit by unit, in order.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: Vec<DeltaRun>,
    /// There are more than an index may have.
    is_over: bool,
}

impl Runs {
    pub(super) fn push(&mut self, unit: u64, entry: MapEntry) {
        let word = entry.of_layer(LayerIndex::BASE).word();
        if let Some(last) = self.runs.last_mut()
            && last.end() == unit
            && !unit.is_multiple_of(DeltaRun::MAX_UNITS)
            && MapEntry::from_word(last.word()).advanced(last.units()).word() == word
        {
            *last = DeltaRun::new(last.first(), last.units() + 1, last.word());
        } else if self.runs.len() < MAX_DELTA_RUNS as usize {
            self.runs.push(DeltaRun::new(unit, 1, word));
        } else {
            self.is_over = true;
        }
    }

    /// All of them; `None` if they are more than an index may have.
    pub(super) fn finish(self) -> Option<Vec<DeltaRun>> {
        (!self.is_over).then_some(self.runs)
    }
}

#[cfg(test)]
mod tests;
