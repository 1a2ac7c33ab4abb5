//! What the layers of one state say about a region, and where they say anything at all.

use std::sync::Arc;

use vmstrata_qcow2::L2Entry;
use vmstrata_store::Store;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use super::states::{Side, Visible};
use crate::error::{IoContext as _, Result};
use crate::layer::{Layer, Scratch, words};
use crate::resources::Resources;

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

/// The layers of a state, read from left to right.
pub(super) struct Reader<'a> {
    side: &'a Side,
    cursors: Vec<Cursor>,
    said: Vec<Said>,
    scratch: Scratch,
}

impl<'a> Reader<'a> {
    pub(super) fn new(side: &'a Side) -> Self {
        let cursors = side.layers.iter().map(|_| Cursor::default()).collect();
        Self { side, cursors, said: Vec::new(), scratch: Scratch::default() }
    }

    /// The first place at or after `at` for which a layer that shows there has an L2 table.
    ///
    /// # Errors
    /// An L1 table that cannot be read.
    pub(super) fn next_table(
        &mut self,
        at: GuestOffset,
        resources: &Resources,
    ) -> Result<Option<GuestOffset>> {
        let mut first: Option<GuestOffset> = None;
        for (visible, cursor) in self.side.layers.iter().zip(&mut self.cursors) {
            let found = cursor.next(visible, at, resources)?;
            first = [first, found].into_iter().flatten().min();
        }
        Ok(first)
    }

    /// What the layers say of each unit of `range`, which no layer's end divides.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(super) fn read(
        &mut self,
        range: GuestRange,
        unit: ClusterBits,
        resources: &Resources,
    ) -> Result<&[Said]> {
        let first = range.start.get() >> unit.get();
        let units = ((range.end().get() - 1) >> unit.get()) + 1 - first;
        self.said.clear();
        self.said.resize(usize::try_from(units).expect("a region is small"), Said::Nothing);
        for (visible, cursor) in self.side.layers.iter().zip(&mut self.cursors) {
            let shows = visible.end > range.start.get();
            let Some(next) = (if shows { cursor.next(visible, range.start, resources)? } else { None })
            else {
                continue;
            };
            if next < range.end() {
                mark(&visible.layer, range, unit, first, &mut self.said, &mut self.scratch, resources)?;
            }
        }
        Ok(&self.said)
    }
}

/// Enters what a layer says where no newer one has said anything.
fn mark(
    layer: &Arc<Layer>,
    range: GuestRange,
    unit: ClusterBits,
    first: u64,
    said: &mut [Said],
    scratch: &mut Scratch,
    resources: &Resources,
) -> Result<()> {
    let tables = layer.tables.as_ref().expect("a layer that stands on another one is qcow2");
    let store = resources.files().store(layer)?;
    let per_cluster = tables.geometry.cluster_bits.size() >> unit.get();
    let scanned = layer.scan(&**store, range, scratch, &mut |cluster, raw| {
        let says = match tables.entries.l2(raw) {
            Ok(L2Entry::Unallocated) => return,
            Ok(L2Entry::Zero { .. }) => Said::Zero,
            // Whoever reads what is damaged is told so.
            Ok(L2Entry::Data { .. } | L2Entry::Compressed { .. }) | Err(_) => Said::Data,
        };
        let start = cluster.get() >> unit.get();
        let from = start.saturating_sub(first).min(said.len() as u64) as usize;
        let to = (start + per_cluster).saturating_sub(first).min(said.len() as u64) as usize;
        said[from..to].iter_mut().filter(|unit| **unit == Said::Nothing).for_each(|unit| *unit = says);
    });
    scanned.map_err(|error| error.in_file(&layer.path))
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
    fn next(
        &mut self,
        visible: &Visible,
        at: GuestOffset,
        resources: &Resources,
    ) -> Result<Option<GuestOffset>> {
        let layer = &visible.layer;
        let tables = layer.tables.as_ref().expect("a layer that stands on another one is qcow2");
        if at.get() >= visible.end {
            return Ok(None);
        }
        let last =
            tables.geometry.l1_index(GuestOffset::new(visible.end - 1)).min(tables.l1_entries as usize - 1);
        let mut index = tables.geometry.l1_index(at);
        while index <= last {
            if !(self.first..self.first + self.has_table.len()).contains(&index) {
                let store = resources.files().store(layer)?;
                let count = BATCH.min(tables.l1_entries as usize - index);
                self.load(&**store, layer, index, count).map_err(|error| error.in_file(&layer.path))?;
            }
            let batch = &self.has_table[index - self.first..];
            if let Some(skip) = batch.iter().position(|has_table| *has_table) {
                let found = tables.geometry.guest_offset(index + skip, 0).max(at);
                return Ok((found.get() < visible.end).then_some(found));
            }
            index += batch.len();
        }
        Ok(None)
    }

    fn load(&mut self, store: &dyn Store, layer: &Layer, first: usize, count: usize) -> Result<()> {
        let tables = layer.tables.as_ref().expect("a layer that stands on another one is qcow2");
        let at = tables.l1_at + first as u64 * 8;
        let mut bytes = vec![0; count * 8];
        store.read_padded(&mut bytes, at).while_trying("read the L1 table").map_err(|error| error.at(at))?;
        self.first = first;
        self.has_table.clear();
        self.has_table.extend(words(&bytes).map(|raw| raw != 0));
        Ok(())
    }
}
