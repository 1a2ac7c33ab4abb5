//! What this host keeps of the layers in repositories that a disk stands on, tiered or not.
//!
//! ```text
//!   /nas/desk7.qcow2 ──► /nas/golden.qcow2.tier/ID.qcow2 ──► ···         a clone, and the base that all clones share
//!                                    │ read through
//!                                    ▼
//!                        the host's cache: ID.chunks                     filled by reads, or all of it by `Walk`,
//!                                                                        from an image as far as that has it
//! ```

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vmstrata_disk::Disk;
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_store::Fetched;
use vmstrata_types::HostOffset;

use crate::ahead;
use crate::cache::{Cache, Cached};
use crate::cached_files::{CachedFiles, LayerDirectory};
use crate::compose::Composer;
use crate::digests::CHUNK;
use crate::elsewhere::RepositoryAddress;
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch, Object, ObjectId, is_object_name};
use crate::look::{Heads, Look};
use crate::pin::Pin;
use crate::remote::{CachedLayer, OnMissing, Remote};

/// How long one step waits for a repository that does not answer: to cancel it may take as long.
const PATIENCE: OnMissing = OnMissing::Error(Duration::from_secs(5));
/// Chunks that a step fetches together: guests that read wait behind no more.
const TOGETHER: usize = 4;

/// The layers of a disk that lie in repositories.
#[derive(Clone, Debug)]
pub struct Replica {
    layers: Vec<CachedLayer>,
}

/// A layer, and what of it is on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerReplica {
    /// Which layer.
    pub id: ObjectId,
    /// Where it comes from.
    pub repository: String,
    /// The directory of the cache.
    pub cache: PathBuf,
    /// Bytes of it.
    pub bytes: u64,
    /// Those on this host.
    pub kept_bytes: u64,
    /// Whether they stay, whatever else is read.
    pub is_pinned: bool,
}

impl Replica {
    /// Of the chain whose files are these, base first.
    ///
    /// # Errors
    /// As [`Remote::layer`].
    pub fn of<'a>(files: &CachedFiles, chain: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let layers = chain.into_iter().filter_map(|path| files.layer_at(path).transpose());
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    /// What its layers are, base first.
    pub(crate) fn objects(&self) -> Vec<Object> {
        self.layers.iter().map(|layer| *layer.object()).collect()
    }

    /// Whether no layer lies in a repository.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// What of each layer is on this host.
    pub fn layers(&self) -> Vec<LayerReplica> {
        let seen = |layer: &CachedLayer| {
            let (cached, remote) = (layer.cached(), layer.remote());
            let cache = remote.cache();
            LayerReplica {
                id: layer.id(),
                repository: remote.repository().describe(),
                cache: cache.path(),
                bytes: layer.bytes(),
                kept_bytes: cached.kept_bytes(),
                is_pinned: cache.is_pinned(cached),
            }
        };
        self.layers.iter().map(seen).collect()
    }

    /// Keeps all that is or comes here of the layers, also beyond this process; or lets it go as other layers'.
    ///
    /// # Errors
    /// [`Error::NoRoom`]; whatever the host reports.
    pub fn pin(&self, is_pinned: bool) -> Result<()> {
        for (cache, layers) in self.by_cache() {
            if is_pinned { cache.pin(&layers)? } else { cache.unpin(&layers)? }
        }
        Ok(())
    }

    /// Gives up what is here of the layers. Returns the bytes, which are free once no read needs them.
    ///
    /// # Errors
    /// [`Error::Pinned`]; [`Error::Cache`] for one that gives up chunks already.
    pub fn give_up(&self) -> Result<u64> {
        self.layers.iter().map(|layer| layer.remote().cache().give_up(layer.cached())).sum()
    }

    /// Brings all of the layers here.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub fn fill(self) -> Result<Walk> {
        for (cache, layers) in self.by_cache() {
            cache.check_fill(&layers)?;
        }
        Ok(Walk::new(self, Task::Fill(None)))
    }

    /// As [`Replica::fill`], but what `image` has of the layers' content is taken from there.
    ///
    /// # Errors
    /// As there; a host without threads.
    pub fn fill_from(self, image: Arc<Disk>) -> Result<Walk> {
        let mut walk = self.fill()?;
        walk.task = Task::Fill(Some(Composer::new(image, &walk.replica.layers, PATIENCE)?));
        Ok(walk)
    }

    /// Compares all that is here with its digests, from the cache's device, and fetches again what is not right.
    pub fn scrub(self) -> Walk {
        Walk::new(self, Task::Scrub)
    }

    fn by_cache(&self) -> Vec<(&Arc<Cache>, Vec<&Arc<Cached>>)> {
        let mut by_cache: BTreeMap<PathBuf, (_, Vec<_>)> = BTreeMap::new();
        for layer in &self.layers {
            let cache = layer.remote().cache();
            let entry = by_cache.entry(cache.path()).or_insert_with(|| (cache, Vec::new()));
            entry.1.push(layer.cached());
        }
        by_cache.into_values().collect()
    }
}

#[derive(Debug)]
enum Task {
    /// From an image, perhaps.
    Fill(Option<Composer>),
    Scrub,
}

/// What a step of a walk did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Bytes that were read from the repository, or the cache's device.
    pub read_bytes: u64,
    /// Bytes that an image had.
    pub image_bytes: u64,
    /// Whether the next step goes on with the same chunks.
    pub is_part: bool,
}

/// A walk over all chunks of a replica, step by step.
#[derive(Debug)]
pub struct Walk {
    replica: Replica,
    task: Task,
    /// The next chunk: of which layer, and which.
    at: (usize, usize),
    /// Bytes of an image that no step has counted yet.
    image_bytes: u64,
}

impl Walk {
    /// Bytes that a step passes, but for the last one of a layer.
    pub const STEP: u64 = TOGETHER as u64 * CHUNK;

    fn new(replica: Replica, task: Task) -> Self {
        Self { replica, task, at: (0, 0), image_bytes: 0 }
    }

    /// How many steps there are.
    pub fn steps(&self) -> u64 {
        self.replica.layers.iter().map(|layer| layer.bytes().div_ceil(Self::STEP)).sum()
    }

    /// Passes the next few chunks, or prepares to; `None` at the end.
    ///
    /// # Errors
    /// `InvalidData` for other bytes than were shipped. A repository that does not answer, a cache that cannot be written: the step can be tried
    /// again.
    pub fn step(&mut self) -> io::Result<Option<Passed>> {
        let layer = loop {
            let Some(layer) = self.replica.layers.get(self.at.0) else { return Ok(None) };
            if self.at.1 < layer.cached().chunk_count() {
                break layer;
            }
            self.at = (self.at.0 + 1, 0);
        };
        let end = (self.at.1 + TOGETHER).min(layer.cached().chunk_count());
        let read_bytes = match &mut self.task {
            Task::Fill(composer) => {
                if let Some(composer) = composer {
                    if !composer.is_ready(self.at.0) {
                        let before = layer.cached().kept_bytes();
                        composer.read_tables(self.at.0, layer)?;
                        let read_bytes = layer.cached().kept_bytes().saturating_sub(before);
                        return Ok(Some(Passed { read_bytes, is_part: true, ..Passed::default() }));
                    }
                    self.image_bytes += take(composer, layer, self.at.1..end);
                }
                fill(layer, self.at.1..end)?
            }
            Task::Scrub => scrub(layer, self.at.1..end)?,
        };
        self.at.1 = end;
        let image_bytes = std::mem::take(&mut self.image_bytes);
        Ok(Some(Passed { read_bytes, image_bytes, is_part: false }))
    }
}

/// Takes what an image has of chunks; returns the bytes.
fn take(composer: &mut Composer, layer: &CachedLayer, chunks: Range<usize>) -> u64 {
    let cached = layer.cached();
    let mut taken = 0;
    for chunk in chunks.filter(|&chunk| cached.is_missing(chunk)) {
        let composed = composer.compose(cached, chunk);
        if composed.is_some_and(|bytes| layer.take(chunk, bytes)) {
            taken += cached.chunk_len(chunk);
        }
    }
    taken
}

fn fill(layer: &CachedLayer, chunks: Range<usize>) -> io::Result<u64> {
    let cached = layer.cached();
    let bytes = |chunk: usize| cached.chunk_len(chunk);
    // What the file may have is proved, and not fetched as a rule.
    let absent = chunks.clone().filter(|&chunk| cached.is_missing(chunk)).map(bytes).sum();
    bring(layer, Cached::place_of(chunks.start), chunks.map(bytes).sum())?;
    Ok(absent)
}

fn scrub(layer: &CachedLayer, chunks: Range<usize>) -> io::Result<u64> {
    let (cached, mut read) = (layer.cached(), 0);
    for chunk in chunks.filter(|&chunk| !cached.is_missing(chunk)) {
        if !layer.prove_again(chunk)? {
            let at = Cached::place_of(chunk);
            tracing::warn!(layer = %layer.id(), %at, "the cache has other bytes than it was given: they are fetched again");
        }
        bring(layer, Cached::place_of(chunk), 1)?;
        read += cached.chunk_len(chunk);
    }
    Ok(read)
}

fn bring(layer: &CachedLayer, at: HostOffset, len: u64) -> io::Result<()> {
    match layer.wait_for(at, len, PATIENCE)? {
        Fetched::NotKept => Err(io::Error::new(io::ErrorKind::StorageFull, "the cache cannot be written")),
        _ => Ok(()),
    }
}

/// Has the published layers of a chain read through a cache, beside which their indices may lie: `newest` and those below it, by the names
/// that the chain has for them. Their repository is at `address`, or their directory. A pin or a head keeps them. For a time, [`BOOT`](crate::BOOT) as a rule, reads are
/// those of a guest that starts.
///
/// # Errors
/// A repository that cannot be opened or read, or keeps no state with this layer; a cache that cannot be used.
pub fn read_through(
    files: &CachedFiles,
    newest: &Path,
    address: Option<&RepositoryAddress>,
    (cache, on_missing): (&Arc<Cache>, OnMissing),
    boot: Duration,
) -> Result<()> {
    let name = newest.file_name().and_then(|name| name.to_str());
    let (Some(dir), Some(newest)) = (newest.parent(), name.and_then(ObjectId::of)) else { return Ok(()) };
    // Disks with the same base share one `Remote`.
    let is_it = |remote: &Arc<Remote>| {
        let is_there = |address: &RepositoryAddress| address.place() == remote.repository().describe();
        remote.is_through(cache, on_missing) && address.is_none_or(is_there)
    };
    let known = files.remote_of(dir).filter(is_it);
    let remote = match (known, address) {
        (Some(remote), _) => remote,
        (None, Some(address)) => Remote::new(cache, address.open()?, on_missing),
        (None, None) => {
            Remote::new(cache, Arc::new(DirectoryRepository::open(dir, is_object_name)?), on_missing)
        }
    };
    let objects = objects_below(&**remote.repository(), newest)?;
    files.add(LayerDirectory { path: dir, indices: &cache.path() }, &remote, &objects)?;
    ahead::begin(&remote, &objects, boot);
    Ok(())
}

/// A layer and what it stands on, as a state has it that the repository keeps.
pub(crate) fn objects_below(repository: &dyn Repository, newest: ObjectId) -> Result<Vec<Object>> {
    let find = |epoch: &Epoch| {
        let below = |disk: &DiskState| {
            let end = disk.objects.iter().position(|object| object.id == newest)?;
            Some(disk.objects[..=end].to_vec())
        };
        epoch.disks.iter().find_map(below)
    };
    // One may be released meanwhile, or damaged: others keep the same layers.
    let mut pins = Look::any(repository)?.pins().collect::<Vec<_>>().into_iter();
    if let Some(objects) = pins.find_map(|id| find(&Pin::read(repository, id).ok()?.epoch)) {
        return Ok(objects);
    }
    let found = Heads::of(repository)?.filter_map(Result::ok).find_map(|head| find(&head.epoch));
    found.ok_or_else(|| {
        let why = format!("no state that is kept has the layer {}", newest.layer_name());
        Error::NoState { repository: repository.describe(), why }
    })
}
