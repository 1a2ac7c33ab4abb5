//! The map of a frozen chain: for every unit of the disk, which layer holds its newest version, and where.
//!
//! ```text
//!   guest offset ──► unit ──► page of 512 units ──► metadata cache ──► MapEntry ──► Source
//!                                   │ miss
//!                                   └──► index on disk, or L1 and L2 tables of the layers ──► fill
//! ```
//!
//! One lookup answers for the whole chain, however many layers there are (sQemu §5.1, principle 1), and the pages
//! live in one cache for all disks (principle 2). The unit is the smallest cluster size of the chain, so mixed
//! chains need no special road; where a layer has a part of a unit, a second level has words for parts ([`crate::levels`]).
//! Maps are immutable, and disks on the same frozen layer share one.
//!
//! The first level of a long chain is read once, by all processors, when it is opened ([`FrozenMap::build`]); pages that did not
//! fit the budget, or were evicted, and those of the second level are made from the tables when someone asks for them.
//!
//! A word names a *file reference* by the number of a layer: which file backs that layer, and where in it the layer's bytes begin, is
//! decided once for a set of layers, and looked up there ([`crate::layers::Layers::file_of`]). A map knows no files.
//!
//! The index on disk may be one of a layer further down, when those above it have none: what they say is then read from their
//! tables, and put over what the index says.
//!
//! **Size rule.** A layer shorter than one above it reads as zeros past its end, and hides what lies below it there.
//! So what layer *k* says counts up to the shortest layer at or above it, its *visible end*.

mod fresh;
mod pages;
mod replaced;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use vmstrata_store::on_threads;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, HostOffset, LayerIndex};

use crate::cache::{Owner, PAGE_BYTES, PAGE_SHIFT, PAGE_WORDS, PageCache, PageKey};
use crate::entry::{MapEntry, Mapping};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::files::FileTable;
use crate::fold::{Merge, Visible};
use crate::index::Index;
use crate::layer::{Layer, Scratch};
use crate::levels::{Level, MapPage, Units, Words};
use fresh::Fresh;
use pages::Pages;

pub(crate) use fresh::Before;

/// Where the bytes of a run come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// No layer has them: zeros.
    Hole,
    /// A layer says that they are zeros.
    Zero(LayerIndex),
    /// They are the layer's bytes from this offset on.
    Data(LayerIndex, HostOffset),
    /// They are in compressed clusters of the layer.
    Compressed(LayerIndex),
    /// The layer's entry for them is damaged.
    Damaged(LayerIndex),
}

impl Source {
    /// Whether they read as zeros.
    pub(crate) fn is_zero(self) -> bool {
        matches!(self, Self::Hole | Self::Zero(_))
    }

    /// The source `len` bytes further into the same run.
    pub(crate) fn advanced(self, len: u64) -> Self {
        match self {
            Self::Data(layer, at) => Self::Data(layer, at + len),
            other => other,
        }
    }
}

/// A run of guest bytes that come from one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) source: Source,
    pub(crate) len: u64,
}

impl Run {
    /// The run at `at`, at most `len` bytes, of which `step` gives a part at a time.
    #[inline]
    pub(crate) fn of_steps(
        at: GuestOffset,
        len: u64,
        step: impl Fn(GuestOffset, u64) -> Option<Self>,
    ) -> Option<Self> {
        let mut run = step(at, len)?;
        while run.len < len {
            // A page that is missing further on cuts the run short; the next lookup says so.
            let Some(next) = step(at + run.len, len - run.len) else { break };
            if next.source != run.source.advanced(run.len) {
                break;
            }
            run.len += next.len;
        }
        Some(run)
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct FrozenMap {
    pages: Arc<Pages>,
    units: Units,
    /// Virtual size of the newest frozen layer.
    size: u64,
    /// Base first.
    layers: Box<[Visible]>,
    cache: Arc<PageCache>,
    files: Arc<FileTable>,
    /// One fill at a time: a second thread that misses the same page finds it filled.
    filling: Mutex<Scratch>,
    /// Present while the newest layer's tables are not all in its file.
    fresh: Option<Fresh>,
    /// The same words on disk, for the first of the layers at least.
    index: Option<Arc<Index>>,
}

impl FrozenMap {
    /// An empty map over `layers` (base first, at least one).
    ///
    /// # Errors
    /// [`ErrorKind::TooLarge`] when the pages cannot be numbered.
    pub(crate) fn new(
        owner: Owner,
        layers: Vec<Arc<Layer>>,
        cache: Arc<PageCache>,
        files: Arc<FileTable>,
    ) -> Result<Self> {
        let top = layers.last().expect("a frozen chain has a layer");
        let size = top.size;
        let units = Units::of_tables(layers.iter().filter_map(|layer| Some(layer.tables?.geometry)));
        let unit = units.finest();
        if size >> unit.get() >> PAGE_SHIFT >= PageKey::MAX_PAGES {
            return Err(Error::from(ErrorKind::TooLarge { size, unit: unit.size() }).in_file(&top.path));
        }
        let mut end = u64::MAX;
        let mut visible: Vec<Visible> = layers
            .into_iter()
            .rev()
            .map(|layer| {
                end = end.min(layer.size);
                Visible { layer, end }
            })
            .collect();
        visible.reverse();
        let layers = visible.into_boxed_slice();
        Ok(Self {
            pages: Pages::new(owner),
            units,
            size,
            layers,
            cache,
            files,
            filling: Mutex::default(),
            fresh: None,
            index: None,
        })
    }

    /// The same map with other objects for the same layers.
    fn over_layers(&self, layers: Vec<Arc<Layer>>) -> Self {
        let ends = self.layers.iter().map(|visible| visible.end);
        let layers = layers.into_iter().zip(ends).map(|(layer, end)| Visible { layer, end });
        Self {
            pages: Arc::clone(&self.pages),
            units: self.units,
            size: self.size,
            layers: layers.collect(),
            cache: Arc::clone(&self.cache),
            files: Arc::clone(&self.files),
            filling: Mutex::default(),
            fresh: None,
            index: None,
        }
    }

    pub(crate) fn layers(&self) -> impl ExactSizeIterator<Item = &Arc<Layer>> {
        self.layers.iter().map(|visible| &visible.layer)
    }

    /// The layer at `index`.
    ///
    /// # Panics
    /// When the chain has no such layer.
    pub(crate) fn layer(&self, index: LayerIndex) -> &Arc<Layer> {
        &self.layers[index.index()].layer
    }

    /// Virtual size of the newest frozen layer.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The smallest part of the disk that has a word: the smallest cluster or subcluster of the chain.
    pub(crate) fn finest_unit(&self) -> ClusterBits {
        self.units.finest()
    }

    fn base_is_raw(&self) -> bool {
        self.layers[0].layer.tables.is_none()
    }

    /// The run at `at`, at most `len` bytes; `None` when its page must be filled first ([`FrozenMap::fill`]).
    #[inline]
    pub(crate) fn lookup(&self, at: GuestOffset, len: u64) -> Option<Run> {
        Run::of_steps(at, len, |at, len| self.step(at, len))
    }

    /// Has the processor fetch what [`FrozenMap::lookup`] will look at.
    #[inline]
    pub(crate) fn prefetch(&self, at: GuestOffset) {
        if at.get() < self.size {
            let (page, slot) = self.units.page_of(Level::First, at);
            self.cache.prefetch(self.pages.key(page), slot);
        }
    }

    /// The part of a run that one unit answers for.
    #[inline]
    fn step(&self, at: GuestOffset, len: u64) -> Option<Run> {
        if at.get() >= self.size {
            return Some(Run { source: Source::Hole, len });
        }
        let (mut unit, mut entry) = (self.units.of(Level::First), self.entry(Level::First, at)?);
        if entry.is_split() {
            (unit, entry) = (self.units.of(Level::Second), self.entry(Level::Second, at)?);
        }
        let within = at.within(unit);
        let len = len.min(unit.size() - within).min(self.size - at.get());
        let (layer, source) = match entry.mapping(unit) {
            Mapping::Hole if self.base_is_raw() => {
                (0, Source::Data(LayerIndex::BASE, HostOffset::new(at.get())))
            }
            Mapping::Hole => return Some(Run { source: Source::Hole, len }),
            Mapping::Zero(layer) => (layer.index(), Source::Zero(layer)),
            Mapping::Damaged(layer) => (layer.index(), Source::Damaged(layer)),
            Mapping::Data(layer, host) => (layer.index(), Source::Data(layer, host + within)),
            Mapping::Compressed(layer) => (layer.index(), Source::Compressed(layer)),
        };
        let end = self.layers[layer].end;
        if at.get() >= end {
            // Hidden by a shorter layer above, which has nothing here itself.
            return Some(Run { source: Source::Hole, len });
        }
        Some(Run { source, len: len.min(end - at.get()) })
    }

    /// What a level says of `at`, if its page is in memory or can be made from memory.
    #[inline]
    fn entry(&self, level: Level, at: GuestOffset) -> Option<MapEntry> {
        let (page, slot) = self.units.page_of(level, at);
        let word = self.cache.get(self.pages.key(page), slot).or_else(|| self.word_made_now(page, slot))?;
        Some(MapEntry::from_word(word))
    }

    /// As [`FrozenMap::lookup`], reading tables where pages are missing.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn locate(&self, at: GuestOffset, len: u64) -> Result<Run> {
        loop {
            if let Some(run) = self.lookup(at, len) {
                return Ok(run);
            }
            self.fill_for(at)?;
        }
    }

    /// Makes the page that a lookup of `at` misses.
    fn fill_for(&self, at: GuestOffset) -> Result<()> {
        let is_split = self.entry(Level::First, at).is_some_and(MapEntry::is_split);
        let level = if is_split { Level::Second } else { Level::First };
        self.fill(self.units.page_of(level, at).0)
    }

    fn fill(&self, page: MapPage) -> Result<()> {
        let key = self.pages.key(page);
        let mut scratch = self.filling.lock();
        if self.cache.contains(key) {
            return Ok(());
        }
        let words = match (&self.fresh, &self.index) {
            (Some(fresh), _) => self.fresh_page(fresh, page, &mut scratch)?,
            (None, Some(index)) => self.indexed_page(index, page, &mut scratch)?,
            (None, None) => self.scan_page(0..self.layers.len(), page, &mut scratch)?,
        };
        self.cache.fill(key, &words);
        Ok(())
    }

    /// The words of a page, through the cache.
    fn page(&self, page: MapPage) -> Result<Words> {
        let mut words = [0; PAGE_WORDS];
        while !self.cache.copy(self.pages.key(page), &mut words) {
            self.fill(page)?;
        }
        Ok(words)
    }

    /// What the tables of some layers say of a page's units, newest layer first.
    fn scan_page(&self, layers: Range<usize>, page: MapPage, scratch: &mut Scratch) -> Result<Words> {
        let range = self.units.range(page);
        let mut words = [0u64; PAGE_WORDS];
        for (index, visible) in self.layers[..layers.end].iter().enumerate().skip(layers.start).rev() {
            let Some(merge) = Merge::new(visible, index, self.units.of(page.level)) else { continue };
            let store = self.files.store(&visible.layer)?;
            let scanned = visible.layer.scan(&**store, range, scratch, &mut |cluster, raw| {
                merge.put(cluster, raw, page, &mut words);
            });
            scanned.map_err(|error| error.in_layer(merge.index).in_file(&visible.layer.path))?;
            if words.iter().all(|&word| word != 0) {
                break;
            }
        }
        Ok(words)
    }
}

/// Shorter chains are not read ahead: filling one of their pages costs a few reads.
pub(super) const BUILD_FROM_LAYERS: usize = 16;

impl FrozenMap {
    /// Makes the first level of a long chain at once, by all processors, if that fits half of the cache.
    ///
    /// # Errors
    /// The first table, in any order, that cannot be read.
    pub(crate) fn build(&self) -> Result<()> {
        let pages = self.units.pages(Level::First, self.size);
        if self.layers.len() < BUILD_FROM_LAYERS || pages > self.cache.capacity_pages() / 2 {
            return Ok(());
        }
        // Without room for all of it, pages are made when they are asked for.
        let words = bytemuck::try_zeroed_slice_box(pages as usize * PAGE_WORDS);
        let Ok(words): Result<Box<[AtomicU64]>, ()> = words else { return Ok(()) };
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        on_threads(std::thread::available_parallelism().map_or(1, usize::from).min(8), || {
            let mut scratch = Scratch::default();
            while let index = next.fetch_add(1, Ordering::Relaxed)
                && index < self.layers.len()
            {
                if let Err(error) = self.merge_layer(index, &words, &mut scratch) {
                    failed.lock().get_or_insert(error);
                    next.store(self.layers.len(), Ordering::Relaxed);
                }
            }
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let mut page = [0; PAGE_WORDS];
        for (number, words) in words.chunks(PAGE_WORDS).enumerate() {
            page.iter_mut().zip(words).for_each(|(word, merged)| *word = merged.load(Ordering::Relaxed));
            let number = number as u64;
            self.cache.fill(self.pages.key(MapPage { level: Level::First, number }), &page);
        }
        tracing::debug!(layers = self.layers.len(), bytes = pages as usize * PAGE_BYTES, "map built");
        Ok(())
    }

    fn merge_layer(&self, index: usize, words: &[AtomicU64], scratch: &mut Scratch) -> Result<()> {
        let visible = &self.layers[index];
        let Some(merge) = Merge::new(visible, index, self.units.of(Level::First)) else { return Ok(()) };
        let store = self.files.store(&visible.layer)?;
        let whole = GuestRange::new(GuestOffset::ZERO, visible.end);
        visible
            .layer
            .scan(&**store, whole, scratch, &mut |cluster, raw| {
                for (unit, entry) in merge.entries(cluster, raw).clip(0..words.len() as u64) {
                    words[unit as usize].fetch_max(entry.word(), Ordering::Relaxed);
                }
            })
            .map_err(|error| error.in_layer(merge.index).in_file(&visible.layer.path))
    }

    /// The same map, reading pages from `index` rather than from the tables of the layers that it answers for: the first
    /// ones. Where too many are left, all tables are better read at once ([`FrozenMap::build`]).
    pub(crate) fn with_index(self, index: Arc<Index>) -> Self {
        let above = self.layers.len().checked_sub(index.layers().len());
        let knows_all = self.units.levels().all(|level| index.units().answer_for(self.units.of(level)));
        let fits = knows_all && above.is_some_and(|above| above < BUILD_FROM_LAYERS);
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
    fn indexed_page(&self, index: &Index, page: MapPage, scratch: &mut Scratch) -> Result<Words> {
        let read = index.read_page(page.number, self.units.of(page.level), |layer, at, page| {
            let store = self.files.store(self.layer(layer))?;
            store.read_exact(page, at).while_trying("read the index").map_err(|error| error.at(at))
        });
        let mut words = match read {
            Ok(words) => words,
            // The tables of that layer would say the same.
            Err(error) if error.is_change() => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "a page of the index on disk is not used");
                return self.scan_page(0..self.layers.len(), page, scratch);
            }
        };
        let above = index.layers().len()..self.layers.len();
        if !above.is_empty() {
            let newer = self.scan_page(above, page, scratch)?;
            words.iter_mut().zip(newer).for_each(|(word, newer)| *word = newer.max(*word));
        }
        Ok(words)
    }
}

#[cfg(test)]
mod tests;
