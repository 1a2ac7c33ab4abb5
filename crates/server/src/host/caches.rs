//! What this host keeps of layers that are in repositories: a cache for each directory of tiered disks.
//!
//! Caches stay open until the process ends. What guests wait for then is neither failed nor answered: their requests are made
//! again, of the next server.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vmstrata_api as api;
use vmstrata_disk::{Disk, Opener};
use vmstrata_tier::{
    CACHE_NAME, Cache, CacheUse, CachedFiles, Elsewhere, OnMissing, ReadThrough, Replica, RepositoryAddress,
    read_through,
};
use vmstrata_types::path_to_text;

use crate::error::Error;
use crate::spec::ReplicaSpec;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Caches {
    files: Arc<CachedFiles>,
    /// What each may have; `None` leaves it to the file system's room.
    budget: Option<u64>,
    /// Held while one is opened. Taken before `open`.
    opening: Mutex<()>,
    open: Mutex<BTreeMap<PathBuf, Arc<Cache>>>,
}

impl Caches {
    /// None yet. `files` opens the files of all disks.
    pub(super) fn new(files: Arc<CachedFiles>, budget: Option<u64>) -> Self {
        Self { files, budget, opening: Mutex::default(), open: Mutex::default() }
    }

    /// How disks are read whose copies on this host are in a directory, which is made if need be.
    ///
    /// # Errors
    /// A cache that cannot be used, or that another process uses.
    pub(super) fn of(&self, tier: &Path, on_missing: OnMissing) -> Result<ReadThrough, Error> {
        Ok(ReadThrough::new(Arc::clone(&self.files), self.cache(tier)?, on_missing))
    }

    /// How the layers of a disk are read that are in a repository which is no directory.
    ///
    /// # Errors
    /// As [`Caches::of`]; a repository that cannot be reached.
    pub(super) fn elsewhere(
        &self,
        tier: &Path,
        address: &RepositoryAddress,
        on_missing: OnMissing,
    ) -> Result<Elsewhere, Error> {
        let repository = address.open().map_err(vmstrata_tier::Error::from)?;
        Ok(Elsewhere::new(repository, &self.cache(tier)?, Arc::clone(&self.files), on_missing))
    }

    /// What opens the files of disks with layers that are no files.
    pub(super) fn opener(&self) -> Arc<dyn Opener> {
        self.files.clone()
    }

    /// Has the published layers of a chain read through a cache, of which the newest one's path is `newest`. For the time `boot`, reads are
    /// those of a guest that starts.
    ///
    /// # Errors
    /// As [`Caches::elsewhere`].
    pub(super) fn read_through(
        &self,
        newest: &Path,
        asked: &ReplicaSpec,
        boot: Duration,
    ) -> Result<(), Error> {
        let through = (&self.cache(&asked.dir)?, asked.on_missing);
        Ok(read_through(&self.files, newest, asked.repository.as_ref(), through, boot)?)
    }

    /// The layers of a disk that are read through a cache.
    ///
    /// # Errors
    /// A cache that cannot be used.
    pub(super) fn replica(&self, disk: &Disk) -> Result<Replica, Error> {
        let layers = disk.layers();
        Ok(Replica::of(&self.files, layers.iter().map(|layer| layer.path.as_path()))?)
    }

    fn cache(&self, tier: &Path) -> Result<Arc<Cache>, Error> {
        let _opening = self.opening.lock();
        let made =
            DirBuilder::new().recursive(true).mode(0o700).create(tier).and_then(|()| tier.canonicalize());
        let dir =
            made.map_err(|source| Error::TierDirectory { path: tier.to_owned(), source })?.join(CACHE_NAME);
        let known = self.open.lock().get(&dir).cloned();
        if let Some(cache) = known {
            return Ok(cache);
        }
        let cache = Cache::open_within(&dir, self.budget)?;
        let CacheUse { bytes, budget, .. } = cache.usage();
        tracing::info!(dir = %dir.display(), bytes, budget, "keeps layers of repositories on this host");
        self.open.lock().insert(dir, Arc::clone(&cache));
        Ok(cache)
    }

    /// How full they are.
    pub(super) fn status(&self) -> Vec<api::TierCache> {
        self.open.lock().iter().map(|(dir, cache)| cache_status(dir, cache.usage())).collect()
    }
}

/// In the API's words.
pub(super) fn cache_status(dir: &Path, used: CacheUse) -> api::TierCache {
    let CacheUse { bytes, budget, fetched } = used;
    api::TierCache { directory: path_to_text(dir), bytes, max_bytes: budget, fetched_chunks: fetched }
}
