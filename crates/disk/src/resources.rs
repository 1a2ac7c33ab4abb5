//! What the disks of one process share: the metadata cache with its one budget, open files, layers, maps, and the
//! threads that do what may block.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vmstrata_store::FileIdentity;

use crate::cache::{PAGE_BYTES, PageCache, PageKey};
use crate::compressed::ClusterCache;
use crate::error::{ErrorKind, Result};
use crate::files::FileTable;
use crate::layer::Layer;
use crate::map::FrozenMap;
use crate::opener::{LocalFiles, Opener};
use crate::upkeep::Upkeep;
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
    cache: Arc<PageCache>,
    files: Arc<FileTable>,
    clusters: ClusterCache,
    workers: Workers,
    upkeep: Upkeep,
    journal_dir: Option<PathBuf>,
    layers: Mutex<HashMap<FileIdentity, Weak<Layer>>>,
    maps: Mutex<HashMap<FileIdentity, Weak<FrozenMap>>>,
    next_owner: AtomicU32,
}

/// How full the shared structures are.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUse {
    /// Bytes of metadata pages in memory.
    pub metadata_cache_bytes: u64,
    /// Files of frozen layers open now.
    pub open_files: usize,
}

impl Resources {
    /// Resources for disks made of local files.
    pub fn new(options: ResourceOptions) -> Arc<Self> {
        Self::with_opener(options, Arc::new(LocalFiles))
    }

    /// Resources whose files are opened by `opener`.
    pub fn with_opener(options: ResourceOptions, opener: Arc<dyn Opener>) -> Arc<Self> {
        Arc::new(Self {
            cache: Arc::new(PageCache::new(options.metadata_cache_bytes)),
            files: Arc::new(FileTable::new(opener, options.max_open_files)),
            clusters: ClusterCache::default(),
            workers: Workers::new(options.workers),
            upkeep: Upkeep::new(),
            journal_dir: options.journal_dir,
            layers: Mutex::default(),
            maps: Mutex::default(),
            next_owner: AtomicU32::new(1),
        })
    }

    /// How full the shared structures are now.
    pub fn usage(&self) -> ResourceUse {
        ResourceUse {
            metadata_cache_bytes: self.cache.pages_used() * PAGE_BYTES as u64,
            open_files: self.files.open_count(),
        }
    }

    pub(crate) fn cache(&self) -> &Arc<PageCache> {
        &self.cache
    }

    pub(crate) fn files(&self) -> &Arc<FileTable> {
        &self.files
    }

    pub(crate) fn clusters(&self) -> &ClusterCache {
        &self.clusters
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    pub(crate) fn upkeep(&self) -> &Upkeep {
        &self.upkeep
    }

    pub(crate) fn journal_dir(&self) -> Option<&PathBuf> {
        self.journal_dir.as_ref()
    }

    /// A name for someone's pages in the cache, never used before.
    ///
    /// # Errors
    /// After a million disks the process must be started again.
    pub(crate) fn new_owner(&self) -> Result<u32> {
        let owner = self.next_owner.fetch_add(1, Ordering::Relaxed);
        if owner > PageKey::MAX_OWNER {
            return Err(ErrorKind::Full { what: "the process's table of disks" }.into());
        }
        Ok(owner)
    }

    /// The layer of this very file in this very state that others already hold, or else this one.
    pub(crate) fn share_layer(&self, layer: Layer) -> Arc<Layer> {
        let mut layers = self.layers.lock();
        if let Some(shared) = layers.get(&layer.identity).and_then(Weak::upgrade)
            && shared.path == layer.path
            && shared.format() == layer.format()
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

    /// The map of these layers (base first): one that another disk already holds, or a new one.
    ///
    /// # Errors
    /// As [`FrozenMap::new`] and [`FrozenMap::build`].
    pub(crate) fn share_map(&self, layers: Vec<Arc<Layer>>) -> Result<Arc<FrozenMap>> {
        let top = layers.last().expect("a frozen chain has a layer").identity;
        let found = self.maps.lock().get(&top).and_then(Weak::upgrade);
        if let Some(map) = found
            && map.layers().len() == layers.len()
            && map.layers().zip(&layers).all(|(one, other)| Arc::ptr_eq(one, other))
        {
            return Ok(map);
        }
        let map =
            FrozenMap::new(self.new_owner()?, layers, Arc::clone(&self.cache), Arc::clone(&self.files))?;
        map.build()?;
        let map = Arc::new(map);
        let mut maps = self.maps.lock();
        maps.retain(|_, map| map.strong_count() > 0);
        maps.insert(top, Arc::downgrade(&map));
        Ok(map)
    }
}
