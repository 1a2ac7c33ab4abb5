//! The map of a frozen chain: for every unit of the disk, which layer holds its newest version, and where.
//!
//! ```text
//!   guest offset ──► unit ──► page of 512 units ──► metadata cache ──► MapEntry ──► Source
//!                                   │ miss
//!                                   └──► L1 and L2 tables of the layers, newest first ──► fill
//! ```
//!
//! One lookup answers for the whole chain, however many layers there are (sQemu §5.1, principle 1), and the pages
//! live in one cache for all disks (principle 2). The unit is the smallest cluster size of the chain, so mixed
//! chains need no special road. A map never changes: disks that stand on the same frozen layer share it.
//!
//! A long chain is read once, by all processors, when it is opened ([`FrozenMap::build`]); pages that did not fit
//! the budget, or were evicted, are made again from the tables when someone asks for them.
//!
//! **Size rule.** A layer shorter than one above it reads as zeros past its end, and hides what lies below it there.
//! So what layer *k* says counts up to the shortest layer at or above it, its *visible end*.

pub(crate) mod merge;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, HostOffset, LayerIndex};

use crate::cache::{PAGE_BYTES, PAGE_SHIFT, PAGE_WORDS, PageCache, PageKey};
use crate::entry::{MapEntry, Mapping};
use crate::error::{Error, ErrorKind, Result};
use crate::files::FileTable;
use crate::layer::{Layer, Scratch};
use merge::Merge;

/// Where the bytes of a run come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// No layer has them: zeros.
    Hole,
    /// A layer says that they are zeros.
    Zero(LayerIndex),
    /// They lie in the layer's file from this offset on.
    Data(LayerIndex, HostOffset),
    /// They are in compressed clusters of the layer.
    Compressed(LayerIndex),
    /// The layer's entry for them is damaged.
    Damaged(LayerIndex),
}

impl Source {
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

#[derive(Debug)]
struct Visible {
    layer: Arc<Layer>,
    /// Guest offset from which on the layer, and all below it, are hidden.
    end: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct FrozenMap {
    owner: u32,
    unit: ClusterBits,
    /// Virtual size of the newest frozen layer.
    size: u64,
    /// Base first.
    layers: Box<[Visible]>,
    cache: Arc<PageCache>,
    files: Arc<FileTable>,
    /// One fill at a time: a second thread that misses the same page finds it filled.
    filling: Mutex<Scratch>,
}

impl Drop for FrozenMap {
    fn drop(&mut self) {
        self.cache.forget(self.owner);
    }
}

/// Shorter chains are not read ahead: filling one of their pages costs a few reads.
const BUILD_FROM_LAYERS: usize = 16;

impl FrozenMap {
    /// An empty map over `layers` (base first, at least one).
    ///
    /// # Errors
    /// [`ErrorKind::TooLarge`] when the pages cannot be numbered.
    pub(crate) fn new(
        owner: u32,
        layers: Vec<Arc<Layer>>,
        cache: Arc<PageCache>,
        files: Arc<FileTable>,
    ) -> Result<Self> {
        let top = layers.last().expect("a frozen chain has a layer");
        let size = top.size;
        let unit = layers.iter().filter_map(|layer| layer.cluster_bits()).min().unwrap_or(ClusterBits::MAX);
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
        Ok(Self { owner, unit, size, layers, cache, files, filling: Mutex::default() })
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

    fn base_is_raw(&self) -> bool {
        self.layers[0].layer.tables.is_none()
    }

    fn key(&self, at: GuestOffset) -> (PageKey, usize) {
        let unit = at.get() >> self.unit.get();
        (PageKey::new(self.owner, unit >> PAGE_SHIFT), unit as usize & (PAGE_WORDS - 1))
    }

    /// The run at `at`, at most `len` bytes; `None` when its page must be filled first ([`FrozenMap::fill`]).
    #[inline]
    pub(crate) fn lookup(&self, at: GuestOffset, len: u64) -> Option<Run> {
        let mut run = self.step(at, len)?;
        while run.len < len {
            // A page that is missing further on cuts the run short; the next lookup will say so.
            let Some(next) = self.step(at + run.len, len - run.len) else { break };
            if next.source != run.source.advanced(run.len) {
                break;
            }
            run.len += next.len;
        }
        Some(run)
    }

    /// The part of a run that one unit answers for.
    #[inline]
    fn step(&self, at: GuestOffset, len: u64) -> Option<Run> {
        if at.get() >= self.size {
            return Some(Run { source: Source::Hole, len });
        }
        let (key, slot) = self.key(at);
        let entry = MapEntry::from_word(self.cache.get(key, slot)?);
        let within = at.within(self.unit);
        let len = len.min(self.unit.size() - within).min(self.size - at.get());
        let (layer, source) = match entry.mapping(self.unit) {
            Mapping::Hole if self.base_is_raw() => {
                (0, Source::Data(LayerIndex::BASE, HostOffset::new(at.get())))
            }
            Mapping::Hole => return Some(Run { source: Source::Hole, len }),
            Mapping::Zero(layer) => return Some(Run { source: Source::Zero(layer), len }),
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

    /// As [`FrozenMap::lookup`], reading tables where pages are missing.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn locate(&self, at: GuestOffset, len: u64) -> Result<Run> {
        loop {
            if let Some(run) = self.lookup(at, len) {
                return Ok(run);
            }
            self.fill(at)?;
        }
    }

    /// Makes the page that holds `at` from the layers' tables, newest layer first.
    fn fill(&self, at: GuestOffset) -> Result<()> {
        let (key, slot) = self.key(at);
        let mut scratch = self.filling.lock();
        if self.cache.contains(key) {
            return Ok(());
        }
        let page_bits = self.unit.get() + PAGE_SHIFT;
        let first_unit = (at.get() >> self.unit.get()) - slot as u64;
        let range = GuestRange::new(GuestOffset::new(first_unit << self.unit.get()), 1 << page_bits);
        let mut words = [0u64; PAGE_WORDS];
        for (index, visible) in self.layers.iter().enumerate().rev() {
            let Some(merge) = Merge::new(visible, index, self.unit) else { continue };
            let store = self.files.store(&visible.layer)?;
            let scanned = visible.layer.scan(&**store, range, &mut scratch, &mut |cluster, raw| {
                let entries = merge.entries(cluster, raw);
                for (unit, entry) in entries.clip(first_unit..first_unit + PAGE_WORDS as u64) {
                    let word = &mut words[(unit - first_unit) as usize];
                    *word = (*word).max(entry.word());
                }
            });
            scanned.map_err(|error| error.in_layer(merge.index).in_file(&visible.layer.path))?;
            if words.iter().all(|&word| word != 0) {
                break;
            }
        }
        self.cache.fill(key, &words);
        Ok(())
    }

    /// Reads all tables of a long chain at once, by all processors, if the whole map fits half of the cache.
    ///
    /// # Errors
    /// The first table, in any order, that cannot be read.
    pub(crate) fn build(&self) -> Result<()> {
        let units = self.size.div_ceil(self.unit.size());
        let pages = units.div_ceil(PAGE_WORDS as u64);
        if self.layers.len() < BUILD_FROM_LAYERS || pages > self.cache.capacity_pages() / 2 {
            return Ok(());
        }
        let words: Box<[AtomicU64]> = bytemuck::zeroed_slice_box(pages as usize * PAGE_WORDS);
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(8) {
                scope.spawn(|| {
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
            }
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let mut page = [0; PAGE_WORDS];
        for (number, words) in words.chunks(PAGE_WORDS).enumerate() {
            page.iter_mut().zip(words).for_each(|(word, merged)| *word = merged.load(Ordering::Relaxed));
            self.cache.fill(PageKey::new(self.owner, number as u64), &page);
        }
        tracing::debug!(layers = self.layers.len(), bytes = pages as usize * PAGE_BYTES, "map built");
        Ok(())
    }

    fn merge_layer(&self, index: usize, words: &[AtomicU64], scratch: &mut Scratch) -> Result<()> {
        let visible = &self.layers[index];
        let Some(merge) = Merge::new(visible, index, self.unit) else { return Ok(()) };
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
}
