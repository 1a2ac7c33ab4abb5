//! The map over a layer that was active a moment ago.
//!
//! When a snapshot is taken, what was active becomes the newest frozen layer at once, while changes of its tables are
//! still on their way to its file. Until they are there, the map asks the layer itself, which knows them, and takes
//! what lies below from the map of before: nothing is read again, however long the chain.

use std::ops::Range;
use std::sync::Arc;

use vmstrata_store::Planted;
use vmstrata_types::GuestOffset;

use super::FrozenMap;
use crate::active::Active;
use crate::cache::{Owner, PAGE_SHIFT, PAGE_WORDS, PageCache};
use crate::error::Result;
use crate::files::FileTable;
use crate::fold::Merge;
use crate::layer::{Layer, Scratch};

/// Layers of which the active one is about to be the newest of a map.
pub(crate) trait Before: std::fmt::Debug + Send + Sync {
    /// The map of the frozen ones.
    fn frozen(&self) -> Option<&Arc<FrozenMap>>;

    /// The active one; `None` for a raw file, whose bytes need no tables.
    fn active(&self) -> Option<&Active>;
}

/// What a map needs while its newest layer's tables are not all in its file.
#[derive(Debug)]
pub(super) struct Fresh {
    /// The layers of before; their active layer is this map's newest.
    before: Arc<dyn Before>,
}

impl Fresh {
    /// The map of before, where its pages can be taken over.
    fn below(&self, map: &FrozenMap) -> Option<&Arc<FrozenMap>> {
        self.before.frozen().filter(|below| below.unit == map.unit)
    }

    fn active(&self) -> Option<&Active> {
        self.before.active()
    }
}

impl FrozenMap {
    /// The map of `before`'s layers, all frozen; `newest` is what is active in them.
    ///
    /// # Errors
    /// As [`FrozenMap::new`].
    pub(crate) fn over(
        before: Arc<dyn Before>,
        newest: Arc<Layer>,
        (owner, cache): (Owner, Arc<PageCache>),
        files: Arc<FileTable>,
    ) -> Result<Self> {
        let below = before.frozen().into_iter().flat_map(|map| map.layers().cloned());
        let layers: Vec<Arc<Layer>> = below.chain([newest]).collect();
        let mut map = Self::new(owner, layers, cache, files)?;
        map.fresh = Some(Fresh { before });
        Ok(map)
    }

    /// The same map once the tables of its newest layer are in its file, as which it is `newest` now.
    ///
    /// It has the pages that the map of before has in memory: making them again would take reading the tables of every layer.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn finalized(&self, newest: Arc<Layer>) -> Result<Self> {
        let mut layers: Vec<Arc<Layer>> = self.layers().cloned().collect();
        *layers.last_mut().expect("a frozen chain has a layer") = newest;
        let mut finalized = self.over_layers(layers);
        if let Some(fresh) = &self.fresh
            && let (Some(below), Some(active)) = (fresh.below(self), fresh.active())
        {
            let is_own = |page| self.is_changed(below, active, page);
            finalized.pages = self.pages.over(&below.pages, self.page_count(), is_own)?;
        }
        Ok(finalized)
    }

    /// Whether a page says something else than `below`'s. If that one is in memory, this one takes its place.
    fn is_changed(&self, below: &Arc<Self>, active: &Active, page: u64) -> Result<bool> {
        let (old, new, first_unit) = (below.pages.key(page), self.pages.key(page), page << PAGE_SHIFT);
        let mut clusters = self.clusters(active, first_unit);
        let entries = active.page(clusters.start)?;
        // Of a disk that became shorter, the pages of before say more.
        let mut is_empty = || {
            Planted::StalePage.is_there()
                || clusters.all(|cluster| active.entry_of(&entries, cluster).is_empty())
        };
        if self.size >= below.size && is_empty() {
            self.cache.forget_page(new);
            return Ok(false);
        }
        if self.cache.contains(old) {
            self.fill(GuestOffset::new(first_unit << self.unit.get()))?;
            if Arc::strong_count(below) == 1 && below.pages.has_alone(page) {
                self.cache.forget_page(old);
            }
        }
        Ok(true)
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
        if let Some(active) = fresh.active() {
            let entries = active.page(self.clusters(active, first_unit).start)?;
            self.put_active(active, first_unit, &mut words, &entries);
        }
        Ok(words)
    }

    /// Makes the page that holds `at`, if all that it is made of is in memory, and returns its word at `slot`.
    ///
    /// The first writes after a snapshot all come here at once: none of them should wait for a worker, nor be put off.
    #[cold]
    pub(super) fn word_made_now(&self, at: GuestOffset) -> Option<u64> {
        let fresh = self.fresh.as_ref()?;
        let (key, slot) = self.key(at);
        let first_unit = (at.get() >> self.unit.get()) - slot as u64;
        let _filling = self.filling.try_lock()?;
        if !self.cache.contains(key) {
            self.cache.fill(key, &self.fresh_page_now(fresh, first_unit)?);
        }
        self.cache.get(key, slot)
    }

    /// As [`FrozenMap::fresh_page`], from memory alone.
    fn fresh_page_now(&self, fresh: &Fresh, first_unit: u64) -> Option<[u64; PAGE_WORDS]> {
        let mut words = [0; PAGE_WORDS];
        let is_raw = |map: &FrozenMap| map.layers.len() == 1 && map.base_is_raw();
        // A raw base has no words.
        if fresh.before.frozen().is_some_and(|map| !is_raw(map)) {
            let below = fresh.below(self)?;
            below.cache.copy(below.pages.key(first_unit >> PAGE_SHIFT), &mut words).then_some(())?;
        }
        if let Some(active) = fresh.active() {
            let entries = active.page_now(self.clusters(active, first_unit).start)?;
            self.put_active(active, first_unit, &mut words, &entries);
        }
        Some(words)
    }

    /// Puts over a page's words what the layer that was active says of its units.
    fn put_active(
        &self,
        active: &Active,
        first_unit: u64,
        words: &mut [u64; PAGE_WORDS],
        entries: &[u64; PAGE_WORDS],
    ) {
        let newest = self.layers.len() - 1;
        let merge = Merge::new(&self.layers[newest], newest, self.unit).expect("an active layer with tables");
        let bits = active.tables.geometry.cluster_bits;
        for cluster in self.clusters(active, first_unit) {
            let raw = active.entry_of(entries, cluster);
            if !raw.is_empty() {
                merge.put(GuestOffset::new(cluster << bits.get()), raw, first_unit, words);
            }
        }
    }

    /// The clusters of the layer that was active which a page's units lie in: at most a page of entries, and within one.
    fn clusters(&self, active: &Active, first_unit: u64) -> Range<u64> {
        let bits = active.tables.geometry.cluster_bits;
        let first = first_unit << self.unit.get();
        let end = (first + ((PAGE_WORDS as u64) << self.unit.get())).min(self.size);
        first >> bits.get()..end.div_ceil(bits.size())
    }

    /// The words of a page, through the cache.
    pub(super) fn page(&self, first_unit: u64) -> Result<[u64; PAGE_WORDS]> {
        let mut words = [0; PAGE_WORDS];
        while !self.cache.copy(self.pages.key(first_unit >> PAGE_SHIFT), &mut words) {
            self.fill(GuestOffset::new(first_unit << self.unit.get()))?;
        }
        Ok(words)
    }
}
