//! The layers of a disk, as a request sees them from its beginning to its end.
//!
//! ```text
//!                   ┌── active layer's entry ──► data in the active file
//!   guest offset ──►┤        │ says nothing
//!                   │        ▼
//!                   └── frozen map ──► data in a frozen file, compressed cluster, zeros
//! ```
//!
//! Lookups answer from memory; [`Layers::locate`] reads tables where it must.
//!
//! A disk's layers change when a snapshot is taken: then the disk has new [`Layers`], and those of before stay as
//! they are for the requests that began on them. What was active in those takes no more writes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_qcow2::{L2Entry, RawEntry, SubclusterState};
use vmstrata_store::{FileIdentity, LocalFile, OpenStore, Store};
use vmstrata_types::{ClusterBits, GuestOffset, HostOffset, LayerIndex};

use crate::active::Active;
use crate::active::session::forsake_journal;
use crate::blocks::BlockOrder;
use crate::error::{IoContext as _, Result};
use crate::flusher::{FlushClaim, Flusher};
use crate::layer::{Format, Layer, Tables};
use crate::map::{Before, FrozenMap, Run, Source};
use crate::opener::Opened;
use crate::resources::Resources;

/// See the module documentation.
#[derive(Clone, Debug)]
pub(crate) struct Layers {
    /// Counts the disk's changes of layers.
    pub(crate) generation: u64,
    /// Virtual size in bytes.
    pub(crate) size: u64,
    pub(crate) top: Top,
    pub(crate) frozen: Option<Arc<FrozenMap>>,
    pub(crate) resources: Arc<Resources>,
    /// Present when the active layer's file is used around the page cache.
    pub(crate) blocks: Option<Arc<BlockOrder>>,
    /// The layers of before the last snapshot, until what was active in them is on stable storage: a flush has to
    /// bring it there first.
    pub(crate) before: Option<Arc<Layers>>,
    /// While layers below are copied up: the map of those that will be left. A cluster may only be freed where it reads the
    /// same in both.
    pub(crate) merging_to: Option<Arc<FrozenMap>>,
}

/// What takes the writes.
#[derive(Clone, Debug)]
pub(crate) enum Top {
    /// Nothing: the disk is read-only and every layer is frozen.
    Frozen,
    Qcow2(Arc<Active>),
    Raw(RawTop),
}

impl Top {
    /// Alignment of what the active layer's file takes without reading first.
    fn alignment(&self) -> usize {
        let file = match self {
            Self::Frozen => None,
            Self::Qcow2(active) => active.store.local(),
            Self::Raw(raw) => raw.store.local(),
        };
        file.map_or(1, LocalFile::raw_alignment)
    }
}

/// A raw file open for writing.
#[derive(Clone, Debug)]
pub(crate) struct RawTop {
    pub(crate) path: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) identity: FileIdentity,
    /// The same store, for rings.
    pub(crate) file: Arc<OpenStore>,
    pub(crate) flusher: Arc<Flusher>,
    /// Present where the format was not said.
    pub(crate) guard: Option<Arc<HeaderGuard>>,
}

impl RawTop {
    pub(crate) fn new(path: PathBuf, opened: Opened, guard: Option<Arc<HeaderGuard>>) -> Self {
        let Opened { store, identity } = opened;
        let (file, flusher) =
            (OpenStore::new(Arc::clone(&store)), Arc::new(Flusher::new(Arc::clone(&store))));
        Self { path, store, identity, file, flusher, guard }
    }
}

/// Orders the writes to the first sector, which may bring a header piece by piece; holds whether a refusal was logged.
pub(crate) type HeaderGuard = Mutex<bool>;

/// One of a disk's layers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LayerRef<'a> {
    Active(&'a Active),
    Raw(&'a RawTop),
    Frozen(&'a Arc<Layer>),
}

/// A layer of a disk.
#[derive(Clone, Debug)]
pub struct LayerInfo {
    /// Its place in the chain.
    pub index: LayerIndex,
    /// Its file.
    pub path: PathBuf,
    /// How it keeps its bytes.
    pub format: Format,
    /// Virtual size in bytes.
    pub size: u64,
    /// Size of its clusters, if it has any.
    pub cluster_bits: Option<ClusterBits>,
    /// Bytes of its file when it was opened.
    pub file_len: u64,
}

impl Before for Layers {
    fn frozen(&self) -> Option<&Arc<FrozenMap>> {
        self.frozen.as_ref()
    }

    fn active(&self) -> Option<&Active> {
        match &self.top {
            Top::Qcow2(active) => Some(active),
            Top::Raw(_) | Top::Frozen => None,
        }
    }
}

impl Layers {
    /// The layers of a disk that is opened.
    pub(crate) fn new(
        size: u64,
        top: Top,
        frozen: Option<Arc<FrozenMap>>,
        resources: &Arc<Resources>,
    ) -> Self {
        let blocks = (top.alignment() > 1).then(Arc::default);
        let resources = Arc::clone(resources);
        Self { generation: 0, size, top, frozen, resources, blocks, before: None, merging_to: None }
    }

    /// The layer on top: the active one, or the newest frozen one of a disk that is only read.
    #[inline]
    pub(crate) fn top_index(&self) -> LayerIndex {
        let frozen = self.frozen.as_ref().map_or(0, |map| map.layers().len());
        index_of(if matches!(self.top, Top::Frozen) { frozen.saturating_sub(1) } else { frozen })
    }

    /// How many layers above `layer` there are.
    #[inline]
    pub(crate) fn depth_of(&self, layer: LayerIndex) -> u16 {
        self.top_index().get().saturating_sub(layer.get())
    }

    /// Brings the active layer, and what was active before it, to stable storage.
    ///
    /// # Errors
    /// A host that cannot flush or write: nothing more is known of what is on stable storage.
    pub(crate) fn commit(&self) -> Result<()> {
        if let Some(before) = &self.before {
            // Base first: no entry of this layer may be durable before what it was written over.
            before.commit()?;
        }
        match &self.top {
            Top::Frozen => Ok(()),
            Top::Raw(raw) => {
                raw.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&raw.path))
            }
            Top::Qcow2(active) => active.changes.commit(&**active),
        }
    }

    /// Gives the journals the records of all changes that were shown so far: no request completes before that.
    ///
    /// # Errors
    /// A journal that cannot be written: the disk must take no more writes.
    #[inline]
    pub(crate) fn record(&self) -> Result<()> {
        if let Some(before) = &self.before {
            before.record()?;
        }
        match &self.top {
            Top::Qcow2(active) => active.changes.record(),
            Top::Raw(_) | Top::Frozen => Ok(()),
        }
    }

    /// Claims the next flush of the active layer's file, for a ring, if nothing else is needed to bring what completed so far to
    /// stable storage.
    pub(crate) fn try_claim_flush(&self) -> Option<(Arc<OpenStore>, FlushClaim)> {
        let (file, flusher) = match &self.top {
            Top::Raw(raw) => (&raw.file, &raw.flusher),
            Top::Qcow2(active) if active.changes.is_empty() => (&active.file, &active.flusher),
            Top::Qcow2(_) | Top::Frozen => return None,
        };
        let is_logged = file.local().and_then(LocalFile::log).is_some_and(|log| log.has_joined());
        let is_all = self.before.is_none() && file.ring_alignment().is_some() && !is_logged;
        is_all.then(|| Some((Arc::clone(file), flusher.try_claim()?)))?
    }

    /// A flush begins: the bytes that it has to write out at most, as far as that is known and nothing else is to be waited for.
    pub(crate) fn begin_flush(&self) -> Option<u64> {
        let file = match &self.top {
            Top::Raw(raw) => &raw.file,
            Top::Qcow2(active) => &active.file,
            Top::Frozen => return None,
        };
        let is_known = self.before.is_none() && !self.is_flush_claimed();
        file.local().filter(|_| is_known).map(LocalFile::begin_flush)
    }

    /// Whether a ring flushes the active layer's file.
    pub(crate) fn is_flush_claimed(&self) -> bool {
        match &self.top {
            Top::Raw(raw) => raw.flusher.is_claimed(),
            Top::Qcow2(active) => active.flusher.is_claimed(),
            Top::Frozen => false,
        }
    }

    /// Whether a flush or a write of the active layer's tables failed.
    pub(crate) fn is_lost(&self) -> bool {
        let own = matches!(&self.top, Top::Qcow2(active) if active.is_lost());
        own || self.before.as_ref().is_some_and(|before| before.is_lost())
    }

    /// Removes the journals of files whose flushes fail. Their guests know: the flush was refused.
    pub(crate) fn remove_lost_journals(&self) {
        if let Top::Qcow2(active) = &self.top
            && active.flusher.has_failed()
        {
            forsake_journal(active);
        }
        self.before.iter().for_each(|before| before.remove_lost_journals());
    }

    /// Size of the active layer's clusters, or subclusters; 64 KiB, the unit others use, for a raw file.
    pub(crate) fn cluster_bits(&self) -> ClusterBits {
        match &self.top {
            Top::Qcow2(active) => Some(active.tables.geometry.unit()),
            Top::Raw(_) => None,
            Top::Frozen => self.frozen.as_ref().and_then(|map| map.layers().last()?.cluster_bits()),
        }
        .unwrap_or(ClusterBits::DEFAULT)
    }

    /// What is known of each layer, base first.
    pub(crate) fn describe(&self) -> Vec<LayerInfo> {
        let frozen = self.frozen.iter().flat_map(|map| map.layers()).map(|layer| LayerInfo {
            index: vmstrata_types::LayerIndex::BASE,
            path: layer.path.to_path_buf(),
            format: layer.format(),
            size: layer.size,
            cluster_bits: layer.cluster_bits(),
            file_len: layer.identity.len,
        });
        let mut layers: Vec<LayerInfo> = frozen.chain(self.describe_top()).collect();
        for (depth, layer) in layers.iter_mut().enumerate() {
            layer.index = index_of(depth);
        }
        layers
    }

    fn describe_top(&self) -> Option<LayerInfo> {
        let info = |path: &Path, format, cluster_bits, file_len| LayerInfo {
            index: vmstrata_types::LayerIndex::BASE,
            path: path.to_owned(),
            format,
            size: self.size,
            cluster_bits,
            file_len,
        };
        match &self.top {
            Top::Frozen => None,
            Top::Qcow2(active) => {
                let bits = active.tables.geometry.cluster_bits;
                Some(info(&active.path, Format::Qcow2, Some(bits), active.identity.len))
            }
            Top::Raw(raw) => Some(info(&raw.path, Format::Raw, None, self.size)),
        }
    }
}

/// The place of the layer with `depth` others below it.
pub(crate) fn index_of(depth: usize) -> vmstrata_types::LayerIndex {
    vmstrata_types::LayerIndex::new(u16::try_from(depth).expect("chains are shorter than 65,536"))
}

impl Layers {
    /// The run at `at`, at most `len` bytes, from memory alone; `None` when tables must be read first.
    ///
    /// Within the disk and `len > 0`, a run has at least one byte.
    #[inline]
    pub(crate) fn lookup(&self, at: GuestOffset, len: u64) -> Option<Run> {
        match &self.top {
            Top::Qcow2(active) => Run::of_steps(at, len, |at, len| self.step_over(active, at, len)),
            Top::Raw(_) => {
                Some(Run { source: Source::Data(LayerIndex::BASE, HostOffset::new(at.get())), len })
            }
            Top::Frozen => self.frozen.as_ref().expect("a disk has a layer").lookup(at, len),
        }
    }

    /// Has the processor fetch what [`Layers::lookup`] will look at.
    #[inline]
    pub(crate) fn prefetch(&self, at: GuestOffset) {
        if let Top::Qcow2(active) = &self.top {
            active.prefetch(active.cluster_of(at));
        }
        if let Some(map) = &self.frozen {
            map.prefetch(at);
        }
    }

    /// The part of a run that one cluster of the active layer answers for.
    #[inline]
    fn step_over(&self, active: &Active, at: GuestOffset, len: u64) -> Option<Run> {
        self.step_in(active, active.lookup(active.cluster_of(at))?, at, len)
    }

    /// The same by the cluster's raw entry.
    #[inline]
    pub(crate) fn step_in(&self, active: &Active, raw: RawEntry, at: GuestOffset, len: u64) -> Option<Run> {
        let bits = active.tables.geometry.cluster_bits;
        let within = at.within(bits);
        let len = len.min(bits.size() - within);
        let own = self.top_index();
        let source = match active.tables.entries.l2(raw) {
            Ok(L2Entry::Data { host, .. }) => Source::Data(own, host + within),
            Ok(L2Entry::Unallocated) => return self.below(at, len),
            Ok(L2Entry::Zero { .. }) => Source::Zero(own),
            Ok(L2Entry::Compressed { .. }) => Source::Compressed(own),
            Ok(L2Entry::Subclusters { host, states, .. }) => {
                let unit = active.tables.geometry.unit();
                let first = within >> unit.get();
                let (state, count) = states.run(first as u32);
                let len = len.min(((first + u64::from(count)) << unit.get()) - within);
                match (state, host) {
                    (SubclusterState::Allocated, Some(host)) => {
                        return Some(Run { source: Source::Data(own, host + within), len });
                    }
                    (SubclusterState::Zero, _) => {
                        return Some(Run { source: Source::Zero(own), len });
                    }
                    _ => return self.below(at, len),
                }
            }
            Err(_) => Source::Damaged(own),
        };
        Some(Run { source, len })
    }

    /// What the frozen layers have.
    #[inline]
    pub(crate) fn below(&self, at: GuestOffset, len: u64) -> Option<Run> {
        match &self.frozen {
            Some(map) => map.lookup(at, len),
            None => Some(Run { source: Source::Hole, len }),
        }
    }

    /// As [`Layers::below`], reading tables where need be.
    pub(crate) fn locate_below(&self, at: GuestOffset, len: u64) -> Result<Run> {
        match &self.frozen {
            Some(map) => map.locate(at, len),
            None => Ok(Run { source: Source::Hole, len }),
        }
    }

    /// As [`Layers::lookup`], reading tables where need be.
    pub(crate) fn locate(&self, at: GuestOffset, len: u64) -> Result<Run> {
        loop {
            if let Some(run) = self.lookup(at, len) {
                return Ok(run);
            }
            match &self.top {
                Top::Qcow2(active) => {
                    let raw = active.entry(active.cluster_of(at))?;
                    // With subclusters an entry may say nothing of this place.
                    if raw.is_empty() || active.has_subclusters() {
                        self.locate_below(at, 1)?;
                    }
                }
                _ => {
                    self.locate_below(at, 1)?;
                }
            }
        }
    }

    /// The layer at `index`.
    ///
    /// # Panics
    /// When the disk has no such layer.
    #[inline]
    pub(crate) fn layer(&self, index: LayerIndex) -> LayerRef<'_> {
        match &self.top {
            // Not by the number that it was opened with: layers below it come and go.
            Top::Qcow2(active) if index == self.top_index() => LayerRef::Active(active),
            Top::Raw(raw) => LayerRef::Raw(raw),
            _ => LayerRef::Frozen(
                self.frozen.as_ref().expect("only the active layer is not frozen").layer(index),
            ),
        }
    }

    /// The file reference of a layer, opened now if need be: where what [`Source`] names by its layer is read.
    pub(crate) fn file_of(&self, layer: LayerIndex) -> Result<Arc<OpenStore>> {
        match self.layer(layer) {
            LayerRef::Active(active) => Ok(Arc::clone(&active.file)),
            LayerRef::Raw(raw) => Ok(Arc::clone(&raw.file)),
            LayerRef::Frozen(frozen) => {
                self.resources.files().store(frozen).map_err(|error| error.in_layer(layer))
            }
        }
    }

    /// Whether a layer takes no writes.
    pub(crate) fn is_frozen(&self, layer: LayerIndex) -> bool {
        matches!(self.layer(layer), LayerRef::Frozen(_))
    }

    /// The same if it is open.
    #[inline]
    pub(crate) fn open_file_of(&self, layer: LayerIndex) -> Option<Arc<OpenStore>> {
        match self.layer(layer) {
            LayerRef::Active(active) => Some(Arc::clone(&active.file)),
            LayerRef::Raw(raw) => Some(Arc::clone(&raw.file)),
            LayerRef::Frozen(frozen) => frozen.open_file(),
        }
    }

    /// The file of a layer, for messages.
    pub(crate) fn path_of(&self, layer: LayerIndex) -> &Path {
        match self.layer(layer) {
            LayerRef::Active(active) => &active.path,
            LayerRef::Raw(raw) => &raw.path,
            LayerRef::Frozen(frozen) => &frozen.path,
        }
    }
}

impl<'a> LayerRef<'a> {
    /// What is needed to walk its tables; `None` for a raw layer.
    pub(crate) fn tables(self) -> Option<&'a Tables> {
        match self {
            Self::Active(active) => Some(&active.tables),
            Self::Raw(_) => None,
            Self::Frozen(frozen) => frozen.tables.as_ref(),
        }
    }

    /// Which file it is.
    pub(crate) fn identity(self) -> FileIdentity {
        match self {
            Self::Active(active) => active.identity,
            Self::Raw(raw) => raw.identity,
            Self::Frozen(frozen) => frozen.identity,
        }
    }

    /// How it keeps its bytes.
    pub(crate) fn format(self) -> Format {
        if self.tables().is_some() { Format::Qcow2 } else { Format::Raw }
    }
}
