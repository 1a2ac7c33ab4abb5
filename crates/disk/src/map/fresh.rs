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
use crate::cache::{Owner, PAGE_WORDS, PageCache};
use crate::error::Result;
use crate::files::FileTable;
use crate::fold::Merge;
use crate::layer::{Layer, Scratch};
use crate::levels::{Level, MapPage, Words};

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
    /// The map of the layers below; `None` if none of them has tables.
    fn below(&self) -> Option<&Arc<FrozenMap>> {
        self.before.frozen().filter(|map| map.layers.len() > 1 || !map.base_is_raw())
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
            && let (Some(below), Some(active)) = (fresh.below(), fresh.active())
        {
            let count = |level| {
                let is_shared = below.units.get(level) == self.units.get(level);
                (level, if is_shared { self.units.pages(level, self.size) } else { 0 })
            };
            let mut changed = Vec::new();
            let is_own = |page: MapPage| -> Result<bool> {
                let over = self.units.over(self.units.of(page.level), page.number).0.number;
                // Nothing of a page has changed where the one of the first level over it has not.
                let may_be = page.level == Level::First || changed.get(over as usize).is_none_or(|is| *is);
                let is_own = self.is_changed(below, active, page, may_be)?;
                if page.level == Level::First {
                    changed.push(is_own);
                }
                Ok(is_own)
            };
            finalized.pages =
                self.pages.over(&below.pages, [Level::First, Level::Second].map(count), is_own)?;
        }
        Ok(finalized)
    }

    /// Whether a page says something else than `below`'s, if it `may_be`. If that one is in memory, this one takes its place.
    fn is_changed(&self, below: &Arc<Self>, active: &Active, page: MapPage, may_be: bool) -> Result<bool> {
        let (old, new) = (below.pages.key(page), self.pages.key(page));
        // Of a disk that became shorter, the pages of before say more.
        let may_be = may_be && (self.size < below.size || !self.is_empty_in(active, page)?);
        if !may_be {
            self.cache.forget_page(new);
            return Ok(false);
        }
        if self.cache.contains(old) {
            self.fill(page)?;
            if Arc::strong_count(below) == 1 && below.pages.has_alone(page) {
                self.cache.forget_page(old);
            }
        }
        Ok(true)
    }

    /// Whether the layer that was active says nothing of a page's units.
    fn is_empty_in(&self, active: &Active, page: MapPage) -> Result<bool> {
        let mut is_empty = true;
        for clusters in active.by_page(self.clusters(active, page)) {
            let entries = active.page(clusters.start)?;
            is_empty &= clusters.into_iter().all(|cluster| active.entry_of(&entries, cluster).is_empty());
        }
        Ok(is_empty || Planted::StalePage.is_there())
    }

    /// A page from the map of before and from the layer that was active in it.
    pub(super) fn fresh_page(&self, fresh: &Fresh, page: MapPage, scratch: &mut Scratch) -> Result<Words> {
        let below = self.words_below(fresh, page, |below, page| below.page(page));
        let mut words = match below {
            Some(words) => words?,
            None => self.scan_page(0..self.layers.len() - 1, page, scratch)?,
        };
        self.put_active(fresh, page, &mut words, |active, cluster| active.page(cluster))?;
        Ok(words)
    }

    /// Makes a page, if all that it is made of is in memory, and returns its word at `slot`.
    ///
    /// The first writes after a snapshot all come here at once: none of them should wait for a worker, nor be put off.
    #[cold]
    pub(super) fn word_made_now(&self, page: MapPage, slot: usize) -> Option<u64> {
        let fresh = self.fresh.as_ref()?;
        let key = self.pages.key(page);
        let _filling = self.filling.try_lock()?;
        if !self.cache.contains(key) {
            self.cache.fill(key, &self.fresh_page_now(fresh, page)?);
        }
        self.cache.get(key, slot)
    }

    /// As [`FrozenMap::fresh_page`], from memory alone.
    fn fresh_page_now(&self, fresh: &Fresh, page: MapPage) -> Option<Words> {
        let below = self.words_below(fresh, page, |below, page| {
            let mut words = [0; PAGE_WORDS];
            below.cache.copy(below.pages.key(page), &mut words).then_some(words).ok_or(())
        });
        let mut words = below?.ok()?;
        self.put_active(fresh, page, &mut words, |active, cluster| active.page_now(cluster).ok_or(()))
            .ok()?;
        Some(words)
    }

    /// The words of a page by the map of the layers below, whose pages `read` gets; `None` where that map's units are too coarse.
    fn words_below<E>(
        &self,
        fresh: &Fresh,
        page: MapPage,
        read: impl Fn(&Self, MapPage) -> Result<Words, E>,
    ) -> Option<Result<Words, E>> {
        let Some(below) = fresh.below() else { return Some(Ok([0; PAGE_WORDS])) };
        let unit = self.units.of(page.level);
        let is_told = below.units.answer_for(unit);
        is_told.then(|| below.units.words(unit, page.number, |page| read(below, page)))
    }

    /// Puts over a page's words what the layer that was active says of its units, from its entries, which `read` gets.
    fn put_active<E>(
        &self,
        fresh: &Fresh,
        page: MapPage,
        words: &mut Words,
        read: impl Fn(&Active, u64) -> Result<[u64; PAGE_WORDS], E>,
    ) -> Result<(), E> {
        let Some(active) = fresh.active() else { return Ok(()) };
        let newest = self.layers.len() - 1;
        let merge = Merge::new(&self.layers[newest], newest, self.units.of(page.level));
        let merge = merge.expect("an active layer with tables");
        let bits = active.tables.geometry.cluster_bits;
        for clusters in active.by_page(self.clusters(active, page)) {
            let entries = read(active, clusters.start)?;
            for cluster in clusters {
                let raw = active.entry_of(&entries, cluster);
                if !raw.is_empty() {
                    merge.put(GuestOffset::new(cluster << bits.get()), raw, page, words);
                }
            }
        }
        Ok(())
    }

    /// The clusters of the layer that was active which a page's units lie in.
    fn clusters(&self, active: &Active, page: MapPage) -> Range<u64> {
        let bits = active.tables.geometry.cluster_bits;
        let range = self.units.range(page);
        let end = range.end().get().min(self.size);
        range.start.get() >> bits.get()..end.div_ceil(bits.size())
    }
}
