//! Map words from the tables of layers, leaf by leaf and level by level: what an index is made from, and what it is checked
//! against.

use std::collections::BTreeMap;
use std::ops::Range;

use vmstrata_qcow2::index::{DeltaRun, LEAF_WORDS};
use vmstrata_store::Gate;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, LayerIndex};

use super::IndexLayer;
use super::delta::Runs;
use crate::entry::MapEntry;
use crate::error::{Error, ErrorKind, Result};
use crate::fold::Merge;
use crate::layer::Scratch;
use crate::levels::{Units, Words};
use crate::opener::{Opener, Role};

/// Leaves merged together: a bound on memory, 4 MiB.
pub(super) const WINDOW: u64 = 1024;

/// The units of the map of these layers.
pub(super) fn units_of(layers: &[IndexLayer]) -> Units {
    Units::of_tables(layers.iter().filter_map(|layer| Some(layer.record.tables.as_ref()?.geometry())))
}

/// Reads tables of layers.
pub(super) struct Merger<'a> {
    pub(super) layers: &'a [IndexLayer],
    pub(super) unit: ClusterBits,
    pub(super) gate: &'a Gate,
    pub(super) opener: &'a dyn Opener,
}

impl Merger<'_> {
    /// The leaves in `window` about which the layers in `from..` say anything, with what they say.
    ///
    /// # Errors
    /// A layer that cannot be opened or read, that is not what it was, or whose tables break the format.
    pub(super) fn merge(&self, from: usize, window: Range<u64>) -> Result<BTreeMap<u64, Box<Words>>> {
        let mut leaves: BTreeMap<u64, Box<Words>> = BTreeMap::new();
        let mut scratch = Scratch::default();
        for index in from..self.layers.len() {
            self.visit(index, &window, &mut scratch, &mut |unit, entry| {
                let words =
                    leaves.entry(unit / LEAF_WORDS as u64).or_insert_with(|| Box::new([0; LEAF_WORDS]));
                let word = &mut words[(unit % LEAF_WORDS as u64) as usize];
                *word = (*word).max(entry.word());
            })?;
        }
        Ok(leaves)
    }

    /// What the newest layer says of the disk's `leaves`, as runs; `None` if they are more than an index may have.
    ///
    /// # Errors
    /// As [`Merger::merge`].
    pub(super) fn runs(&self, leaves: u64) -> Result<Option<Vec<DeltaRun>>> {
        let mut runs = Runs::default();
        let visit = &mut |unit, entry| runs.push(unit, entry);
        self.visit(self.layers.len() - 1, &(0..leaves), &mut Scratch::default(), visit)?;
        Ok(runs.finish())
    }

    /// Calls `visit` with every unit in `window` that a layer says anything about, in order.
    fn visit(
        &self,
        index: usize,
        window: &Range<u64>,
        scratch: &mut Scratch,
        visit: &mut impl FnMut(u64, MapEntry),
    ) -> Result<()> {
        let known = &self.layers[index];
        let layer = known.layer();
        let index = LayerIndex::new(u16::try_from(index).expect("chains are shorter than 65,536"));
        let Some(merge) = Merge::of(&layer, index, self.unit) else { return Ok(()) };
        let opened = self.opener.open(&known.path, Role::Frozen, self.gate)?;
        if (opened.identity.file, opened.identity.mtime_ns) != (known.identity.file, known.identity.mtime_ns)
        {
            return Err(Error::from(ErrorKind::Changed).in_file(&known.path));
        }
        let units = window.start * LEAF_WORDS as u64..window.end * LEAF_WORDS as u64;
        let start = units.start << self.unit.get();
        let len = (units.end - units.start) << self.unit.get();
        let range = GuestRange::new(GuestOffset::new(start), len);
        let scanned = layer.scan(&*opened.store, range, scratch, &mut |cluster, raw| {
            let entries = merge.entries(cluster, raw).clip(units.clone());
            entries
                .filter(|(_, entry)| *entry != MapEntry::HOLE)
                .for_each(|(unit, entry)| visit(unit, entry));
        });
        scanned.map_err(|error| error.in_layer(index).in_file(&known.path))
    }
}

/// The windows that cover `leaves` leaves.
pub(super) fn windows(leaves: u64) -> impl Iterator<Item = Range<u64>> {
    (0..leaves.div_ceil(WINDOW)).map(move |number| number * WINDOW..leaves.min((number + 1) * WINDOW))
}
