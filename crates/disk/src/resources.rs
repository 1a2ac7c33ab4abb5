//! What the disks of one process share: the metadata cache with its one budget, open files, layers, maps, and the
//! threads that do what may block.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vmstrata_store::{FileId, FileIdentity};

use crate::cache::{Owner, Owners, PAGE_BYTES, PageCache};
use crate::compressed::ClusterCache;
use crate::error::Result;
use crate::files::FileTable;
use crate::index::Index;
use crate::layer::Layer;
use crate::maintenance::Maintenance;
use crate::map::FrozenMap;
use crate::opener::{LocalFiles, Opener};
use crate::refs::Beside;
use crate::workers::Workers;

/// Limits of a process.
#[derive(Clone, Debug)]
pub struct ResourceOptions {
    /// Bytes of metadata pages kept in memory for all disks together.
    pub metadata_cache_bytes: u64,
    /// Files of frozen layers open at once.
    pub max_open_files: usize,
    /// Threads for requests that may block: allocating writes, flushes, compressed clusters, pages to be filled.
    pub workers: usize,
    /// Where the volatile journals lie: a directory that a reboot empties. `None`: unflushed allocating writes
    /// are lost when the process is killed.
    pub journal_dir: Option<PathBuf>,
}

impl Default for ResourceOptions {
    fn default() -> Self {
        Self { metadata_cache_bytes: 64 << 20, max_open_files: 4096, workers: 4, journal_dir: None }
    }
}

/// See the module documentation.
#[derive(Debug)]
pub struct Resources {
    owners: Arc<Owners>,
    files: Arc<FileTable>,
    clusters: ClusterCache,
    workers: Workers,
    /// For flushes, which mostly wait for storage.
    flushers: Workers,
    maintenance: Maintenance,
    journal_dir: Option<PathBuf>,
    layers: Mutex<HashMap<FileIdentity, Weak<Layer>>>,
    maps: Mutex<HashMap<FileIdentity, Weak<FrozenMap>>>,
    merging: Mutex<HashSet<FileId>>,
    doubted: Mutex<HashSet<PathBuf>>,
    beside: Beside,
}

/// How full the shared structures are.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUse {
    /// Bytes of metadata pages in memory.
    pub metadata_cache_bytes: u64,
    /// Pages put into memory so far: each was missed by a request, or read when its disk was opened.
    pub metadata_cache_fills: u64,
    /// Files of frozen layers open now.
    pub open_files: usize,
}

impl Resources {
    /// Resources for disks made of local files.
    ///
    /// # Errors
    /// A host that cannot start their thread for maintenance.
    pub fn start(options: ResourceOptions) -> Result<Arc<Self>> {
        Self::start_with(options, Arc::new(LocalFiles))
    }

    /// As [`Resources::start`], where no caller can handle an error.
    ///
    /// # Panics
    /// When the host cannot start their thread for maintenance.
    pub fn new(options: ResourceOptions) -> Arc<Self> {
        Self::with_opener(options, Arc::new(LocalFiles))
    }

    /// As [`Resources::start_with`], where no caller can handle an error.
    ///
    /// # Panics
    /// As [`Resources::new`].
    pub fn with_opener(options: ResourceOptions, opener: Arc<dyn Opener>) -> Arc<Self> {
        Self::start_with(options, opener).expect("the host can start threads")
    }

    /// As [`Resources::start`], with files that are opened by `opener`.
    ///
    /// # Errors
    /// As there.
    pub fn start_with(options: ResourceOptions, opener: Arc<dyn Opener>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            owners: Owners::new(Arc::new(PageCache::new(options.metadata_cache_bytes)?)),
            files: Arc::new(FileTable::new(opener, options.max_open_files)),
            clusters: ClusterCache::default(),
            workers: Workers::new(options.workers),
            flushers: Workers::for_flushes(options.workers),
            maintenance: Maintenance::new()?,
            journal_dir: options.journal_dir,
            layers: Mutex::default(),
            maps: Mutex::default(),
            merging: Mutex::default(),
            doubted: Mutex::default(),
            beside: Beside::default(),
        }))
    }

    /// How full the shared structures are now.
    pub fn usage(&self) -> ResourceUse {
        ResourceUse {
            metadata_cache_bytes: self.cache().pages_used() * PAGE_BYTES as u64,
            metadata_cache_fills: self.cache().fills(),
            open_files: self.files.open_count(),
        }
    }

    pub(crate) fn cache(&self) -> &Arc<PageCache> {
        &self.owners.cache
    }

    pub(crate) fn files(&self) -> &Arc<FileTable> {
        &self.files
    }

    pub(crate) fn clusters(&self) -> &ClusterCache {
        &self.clusters
    }

    /// Starts the threads that requests of queues may need, unless they run.
    ///
    /// # Errors
    /// A host that cannot start them.
    pub(crate) fn start_workers(&self) -> Result<()> {
        self.workers.start()?;
        self.flushers.start()
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    pub(crate) fn flushers(&self) -> &Workers {
        &self.flushers
    }

    pub(crate) fn maintenance(&self) -> &Maintenance {
        &self.maintenance
    }

    pub(crate) fn journal_dir(&self) -> Option<&PathBuf> {
        self.journal_dir.as_ref()
    }

    /// Frozen layers that are being copied into: no other disk may stand on them until that is done.
    pub(crate) fn merging(&self) -> &Mutex<HashSet<FileId>> {
        &self.merging
    }

    /// From now on, no index is believed about `file` for its length and time alone; false when that is so already.
    pub(crate) fn doubt(&self, file: &Path) -> bool {
        self.doubted.lock().insert(file.to_owned())
    }

    /// The files that turned out to be something else than an index says.
    pub(crate) fn doubted(&self) -> HashSet<PathBuf> {
        self.doubted.lock().clone()
    }

    /// What the images beside disks stand on.
    pub(crate) fn beside(&self) -> &Beside {
        &self.beside
    }

    /// A name for someone's pages in the cache.
    ///
    /// # Errors
    /// When a million are in use.
    pub(crate) fn new_owner(&self) -> Result<Owner> {
        self.owners.take()
    }

    /// The cache, and a name for someone's pages in it.
    ///
    /// # Errors
    /// As [`Resources::new_owner`].
    pub(crate) fn new_pages(&self) -> Result<(Owner, Arc<PageCache>)> {
        Ok((self.new_owner()?, Arc::clone(self.cache())))
    }

    /// The layer of this very file in this very state that others already hold, or else this one.
    ///
    /// What an index says of a file must not change what others read of it: only a layer that is the same in all respects is
    /// shared.
    pub(crate) fn share_layer(&self, layer: Layer) -> Arc<Layer> {
        let mut layers = self.layers.lock();
        if let Some(shared) = layers.get(&layer.identity).and_then(Weak::upgrade)
            && shared.is_same(&layer)
        {
            return shared;
        }
        if layers.len() == layers.capacity() {
            // Not for every layer: a chain of n layers would take n^2 steps.
            layers.retain(|_, layer| layer.strong_count() > 0);
            let live = layers.len();
            layers.reserve(live + 1);
        }
        let layer = Arc::new(layer);
        layers.insert(layer.identity, Arc::downgrade(&layer));
        layer
    }

    /// The map of these layers (base first), which `index` knows: one that another disk already holds, or a new one.
    ///
    /// # Errors
    /// As [`FrozenMap::new`] and [`FrozenMap::build`].
    pub(crate) fn share_map(
        &self,
        layers: Vec<Arc<Layer>>,
        index: Option<Arc<Index>>,
    ) -> Result<Arc<FrozenMap>> {
        self.share_map_by(layers, index, |map| if map.has_index() { Ok(()) } else { map.build() })
    }

    /// As [`Resources::share_map`], with `fill` to give a new map its pages.
    ///
    /// # Errors
    /// As [`FrozenMap::new`], and as `fill`.
    pub(crate) fn share_map_by(
        &self,
        layers: Vec<Arc<Layer>>,
        index: Option<Arc<Index>>,
        fill: impl FnOnce(&FrozenMap) -> Result<()>,
    ) -> Result<Arc<FrozenMap>> {
        let top = layers.last().expect("a frozen chain has a layer").identity;
        let found = self.maps.lock().get(&top).and_then(Weak::upgrade);
        if let Some(map) = found
            && map.layers().len() == layers.len()
            && map.layers().zip(&layers).all(|(one, other)| Arc::ptr_eq(one, other))
        {
            return Ok(map);
        }
        let map = self.new_map(layers)?;
        let map = match index {
            Some(index) => map.with_index(index),
            None => map,
        };
        fill(&map)?;
        let map = Arc::new(map);
        self.offer_map(&map);
        Ok(map)
    }

    /// An empty map of these layers.
    ///
    /// # Errors
    /// As [`FrozenMap::new`].
    pub(crate) fn new_map(&self, layers: Vec<Arc<Layer>>) -> Result<FrozenMap> {
        FrozenMap::new(self.new_owner()?, layers, Arc::clone(self.cache()), Arc::clone(&self.files))
    }

    /// Lets disks that stand on the same layers use this map too.
    pub(crate) fn offer_map(&self, map: &Arc<FrozenMap>) {
        let top = map.layers().last().expect("a frozen chain has a layer").identity;
        let mut maps = self.maps.lock();
        maps.retain(|_, map| map.strong_count() > 0);
        maps.insert(top, Arc::downgrade(map));
    }
}
