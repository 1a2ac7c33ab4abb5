//! A disk: a chain of layers that reads and writes like one flat run of bytes.
//!
//! ```text
//!                   ┌── active layer's entry ──► data in the active file
//!   guest offset ──►┤        │ says nothing
//!                   │        ▼
//!                   └── frozen map ──► data in a frozen file, compressed cluster, zeros
//! ```
//!
//! This module opens and closes disks and answers *where* bytes are; [`crate::read`], [`crate::write`] and
//! [`crate::zero`] move them, [`crate::queue`] does so asynchronously.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use vmstrata_qcow2::header::field;
use vmstrata_qcow2::{Incompatible, L2Entry};
use vmstrata_store::Store;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, HostOffset, LayerIndex};

use crate::active::Active;
use crate::blocks::BlockOrder;
use crate::chain::{
    Chain, OpenOptions, Qcow2Head, SESSION_MASK, Top as OpenTop, freeze, read_chain, read_head,
};
use crate::epoch::Epochs;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::flusher::Flusher;
use crate::journal::Journal;
use crate::layer::Format;
use crate::map::{FrozenMap, Run, Source};
use crate::resources::Resources;

/// See the module documentation.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    size: u64,
    pub(crate) top: Top,
    pub(crate) frozen: Option<Arc<FrozenMap>>,
    pub(crate) resources: Arc<Resources>,
    pub(crate) epochs: Epochs,
    /// Present when the active layer's file is used around the page cache.
    pub(crate) blocks: Option<BlockOrder>,
    latch: OnceLock<String>,
    closed: AtomicBool,
    /// Held while the disk is tended, and while it is closed: nothing is written to a disk after its close.
    tending: Mutex<()>,
}

/// What takes the writes.
#[derive(Debug)]
pub(crate) enum Top {
    /// Nothing: the disk is read-only and every layer is frozen.
    Frozen,
    Qcow2(Box<Active>),
    Raw(RawTop),
}

impl Top {
    /// Alignment of what the active layer's file takes without reading first.
    fn alignment(&self) -> usize {
        match self {
            Self::Frozen => 1,
            Self::Qcow2(active) => active.store.raw_alignment(),
            Self::Raw(raw) => raw.store.raw_alignment(),
        }
    }
}

/// A raw file open for writing.
#[derive(Debug)]
pub(crate) struct RawTop {
    pub(crate) path: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    flusher: Flusher,
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

/// Version 2 headers have no feature bits.
const FEATURES_SINCE: u32 = 3;

impl Disk {
    /// Opens the chain whose active layer is `path`.
    ///
    /// # Errors
    /// Anything wrong with any file of the chain, with the file's name, layer and offset.
    pub fn open(path: &Path, options: &OpenOptions, resources: &Arc<Resources>) -> Result<Arc<Self>> {
        let Chain { top, mut below } = read_chain(path, options, resources)?;
        let size = top.size;
        let (top, frozen) = if options.read_only {
            below.push(freeze(top, resources));
            (Top::Frozen, Some(resources.share_map(below)?))
        } else {
            let frozen = if below.is_empty() { None } else { Some(resources.share_map(below)?) };
            let depth = frozen.as_ref().map_or(0, |map| map.layers().len());
            let index = LayerIndex::new(u16::try_from(depth).expect("chains are shorter than 65,536"));
            (open_top(top, index, resources)?, frozen)
        };
        let blocks = (top.alignment() > 1).then(BlockOrder::default);
        let disk = Arc::new(Self {
            path: path.to_owned(),
            size,
            top,
            frozen,
            resources: Arc::clone(resources),
            epochs: Epochs::default(),
            blocks,
            latch: OnceLock::new(),
            closed: AtomicBool::new(false),
            tending: Mutex::new(()),
        });
        resources.upkeep().watch(&disk);
        Ok(disk)
    }

    /// Virtual size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The active layer's file, as it was named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether writes are refused because the disk was opened so.
    pub fn is_read_only(&self) -> bool {
        matches!(self.top, Top::Frozen)
    }

    /// Size of the active layer's clusters; 64 KiB, the unit others use, for a raw file.
    pub fn cluster_bits(&self) -> ClusterBits {
        match &self.top {
            Top::Qcow2(active) => Some(active.tables.geometry.cluster_bits),
            Top::Raw(_) => None,
            Top::Frozen => self.frozen.as_ref().and_then(|map| map.layers().last()?.cluster_bits()),
        }
        .unwrap_or(ClusterBits::DEFAULT)
    }

    /// The layers of the chain, base first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        let frozen = self.frozen.iter().flat_map(|map| map.layers()).map(|layer| LayerInfo {
            index: LayerIndex::BASE,
            path: layer.path.to_path_buf(),
            format: layer.format(),
            size: layer.size,
            cluster_bits: layer.cluster_bits(),
            file_len: layer.identity.len,
        });
        let top = match &self.top {
            Top::Frozen => None,
            Top::Qcow2(active) => Some(LayerInfo {
                index: active.index,
                path: active.path.clone(),
                format: Format::Qcow2,
                size: self.size,
                cluster_bits: Some(active.tables.geometry.cluster_bits),
                file_len: active.identity.len,
            }),
            Top::Raw(raw) => Some(LayerInfo {
                index: LayerIndex::BASE,
                path: raw.path.clone(),
                format: Format::Raw,
                size: self.size,
                cluster_bits: None,
                file_len: self.size,
            }),
        };
        let mut layers: Vec<LayerInfo> = frozen.chain(top).collect();
        for (depth, layer) in layers.iter_mut().enumerate() {
            layer.index = LayerIndex::new(u16::try_from(depth).expect("chains are shorter than 65,536"));
        }
        layers
    }

    /// Refuses what does not lie on the disk, and everything once the disk is closed.
    pub(crate) fn check_range(&self, range: GuestRange) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::from(ErrorKind::Closed).in_file(&self.path));
        }
        if !range.fits(self.size) {
            return Err(Error::from(ErrorKind::OutOfRange { range, size: self.size }).in_file(&self.path));
        }
        Ok(())
    }

    /// Refuses requests whose buffers have another length than their range.
    pub(crate) fn check_buffers(&self, range: GuestRange, len: usize) -> Result<()> {
        self.check_range(range)?;
        if len as u64 != range.len {
            return Err(Error::from(ErrorKind::BufferLength { range, len }).in_file(&self.path));
        }
        Ok(())
    }

    /// Refuses writes to a disk that takes none.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::from(ErrorKind::ReadOnly).in_file(&self.path));
        }
        match self.latch.get() {
            Some(cause) => Err(Error::from(ErrorKind::Latched { cause: cause.clone() }).in_file(&self.path)),
            None => Ok(()),
        }
    }

    /// Remembers that nothing more is known of what is on stable storage: the disk takes no more writes.
    pub(crate) fn latch(&self, error: Error) -> Error {
        let first = self.latch.set(error.to_string()).is_ok();
        if first {
            tracing::error!(disk = %self.path.display(), %error, "disk takes no more writes");
        }
        if let Top::Qcow2(active) = &self.top
            && active.flusher.has_failed()
        {
            // What the journal leads to may never have reached the disk, copied-up bytes among it.
            active.changes.remove_journal();
        }
        error
    }

    /// Latches the disk if the error is of the kind after which nothing is known of what is on stable storage.
    pub(crate) fn latch_if_lost(&self, error: Error) -> Error {
        match &self.top {
            Top::Qcow2(active) if active.is_lost() && self.latch.get().is_none() => self.latch(error),
            _ => error,
        }
    }

    /// The run at `at`, at most `len` bytes, from memory alone; `None` when tables must be read first.
    ///
    /// Within the disk and `len > 0`, a run has at least one byte.
    #[inline]
    pub(crate) fn lookup(&self, at: GuestOffset, len: u64) -> Option<Run> {
        match &self.top {
            Top::Qcow2(active) => self.lookup_over(active, at, len),
            Top::Raw(_) => {
                Some(Run { source: Source::Data(LayerIndex::BASE, HostOffset::new(at.get())), len })
            }
            Top::Frozen => self.frozen.as_ref().expect("a disk has a layer").lookup(at, len),
        }
    }

    #[inline]
    fn lookup_over(&self, active: &Active, at: GuestOffset, len: u64) -> Option<Run> {
        let mut run = self.step_over(active, at, len)?;
        while run.len < len {
            let Some(next) = self.step_over(active, at + run.len, len - run.len) else { break };
            if next.source != run.source.advanced(run.len) {
                break;
            }
            run.len += next.len;
        }
        Some(run)
    }

    /// The part of a run that one cluster of the active layer answers for.
    #[inline]
    fn step_over(&self, active: &Active, at: GuestOffset, len: u64) -> Option<Run> {
        let bits = active.tables.geometry.cluster_bits;
        let within = at.within(bits);
        let len = len.min(bits.size() - within);
        let source = match active.tables.entries.l2(active.lookup(active.cluster_of(at))?) {
            Ok(L2Entry::Data { host, .. }) => Source::Data(active.index, host + within),
            Ok(L2Entry::Unallocated) => return self.below(at, len),
            Ok(L2Entry::Zero { .. }) => Source::Zero(active.index),
            Ok(L2Entry::Compressed { .. }) => Source::Compressed(active.index),
            Err(_) => Source::Damaged(active.index),
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

    /// As [`Disk::below`], reading tables where need be.
    pub(crate) fn locate_below(&self, at: GuestOffset, len: u64) -> Result<Run> {
        match &self.frozen {
            Some(map) => map.locate(at, len),
            None => Ok(Run { source: Source::Hole, len }),
        }
    }

    /// As [`Disk::lookup`], reading tables where need be.
    pub(crate) fn locate(&self, at: GuestOffset, len: u64) -> Result<Run> {
        loop {
            if let Some(run) = self.lookup(at, len) {
                return Ok(run);
            }
            match &self.top {
                Top::Qcow2(active) => {
                    if active.entry(active.cluster_of(at))? == 0 {
                        self.locate_below(at, 1)?;
                    }
                }
                _ => {
                    self.locate_below(at, 1)?;
                }
            }
        }
    }

    /// Whether the map answers for `len` bytes at `at` from memory. For measurements.
    #[inline]
    pub fn map_hit(&self, at: GuestOffset, len: u64) -> bool {
        self.lookup(at, len).is_some()
    }

    /// Reads the tables that answer for the whole disk, as far as they fit the metadata cache.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub fn warm_map(&self) -> Result<()> {
        let mut at = GuestOffset::ZERO;
        while at.get() < self.size {
            at = at + self.locate(at, self.size - at.get())?.len;
        }
        Ok(())
    }

    /// The file of a layer, opened now if need be.
    pub(crate) fn store_of(&self, layer: LayerIndex) -> Result<Arc<dyn Store>> {
        match self.open_store_of(layer) {
            Some(store) => Ok(store),
            None => {
                let map = self.frozen.as_ref().expect("only frozen layers are ever closed");
                self.resources.files().store(map.layer(layer)).map_err(|error| error.in_layer(layer))
            }
        }
    }

    /// The file of a layer if it is open.
    #[inline]
    pub(crate) fn open_store_of(&self, layer: LayerIndex) -> Option<Arc<dyn Store>> {
        match &self.top {
            Top::Qcow2(active) if layer == active.index => Some(Arc::clone(&active.store)),
            Top::Raw(raw) => Some(Arc::clone(&raw.store)),
            _ => self.frozen.as_ref()?.layer(layer).open_file(),
        }
    }

    pub(crate) fn path_of(&self, layer: LayerIndex) -> &Path {
        match (&self.top, &self.frozen) {
            (Top::Qcow2(active), _) if layer == active.index => &active.path,
            (Top::Qcow2(_) | Top::Frozen, Some(map)) => &map.layer(layer).path,
            _ => &self.path,
        }
    }

    /// Brings everything written before the call to stable storage, with the tables that lead to it.
    ///
    /// # Errors
    /// A host that cannot flush or write: the disk then takes no more writes.
    pub fn flush(&self) -> Result<()> {
        self.check_range(GuestRange::new(GuestOffset::ZERO, 0))?;
        if self.is_read_only() {
            return Ok(());
        }
        self.check_writable()?;
        self.commit()
    }

    fn commit(&self) -> Result<()> {
        match &self.top {
            Top::Frozen => Ok(()),
            Top::Raw(raw) => {
                raw.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&raw.path))
            }
            Top::Qcow2(active) => active.changes.commit(&**active),
        }
        .map_err(|error| self.latch(error))
    }

    /// Commits changes that wait since `age` or longer, and gives back clusters that no one uses any more.
    pub(crate) fn tend(&self, age: Duration) {
        let Top::Qcow2(active) = &self.top else { return };
        let _tending = self.tending.lock();
        if self.closed.load(Ordering::Acquire) || self.latch.get().is_some() {
            return;
        }
        if active.changes.waited(age) && self.commit().is_err() {
            return;
        }
        if let Err(error) = self.reclaim(active) {
            tracing::warn!(disk = %self.path.display(), %error, "cannot free clusters: they are leaked until `vmstrata check --repair=leaks`");
        }
    }

    fn reclaim(&self, active: &Active) -> Result<()> {
        let freed = active.changes.take_reclaimable();
        if freed.is_empty() {
            return Ok(());
        }
        self.epochs.synchronize();
        for run in freed {
            active.alloc.free(run.at, run.len).map_err(|error| error.in_file(&active.path))?;
        }
        Ok(())
    }

    /// Ends the disk: waits for requests under way, flushes, and leaves an image that stock tools find clean.
    ///
    /// Later requests fail; a second call does nothing.
    ///
    /// # Errors
    /// What could not be flushed or written; the image is then as after a crash.
    pub fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let _tending = self.tending.lock();
        self.epochs.synchronize();
        if self.latch.get().is_some() {
            return self.check_writable();
        }
        self.commit()?;
        let Top::Qcow2(active) = &self.top else { return Ok(()) };
        let finish = || -> Result<()> {
            self.reclaim(active)?;
            active.alloc.release_claimed()?;
            if active.tables.version >= FEATURES_SINCE {
                // Refcounts first: whoever finds no session in the header takes them to be right.
                active.flusher.flush().while_trying("flush")?;
                write_session(active, 0)?;
            }
            active.flusher.flush().while_trying("flush")
        };
        finish().map_err(|error| self.latch(error.in_file(&active.path)))?;
        active.changes.remove_journal();
        Ok(())
    }
}

/// Makes the top file ready for writes.
fn open_top(top: OpenTop, index: LayerIndex, resources: &Resources) -> Result<Top> {
    let OpenTop { path, opened, head, .. } = top;
    let Some(head) = head else {
        let flusher = Flusher::new(Arc::clone(&opened.store));
        return Ok(Top::Raw(RawTop { path, store: opened.store, flusher }));
    };
    let in_file = |error: Error| error.in_file(&path);
    let head = repaired(head, &opened.store).map_err(in_file)?;
    let header = &head.header;
    let (cluster, block) = (header.cluster_bits.size(), opened.store.raw_alignment());
    if cluster < block as u64 {
        return Err(in_file(ErrorKind::BlockTooLarge { cluster, block }.into()));
    }
    let identity = opened.identity;
    let mut active = Active::open(&path, Arc::clone(&opened.store), identity, header, index, resources)
        .map_err(|error| in_file(error.in_layer(index)))?;
    if header.version < FEATURES_SINCE {
        // No bit would say whether a journal is about this state of the image.
        active.changes.commit_each_change(resources.journal_dir().is_some());
        return Ok(Top::Qcow2(Box::new(active)));
    }
    let session = header.autoclear.bits() & SESSION_MASK;
    let new_session = new_session();
    let journal = match resources.journal_dir() {
        None => None,
        Some(dir) => {
            let (mut journal, found) = Journal::open(dir, identity.file, session)
                .while_trying("open the volatile journal")
                .map_err(|error| error.in_file(dir))?;
            recover(&mut active, session, &found).map_err(in_file)?;
            journal
                .reset(new_session)
                .while_trying("write the volatile journal")
                .map_err(|e| e.in_file(dir))?;
            Some(journal)
        }
    };
    write_session(&active, new_session).map_err(in_file)?;
    active.changes.use_journal(journal);
    Ok(Top::Qcow2(Box::new(active)))
}

/// Takes up the journal of a killed process, if there is one.
fn recover(active: &mut Active, session: u64, found: &[crate::journal::Record]) -> Result<()> {
    if session == 0 || found.is_empty() {
        return Ok(());
    }
    if active.take_up(found)? {
        active.changes.commit(active)?;
        tracing::info!(disk = %active.path.display(), changes = found.len(), "took up the writes of a killed process");
    } else {
        tracing::warn!(disk = %active.path.display(), "the image was changed since a process writing it was killed: its unflushed writes are dropped");
    }
    Ok(())
}

/// Refuses an image marked corrupt; repairs one whose refcounts were left behind.
fn repaired(head: Qcow2Head, store: &Arc<dyn Store>) -> Result<Qcow2Head> {
    if head.header.incompatible.contains(Incompatible::CORRUPT) {
        return Err(ErrorKind::MarkedCorrupt.into());
    }
    if !head.header.incompatible.contains(Incompatible::DIRTY) {
        return Ok(head);
    }
    let report = crate::check::repair_dirty(store)?;
    tracing::info!(?report, "repaired the refcounts of an image that was not closed");
    let len = store.len().while_trying("read the file's length")?;
    let head = read_head(&**store, len)?;
    let sound = !head.header.incompatible.intersects(Incompatible::CORRUPT | Incompatible::DIRTY);
    if sound { Ok(head) } else { Err(ErrorKind::MarkedCorrupt.into()) }
}

/// Writes the autoclear bits: ours, and none that stand for structures we do not keep up to date.
fn write_session(active: &Active, session: u64) -> Result<()> {
    let at = HostOffset::new(field::AUTOCLEAR);
    let written = active.store.write_all(&session.to_be_bytes(), at);
    written.while_trying("write the header").map_err(|error| error.at(at))?;
    active.flusher.flush().while_trying("flush the header")
}

/// A number that no earlier process used for this image, in all likelihood; never 0.
fn new_session() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    (RandomState::new().hash_one(std::process::id()) & SESSION_MASK) | 1 << 63
}
