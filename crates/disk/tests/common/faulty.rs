//! Files of a chain that fail and record as a plan says.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use vmstrata_disk::{LocalFiles, Opened, Opener, ResourceOptions, Resources, Role};
use vmstrata_store::{FaultPlan, FaultStore, Gate, Ring, StoreId};

/// Opens local files and puts a [`FaultStore`] around each; queues reach them through a simulated ring.
#[derive(Debug)]
pub struct FaultyFiles {
    pub plan: Arc<FaultPlan>,
    ids: Mutex<HashMap<PathBuf, StoreId>>,
    /// Of the active layers' files.
    alignment: usize,
}

impl FaultyFiles {
    pub fn new(plan: &Arc<FaultPlan>) -> Arc<Self> {
        Self::aligned(plan, 1)
    }

    /// Files that are used around the page cache, in blocks of `alignment` bytes.
    pub fn aligned(plan: &Arc<FaultPlan>, alignment: usize) -> Arc<Self> {
        Arc::new(Self { plan: Arc::clone(plan), ids: Mutex::default(), alignment })
    }

    /// The name of a file in the plan; the same whenever it is opened.
    pub fn id(&self, path: &Path) -> StoreId {
        let mut ids = self.ids.lock().expect("no test panics here");
        let next = StoreId(u32::try_from(ids.len()).expect("few files"));
        *ids.entry(path.to_owned()).or_insert(next)
    }

    /// Resources of the least size over these files.
    pub fn resources(self: &Arc<Self>) -> Arc<Resources> {
        self.resources_with(None)
    }

    /// Resources of the usual size over these files.
    pub fn usual_resources(self: &Arc<Self>) -> Arc<Resources> {
        Resources::with_opener(ResourceOptions::default(), Arc::clone(self) as Arc<dyn Opener>)
    }

    /// Those of the least size, with journals in a directory.
    pub fn resources_with(self: &Arc<Self>, journal_dir: Option<PathBuf>) -> Arc<Resources> {
        // Nothing happens by itself: the same operation fails in each run.
        let options =
            ResourceOptions { metadata_cache_bytes: 0, max_open_files: 16, workers: 1, journal_dir };
        Resources::with_opener(options, Arc::clone(self) as Arc<dyn Opener>)
    }
}

impl Opener for FaultyFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = LocalFiles.open(path, role, gate)?;
        let store = FaultStore::new(opened.store, &self.plan, self.id(path));
        let alignment = if matches!(role, Role::Active(_)) { self.alignment } else { 1 };
        Ok(Opened { store: Arc::new(store.aligned(alignment)), identity: opened.identity })
    }

    fn ring(&self, _depth: u32) -> std::io::Result<Ring> {
        Ring::simulated(&self.plan)
    }
}
