//! The map over a layer that was active a moment ago.
//!
//! When a snapshot is taken, what was active becomes the newest frozen layer at once, while changes of its tables are
//! still on their way to its file. Until they are there, the map asks the layer itself, which knows them, and takes
//! what lies below from the map of before: nothing is read again, however long the chain.

use std::sync::Arc;

use vmstrata_types::GuestOffset;

use super::FrozenMap;
use super::merge::Merge;
use crate::active::Active;
use crate::cache::{Owner, PAGE_SHIFT, PAGE_WORDS};
use crate::error::Result;
use crate::layer::{Layer, Scratch};
use crate::layers::{Layers, Top};

/// What a map needs while its newest layer's tables are not all in its file.
#[derive(Debug)]
pub(super) struct Fresh {
    /// The layers of before; their active layer is this map's newest.
    before: Arc<Layers>,
}

impl Fresh {
    /// The map of before, where its pages can be taken over.
    fn below(&self, map: &FrozenMap) -> Option<&FrozenMap> {
        self.before.frozen.as_deref().filter(|below| below.unit == map.unit)
    }

    fn active(&self) -> Option<&Active> {
        match &self.before.top {
            Top::Qcow2(active) => Some(active),
            // Its bytes need no tables.
            Top::Raw(_) | Top::Frozen => None,
        }
    }
}

impl FrozenMap {
    /// The map of `before`'s layers, all frozen; `newest` is what is active in them.
    ///
    /// # Errors
    /// As [`FrozenMap::new`].
    pub(crate) fn over(before: &Arc<Layers>, newest: Arc<Layer>, owner: Owner) -> Result<Self> {
        let resources = &before.resources;
        let below = before.frozen.iter().flat_map(|map| map.layers().cloned());
        let layers: Vec<Arc<Layer>> = below.chain([newest]).collect();
        let mut map = Self::new(owner, layers, Arc::clone(resources.cache()), Arc::clone(resources.files()))?;
        map.fresh = Some(Fresh { before: Arc::clone(before) });
        Ok(map)
    }

    /// The same map once the tables of its newest layer are in its file, as which it is `newest` now.
    ///
    /// Pages that the map of before had in memory are taken over first: making them again would take reading the tables
    /// of every layer.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn settled(&self, newest: Arc<Layer>) -> Result<Self> {
        if let Some(below) = self.fresh.as_ref().and_then(|fresh| fresh.below(self)) {
            for page in 0..self.size.div_ceil(self.unit.size()).div_ceil(PAGE_WORDS as u64) {
                if self.cache.contains(below.owner.key(page)) {
                    self.fill(GuestOffset::new(page << PAGE_SHIFT << self.unit.get()))?;
                }
            }
        }
        let mut layers: Vec<Arc<Layer>> = self.layers().cloned().collect();
        *layers.last_mut().expect("a frozen chain has a layer") = newest;
        Ok(self.over_layers(layers))
    }

    /// A page from the map of before and from the layer that was active in it.
    pub(super) fn fresh_page(
        &self,
        fresh: &Fresh,
        first_unit: u64,
        scratch: &mut Scratch,
    ) -> Result<[u64; PAGE_WORDS]> {
        let newest = self.layers.len() - 1;
        let mut words = match fresh.below(self) {
            Some(below) => below.page(first_unit)?,
            None => self.scan_page(0..newest, first_unit, scratch)?,
        };
        let Some(active) = fresh.active() else { return Ok(words) };
        let visible = &self.layers[newest];
        let merge = Merge::new(visible, newest, self.unit).expect("an active layer with tables");
        let bits = active.tables.geometry.cluster_bits;
        let first = first_unit << self.unit.get();
        let end = (first + ((PAGE_WORDS as u64) << self.unit.get())).min(visible.layer.size);
        for cluster in first >> bits.get()..end.div_ceil(bits.size()) {
            let raw = active.entry(cluster)?;
            if raw != 0 {
                merge.put(GuestOffset::new(cluster << bits.get()), raw, first_unit, &mut words);
            }
        }
        Ok(words)
    }

    /// The words of a page, through the cache.
    pub(super) fn page(&self, first_unit: u64) -> Result<[u64; PAGE_WORDS]> {
        let mut words = [0; PAGE_WORDS];
        while !self.cache.copy(self.owner.key(first_unit >> PAGE_SHIFT), &mut words) {
            self.fill(GuestOffset::new(first_unit << self.unit.get()))?;
        }
        Ok(words)
    }
}
