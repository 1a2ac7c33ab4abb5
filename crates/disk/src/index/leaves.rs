//! Map words from the tables of layers, leaf by leaf and level by level: what an index is made from, and what it is checked
//! against.

use std::collections::BTreeMap;
use std::ops::Range;

use vmstrata_qcow2::index::LEAF_WORDS;
use vmstrata_store::{Gate, Store};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, LayerIndex};

use super::IndexLayer;
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
        for (index, layer) in self.layers.iter().enumerate().skip(from) {
            if layer.record.tables.is_none() {
                continue;
            }
            let opened = self.opener.open(&layer.path, Role::Frozen, self.gate)?;
            if (opened.identity.file, opened.identity.mtime_ns)
                != (layer.identity.file, layer.identity.mtime_ns)
            {
                return Err(Error::from(ErrorKind::Changed).in_file(&layer.path));
            }
            let index = LayerIndex::new(u16::try_from(index).expect("chains are shorter than 65,536"));
            let merged = self.merge_layer(index, layer, &*opened.store, &window, &mut leaves, &mut scratch);
            merged.map_err(|error| error.in_layer(index).in_file(&layer.path))?;
        }
        Ok(leaves)
    }

    fn merge_layer(
        &self,
        index: LayerIndex,
        layer: &IndexLayer,
        store: &dyn Store,
        window: &Range<u64>,
        leaves: &mut BTreeMap<u64, Box<Words>>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let layer = layer.layer();
        let Some(merge) = Merge::of(&layer, index, self.unit) else { return Ok(()) };
        let units = window.start * LEAF_WORDS as u64..window.end * LEAF_WORDS as u64;
        let start = units.start << self.unit.get();
        let len = (units.end - units.start) << self.unit.get();
        let range = GuestRange::new(GuestOffset::new(start), len);
        layer.scan(store, range, scratch, &mut |cluster, raw| {
            for (unit, entry) in merge.entries(cluster, raw).clip(units.clone()) {
                if entry == MapEntry::HOLE {
                    continue;
                }
                let words =
                    leaves.entry(unit / LEAF_WORDS as u64).or_insert_with(|| Box::new([0; LEAF_WORDS]));
                let word = &mut words[(unit % LEAF_WORDS as u64) as usize];
                *word = (*word).max(entry.word());
            }
        })
    }
}

/// The windows that cover `leaves` leaves.
pub(super) fn windows(leaves: u64) -> impl Iterator<Item = Range<u64>> {
    (0..leaves.div_ceil(WINDOW)).map(move |number| number * WINDOW..leaves.min((number + 1) * WINDOW))
}
