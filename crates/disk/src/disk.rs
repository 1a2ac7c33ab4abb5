//! A disk: a chain of layers that reads and writes like one flat run of bytes.
//!
//! This module opens and closes disks. [`crate::layers`] answers *where* bytes are; [`crate::read`], [`crate::write`]
//! and [`crate::zero`] move them, [`crate::queue`] does so asynchronously.

mod attached;
mod durable;
mod finalize;
mod index;
mod killed;
mod maintained;
mod merge;
mod open;
mod resize;
mod run;
mod snapshot;
mod state;
mod switch;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use vmstrata_store::FileId;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use crate::chain::{OpenOptions, check_state_at};
use crate::epoch::Epochs;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::Format;
use crate::layers::LayerInfo;
use crate::layers::{Layers, Top, index_of};
use crate::loading::{Chain, freeze, read_chain};
use crate::refs::back_refs;
use crate::resources::Resources;
use crate::stats::{DiskStats, StatsSet};
use crate::workers::Mailbox;
use state::{Service, State};

pub use attached::{AttachedWriter, HasWriter};
pub use index::Indexing;
pub(crate) use merge::Running;
#[cfg(test)]
pub(crate) use open::open_top;
pub use resize::{ResizeFault, Resized, Shrink};
pub use snapshot::{Taken, Together, snapshot_together};

/// See the module documentation.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    size: AtomicU64,
    options: OpenOptions,
    layers: ArcSwap<Layers>,
    /// As in `layers`; queues look at it before every request.
    generation: AtomicU64,
    pub(crate) write_gate: Epochs,
    pub(crate) resources: Arc<Resources>,
    pub(crate) epochs: Epochs,
    pub(crate) stats: Arc<StatsSet>,
    state: State,
    /// Held while the disk is tended, and while the session on a file ends: nothing is written to it after that.
    tending: Mutex<()>,
    finalizing: finalize::Finalizing,
    /// Names that snapshots of the chain have, or had; `None` until one is asked for.
    snapshot_names: Mutex<Option<HashSet<String>>>,
    /// Whether its chain had an index that did not hold any more when the chain was read.
    lost_index: bool,
    /// Those to call when the layers have changed.
    queues: Mutex<Vec<Weak<Mailbox>>>,
    attached: Arc<attached::Attached>,
}

impl Disk {
    /// Opens the chain whose active layer is `path`.
    ///
    /// # Errors
    /// Anything wrong with any file of the chain, with the file's name, layer and offset.
    pub fn open(path: &Path, options: &OpenOptions, resources: &Arc<Resources>) -> Result<Arc<Self>> {
        let in_file = |error: Error| error.in_file(path);
        let mut chain = read_chain(path, options, resources)
            .or_else(|error| check_state_at(path, &**resources.files().opener()).and(Err(error)))?;
        chain.top.check_state()?;
        if chain.unfinished && !options.read_only {
            killed::finish_snapshot(chain, (options.cache, options.unflushed), resources)?;
            chain = read_chain(path, options, resources)?;
        }
        if options.read_only && (chain.unfinished || chain.top.is_in_session()) {
            tracing::warn!(disk = %path.display(), "its writer was killed, or is at work: what was written last shows once the disk has been opened for writing");
        }
        let Chain { top, mut below, index, lost_index, .. } = chain;
        if !options.read_only && !options.force {
            let file = (path, top.opened.identity.file);
            let found = resources.beside().standing_on(file, below.iter().map(|layer| &*layer.path));
            if let Some(image) = found.while_trying("look for images that stand on it").map_err(in_file)? {
                return Err(in_file(ErrorKind::IsBase { image }.into()));
            }
        }
        let size = top.size;
        let (top, frozen) = if options.read_only {
            below.push(freeze(top, resources));
            (Top::Frozen, Some(resources.share_map(below, index)?))
        } else {
            let frozen = if below.is_empty() { None } else { Some(resources.share_map(below, index)?) };
            let depth = frozen.as_ref().map_or(0, |map| map.layers().len());
            let place = (index_of(depth), options.unflushed);
            (open::open_top(top, place, || Ok(frozen.clone()), resources)?, frozen)
        };
        let layers = Layers::new(size, top, frozen, resources);
        let disk = Arc::new(Self { lost_index, ..Self::over(path, options, layers) });
        let maintained: std::sync::Weak<Self> = Arc::downgrade(&disk);
        resources.maintenance().watch(maintained);
        if let Err(error) = disk.enter_beside_merges() {
            // As if it had not been opened.
            let _ = disk.close();
            return Err(error);
        }
        if !options.read_only {
            let layers = disk.layers_now();
            let below = layers.frozen.iter().flat_map(|map| map.layers()).map(|layer| &*layer.path);
            back_refs::record_chain(path, below.chain([path]));
        }
        Ok(disk)
    }

    fn over(path: &Path, options: &OpenOptions, layers: Layers) -> Self {
        Self {
            path: path.to_owned(),
            size: AtomicU64::new(layers.size),
            options: options.clone(),
            resources: Arc::clone(&layers.resources),
            layers: ArcSwap::from_pointee(layers),
            generation: AtomicU64::new(0),
            write_gate: Epochs::default(),
            epochs: Epochs::default(),
            stats: Arc::default(),
            state: State::default(),
            tending: Mutex::new(()),
            finalizing: finalize::Finalizing::default(),
            snapshot_names: Mutex::default(),
            lost_index: false,
            queues: Mutex::default(),
            attached: Arc::default(),
        }
    }

    /// Virtual size in bytes, a multiple of 512; another one after [`Disk::resize`].
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The active layer's file, as it was named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format of the newest layer's file: a snapshot makes a raw disk qcow2.
    pub fn format(&self) -> Format {
        let layers = self.layers_now();
        match &layers.top {
            Top::Qcow2(_) => Format::Qcow2,
            Top::Raw(_) => Format::Raw,
            Top::Frozen => {
                let newest = layers.frozen.as_ref().and_then(|map| map.layers().last());
                newest.expect("a read-only disk has its newest layer").format()
            }
        }
    }

    /// The file that takes the writes, by whatever name; `None` for a disk that is only read.
    pub fn active_file(&self) -> Option<FileId> {
        match &self.layers_now().top {
            Top::Qcow2(active) => Some(active.identity.file),
            Top::Raw(raw) => Some(raw.identity.file),
            Top::Frozen => None,
        }
    }

    /// Whether nobody else may open `file`, or write it if that is meant (`writes`), while this disk is open.
    pub fn excludes(&self, file: FileId, writes: bool) -> bool {
        let is_layer = || {
            let layers = self.layers_now();
            layers.frozen.iter().flat_map(|map| map.layers()).any(|layer| layer.identity.file == file)
        };
        self.active_file() == Some(file) || writes && is_layer()
    }

    /// Whether writes are refused because the disk was opened so.
    pub fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    /// What queues did to the disk since it was opened.
    pub fn stats(&self) -> DiskStats {
        self.stats.sum()
    }

    /// How many layers the chain has: as many as [`Disk::layers`], without describing them.
    pub fn layer_count(&self) -> usize {
        self.layers_now().top_index().index() + 1
    }

    /// The layers that a request that begins now is about.
    #[inline]
    pub(crate) fn layers_now(&self) -> arc_swap::Guard<Arc<Layers>> {
        self.layers.load()
    }

    /// How often the layers have changed.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Gives requests that begin from now on other layers. No writer is inside, unless both have the same active layer.
    fn put_layers(&self, mut layers: Layers) -> Arc<Layers> {
        layers.generation = self.generation() + 1;
        let layers = Arc::new(layers);
        self.layers.store(Arc::clone(&layers));
        self.generation.store(layers.generation, Ordering::Release);
        layers
    }

    /// As [`Disk::put_layers`]. A queue that has no requests lets go of the layers of before, whose locks would look like
    /// somebody else's.
    fn put_layers_and_call(&self, layers: Layers) -> Arc<Layers> {
        let layers = self.put_layers(layers);
        self.queues.lock().iter().filter_map(Weak::upgrade).for_each(|mailbox| mailbox.call());
        layers
    }

    /// Calls `mailbox` when the layers have changed.
    pub(crate) fn call_when_changed(&self, mailbox: &Arc<Mailbox>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(mailbox));
    }

    /// Size of the active layer's clusters; 64 KiB, the unit others use, for a raw file.
    pub fn cluster_bits(&self) -> ClusterBits {
        self.layers_now().cluster_bits()
    }

    /// The layers of the chain, base first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.layers_now().describe()
    }

    /// Whether the map answers for `len` bytes at `at` from memory. For measurements.
    #[inline]
    pub fn map_hit(&self, at: GuestOffset, len: u64) -> bool {
        self.layers_now().lookup(at, len).is_some()
    }

    /// Reads the tables that answer for the whole disk, as far as they fit the metadata cache.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub fn warm_map(&self) -> Result<()> {
        let mut at = GuestOffset::ZERO;
        let size = self.size();
        while at.get() < size {
            at = at + self.layers_now().locate(at, size - at.get())?.len;
        }
        Ok(())
    }

    /// Refuses what does not lie on the disk, and everything once the disk is closed.
    pub(crate) fn check_range(&self, range: GuestRange) -> Result<()> {
        if self.state.service() == Service::Closed {
            return Err(Error::from(ErrorKind::Closed).in_file(&self.path));
        }
        let size = self.size();
        if !range.fits(size) {
            return Err(Error::from(ErrorKind::OutOfRange { range, size }).in_file(&self.path));
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
}
