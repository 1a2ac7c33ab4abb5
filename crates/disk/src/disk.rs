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

mod durable;
mod locate;
mod open;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vmstrata_store::{OpenStore, Store};
use vmstrata_types::{ClusterBits, GuestRange, LayerIndex};

use crate::active::Active;
use crate::blocks::BlockOrder;
use crate::chain::{Chain, OpenOptions, freeze, read_chain};
use crate::epoch::Epochs;
use crate::error::{Error, ErrorKind, Result};
use crate::flusher::Flusher;
use crate::layer::Format;
use crate::map::FrozenMap;
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
    /// The same store, for rings.
    pub(crate) file: Arc<OpenStore>,
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
            (open::open_top(top, index, resources)?, frozen)
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
}
