//! What the layers of one state say about a region, and where they say anything at all.

use std::sync::Arc;

use vmstrata_disk::{FrozenLayer, Result};
use vmstrata_qcow2::{L2Entry, SubclusterState, Subclusters};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use super::states::{Side, Visible};

/// What the newest layer above the common one that has a unit says of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Said {
    /// None has it: the common part counts, as far as it shows.
    #[default]
    Nothing,
    Data,
    Zero,
}

/// Units in a region at most.
const UNITS_MAX: u64 = 64 << 10;
/// L1 entries read in one go: with thousands of layers between the states, small.
const BATCH: usize = 512;

/// Only qcow2 layers have backing files.
const QCOW2: &str = "a layer with a backing file is qcow2";

/// The layers of a state, read from left to right.
pub(super) struct Reader {
    side: Arc<Side>,
    cursors: Vec<Cursor>,
    said: Vec<Said>,
}

impl Reader {
    pub(super) fn new(side: &Arc<Side>) -> Self {
        let cursors = side.layers.iter().map(|_| Cursor::default()).collect();
        Self { side: Arc::clone(side), cursors, said: Vec::new() }
    }

    /// The first place at or after `at` for which a layer that shows there has an L2 table.
    ///
    /// # Errors
    /// An L1 table that cannot be read.
    pub(super) fn next_table(&mut self, at: GuestOffset) -> Result<Option<GuestOffset>> {
        let mut first: Option<GuestOffset> = None;
        for (visible, cursor) in self.side.layers.iter().zip(&mut self.cursors) {
            let found = cursor.next(visible, at)?;
            first = [first, found].into_iter().flatten().min();
        }
        Ok(first)
    }

    /// What the layers say of each unit of `range`, which no layer's end divides.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(super) fn read(&mut self, range: GuestRange, unit: ClusterBits) -> Result<&[Said]> {
        let first = range.start.get() >> unit.get();
        let units = ((range.end().get() - 1) >> unit.get()) + 1 - first;
        self.said.clear();
        self.said.resize(usize::try_from(units).expect("a region is small"), Said::Nothing);
        for (visible, cursor) in self.side.layers.iter().zip(&mut self.cursors) {
            let shows = visible.end > range.start.get();
            let next = if shows { cursor.next(visible, range.start)? } else { None };
            if next.is_some_and(|next| next < range.end()) {
                mark(&visible.layer, range, unit, &mut self.said)?;
            }
        }
        Ok(&self.said)
    }
}

/// Enters what a layer says of the units of `range` where no newer one has said anything.
fn mark(layer: &FrozenLayer, range: GuestRange, unit: ClusterBits, said: &mut [Said]) -> Result<()> {
    let first = range.start.get() >> unit.get();
    let cluster_bits = layer.cluster_bits().expect(QCOW2);
    let mut put = |run: GuestRange, says: Said| {
        let within = |at: u64| (at >> unit.get()).saturating_sub(first).min(said.len() as u64) as usize;
        let units = within(run.start.get())..within(run.end().get());
        said[units].iter_mut().filter(|unit| **unit == Said::Nothing).for_each(|unit| *unit = says);
    };
    layer.entries(range, |start, entry| {
        let cluster = GuestRange::new(start, cluster_bits.size());
        match entry {
            Ok(L2Entry::Unallocated) => {}
            Ok(L2Entry::Zero { .. }) => put(cluster, Said::Zero),
            // Reading what is damaged gives the error.
            Ok(L2Entry::Data { .. } | L2Entry::Compressed { .. }) | Err(_) => put(cluster, Said::Data),
            Ok(L2Entry::Subclusters { states, .. }) => {
                let len = cluster_bits.size() / u64::from(Subclusters::COUNT);
                for (first, count, state) in states.runs() {
                    let run = GuestRange::new(start + u64::from(first) * len, u64::from(count) * len);
                    match state {
                        SubclusterState::Unallocated => {}
                        SubclusterState::Zero => put(run, Said::Zero),
                        SubclusterState::Allocated => put(run, Said::Data),
                    }
                }
            }
        }
    })
}

/// The end of the region that begins at `at`.
pub(super) fn region_end(at: GuestOffset, unit: ClusterBits) -> u64 {
    at.align_down(unit).get().saturating_add(UNITS_MAX << unit.get())
}

/// Where a layer has L2 tables, looked at in batches of its L1 table.
#[derive(Default)]
struct Cursor {
    first: usize,
    has_table: Vec<bool>,
}

impl Cursor {
    fn next(&mut self, visible: &Visible, at: GuestOffset) -> Result<Option<GuestOffset>> {
        let geometry = visible.layer.geometry().expect(QCOW2);
        if at.get() >= visible.end {
            return Ok(None);
        }
        let last = geometry.l1_index(GuestOffset::new(visible.end - 1));
        let mut index = geometry.l1_index(at);
        while index <= last {
            if !(self.first..self.first + self.has_table.len()).contains(&index) {
                (self.first, self.has_table) = (index, visible.layer.has_tables(index, BATCH)?);
                if self.has_table.is_empty() {
                    break;
                }
            }
            let batch = &self.has_table[index - self.first..];
            if let Some(skip) = batch.iter().position(|has_table| *has_table) {
                let found = geometry.guest_offset(index + skip, 0).max(at);
                return Ok((found.get() < visible.end).then_some(found));
            }
            index += batch.len();
        }
        Ok(None)
    }
}
