//! Pages from the index on disk.
//!
//! The index may be one of a layer further down, when those above it have none yet, or no longer: what they say is then
//! read from their tables, and put over what the index says.

use std::sync::Arc;

use super::FrozenMap;
use super::build::BUILD_FROM_LAYERS;
use crate::cache::{PAGE_SHIFT, PAGE_WORDS};
use crate::error::{IoContext as _, Result};
use crate::index::Index;
use crate::layer::Scratch;

impl FrozenMap {
    /// The same map, reading pages from `index` rather than from the tables of the layers that it answers for: the first
    /// ones. Where too many are left, all tables are better read at once ([`FrozenMap::build`]).
    pub(crate) fn with_index(self, index: Arc<Index>) -> Self {
        let above = self.layers.len().checked_sub(index.layers().len());
        let fits = index.unit() >= self.unit && above.is_some_and(|above| above < BUILD_FROM_LAYERS);
        Self { index: fits.then_some(index), ..self }
    }

    /// As [`FrozenMap::with_index`], for a map that is in use; both have the same pages in memory.
    pub(crate) fn indexed(&self, index: Arc<Index>) -> Self {
        let layers = self.layers.iter().map(|visible| Arc::clone(&visible.layer)).collect();
        self.over_layers(layers).with_index(index)
    }

    /// The same map on disk, if there is one, for all of the layers.
    pub(crate) fn index(&self) -> Option<&Arc<Index>> {
        self.index.as_ref().filter(|index| index.layers().len() == self.layers.len())
    }

    /// Whether pages come from an index, if only those of the first layers.
    pub(crate) fn has_index(&self) -> bool {
        self.index.is_some()
    }

    /// A page of the index on disk; where that does not hold, what the tables say.
    pub(super) fn indexed_page(
        &self,
        index: &Index,
        first_unit: u64,
        scratch: &mut Scratch,
    ) -> Result<[u64; PAGE_WORDS]> {
        let mut words = [0; PAGE_WORDS];
        let read = index.read_page(first_unit >> PAGE_SHIFT, self.unit, &mut words, |layer, at, page| {
            let store = self.files.store(self.layer(layer))?;
            store.read_exact(page, at).while_trying("read the index").map_err(|error| error.at(at))
        });
        if let Err(error) = read {
            if error.is_change() {
                // The tables of that layer would say the same.
                return Err(error);
            }
            tracing::warn!(%error, "a page of the index on disk is not used");
            return self.scan_page(0..self.layers.len(), first_unit, scratch);
        }
        let above = index.layers().len()..self.layers.len();
        if !above.is_empty() {
            let newer = self.scan_page(above, first_unit, scratch)?;
            words.iter_mut().zip(newer).for_each(|(word, newer)| *word = newer.max(*word));
        }
        Ok(words)
    }
}
