//! A disk: a chain of layers that reads and writes like one flat run of bytes.
//!
//! This module opens, flushes and closes disks, and carries requests out, blocking. [`crate::layers`] answers *where* bytes are; [`crate::read`], [`crate::write`]
//! and [`crate::zero`] move them, [`crate::queue`] does so asynchronously.

mod attached;
mod finalize;
mod flat;
mod home;
mod index;
mod merge;
mod open;
mod rebase;
mod resize;
mod snapshot;
mod state;
mod switch;
mod watch;

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use vmstrata_store::{AlignedBuf, FileId, Segment, total_len};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use crate::absent::Absent;
use crate::active::Active;
use crate::active::session::leave_clean;
use crate::chain::OpenOptions;
use crate::epoch::Epochs;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Format;
use crate::layers::{LayerInfo, Layers, Top};
use crate::maintenance::Maintained;
use crate::observer::{Durability, Hooks, IoObserver};
use crate::request::{Op, Request};
use crate::resources::Resources;
use crate::stats::{DiskStats, StatsSet};
use crate::throttle::{Limits, Pace, Throttle};
use crate::workers::{CarryOut, Mailbox};
use crate::zero::{Purpose, ZERO_CHUNK};
use state::{Service, State};

pub use attached::{AttachedWriter, HasWriter};
pub use flat::FlatHome;
pub use home::{NewHome, make_overlay, remove_second_name};
pub use index::Indexing;
pub(crate) use merge::Running;
#[cfg(test)]
pub(crate) use open::open_top;
pub use resize::{ResizeFault, Resized, Shrink};
pub use snapshot::{Taken, Together, snapshot_together};
pub use watch::Watch;

/// See the module documentation.
#[derive(Debug)]
pub struct Disk {
    home: home::Home,
    size: AtomicU64,
    layers: ArcSwap<Layers>,
    /// As in `layers`; queues look at it before every request.
    generation: AtomicU64,
    pub(crate) hooks: Hooks,
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
    /// Those to call when the layers or the limits have changed.
    queues: Mutex<Vec<Weak<Mailbox>>>,
    attached: Arc<attached::Attached>,
}

impl Disk {
    /// Opens the chain whose active layer is `path`.
    ///
    /// # Errors
    /// Anything wrong with any file of the chain, with the file's name, layer and offset.
    pub fn open(path: &Path, options: &OpenOptions, resources: &Arc<Resources>) -> Result<Arc<Self>> {
        let (layers, lost_index) = open::open_layers(path, options, resources)?;
        let disk = Arc::new(Self { lost_index, ..Self::over(path, options, layers) });
        let maintained: std::sync::Weak<Self> = Arc::downgrade(&disk);
        resources.maintenance().watch(maintained);
        if let Err(error) = disk.enter_beside_merges() {
            // As if it had not been opened.
            let _ = disk.close();
            return Err(error);
        }
        if !options.read_only {
            disk.record_chain();
        }
        Ok(disk)
    }

    fn over(path: &Path, options: &OpenOptions, layers: Layers) -> Self {
        Self {
            home: home::Home::new(path, options),
            size: AtomicU64::new(layers.size),
            resources: Arc::clone(&layers.resources),
            layers: ArcSwap::from_pointee(layers),
            generation: AtomicU64::new(0),
            hooks: Hooks::default(),
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

    /// Whether its active layer holds anything: whether there was a write or a discard since the last snapshot.
    pub fn has_written(&self) -> bool {
        match &self.layers_now().top {
            Top::Qcow2(active) => active.tables_end() > 0,
            Top::Raw(_) => true,
            Top::Frozen => false,
        }
    }

    /// Whether this disk excludes others from `file` while it is open: from opening it, or with `writes`, from writing it.
    pub fn excludes(&self, file: FileId, writes: bool) -> bool {
        let is_layer = || {
            let layers = self.layers_now();
            layers.frozen.iter().flat_map(|map| map.layers()).any(|layer| layer.identity.file == file)
        };
        self.active_file() == Some(file) || writes && is_layer()
    }

    /// Whether writes are refused because the disk was opened so.
    pub fn is_read_only(&self) -> bool {
        self.home().options.read_only
    }

    /// What queues did to the disk since it was opened.
    pub fn stats(&self) -> DiskStats {
        self.stats.sum()
    }

    /// Shows each request of the disk's queues to `observer`, or to none from now on. A queue looks who it is at each push and
    /// reap, so of requests in flight only the end may be seen.
    pub fn observe(&self, observer: Option<Arc<dyn IoObserver>>) {
        self.hooks.change(|hooked| hooked.observer = observer);
    }

    /// Limits the requests of the disk's queues from now on; without any limit, those that wait go on at once.
    pub fn limit(&self, limits: Limits) {
        self.hooks.change(|hooked| {
            let pace = hooked.throttle.as_ref().map_or(Pace::Free, |throttle| throttle.pace());
            hooked.throttle = Throttle::new(limits, pace, Instant::now()).map(Arc::new);
        });
        self.call_queues();
    }

    /// Sets the pace of the writes of the disk's queues from now on, beside its limits.
    pub fn pace(&self, pace: Pace) {
        self.hooks.change(|hooked| match &hooked.throttle {
            Some(throttle) if pace != Pace::Free => throttle.set_pace(pace),
            Some(throttle) if throttle.limits() != Limits::default() => throttle.set_pace(pace),
            _ => hooked.throttle = Throttle::new(Limits::default(), pace, Instant::now()).map(Arc::new),
        });
        self.call_queues();
    }

    /// Has flushes, and writes with FUA, of the disk's queues that begin to end from now on wait for `durability`, or for this host alone.
    pub fn hold_flushes(&self, durability: Option<Arc<dyn Durability>>) {
        self.hooks.change(|hooked| hooked.durability = durability);
    }

    /// The limits now.
    pub fn limits(&self) -> Limits {
        self.hooks.get().1.throttle.map(|throttle| throttle.limits()).unwrap_or_default()
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
        self.call_queues();
        layers
    }

    fn call_queues(&self) {
        self.queues.lock().iter().filter_map(Weak::upgrade).for_each(|mailbox| mailbox.call());
    }

    /// Calls `mailbox` when the layers have changed.
    pub(crate) fn call_when_changed(&self, mailbox: &Arc<Mailbox>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(mailbox));
    }

    /// Size of the active layer's clusters, or subclusters: what a discard gives back. 64 KiB, the unit others use, for a raw file.
    pub fn cluster_bits(&self) -> ClusterBits {
        self.layers_now().cluster_bits()
    }

    /// The layers of the chain, base first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.layers_now().describe()
    }

    /// The same, with their generation, when the files of the frozen ones hold all that the layers do. What was active before a snapshot
    /// is frozen before its tables are in its file. Waits for snapshots.
    pub fn whole_layers(&self) -> (u64, Vec<LayerInfo>) {
        let _changing = self.change();
        (self.generation(), self.layers())
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
            return Err(Error::from(ErrorKind::Closed).in_file(self.path()));
        }
        let size = self.size();
        if !range.fits(size) {
            return Err(Error::from(ErrorKind::OutOfRange { range, size }).in_file(self.path()));
        }
        Ok(())
    }

    /// Refuses requests whose buffers have another length than their range.
    pub(crate) fn check_buffers(&self, range: GuestRange, len: usize) -> Result<()> {
        self.check_range(range)?;
        if len as u64 != range.len {
            return Err(Error::from(ErrorKind::BufferLength { range, len }).in_file(self.path()));
        }
        Ok(())
    }

    /// Stops requests: returns once none is inside; new ones wait for [`Disk::resume`], or are refused once the disk is closed.
    /// Flushes, snapshots and merges go on. One caller at a time may drain a disk.
    pub fn drain(&self) {
        self.epochs.close();
    }

    /// Lets requests in again.
    pub fn resume(&self) {
        self.epochs.open();
    }

    /// Refuses a request that makes no sense for this disk.
    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        if request.op.has_buffers() {
            self.check_buffers(request.range, total_len(&request.segments))?;
        } else if request.op != Op::Flush {
            self.check_range(request.range)?;
        }
        if request.op.changes_disk() { self.check_writable() } else { Ok(()) }
    }

    /// Carries a request out, blocking until it is done.
    ///
    /// # Errors
    /// As the method for the operation.
    pub fn run(&self, request: &Request) -> Result<()> {
        self.check(request)?;
        let segments: &[Segment<'_>] = &request.segments;
        let range = request.range;
        match request.op {
            Op::Read => self.read_counted(range.start, segments),
            Op::Write { fua } => self.write(range.start, segments).and_then(|()| self.flush_if(fua)),
            Op::Flush => self.flush(),
            Op::Discard => self.discard(range),
            Op::WriteZeroes { unmap, fua } => {
                self.write_zeroes(range, unmap).and_then(|()| self.flush_if(fua))
            }
            Op::Prefetch => self.prefetch(range),
        }
    }

    fn flush_if(&self, fua: bool) -> Result<()> {
        if fua { self.flush() } else { Ok(()) }
    }
}

impl Disk {
    pub(crate) fn may_be_absent(&self) -> bool {
        self.resources.files().opener().may_be_absent()
    }
}

impl CarryOut for Disk {
    fn check(&self, request: &Request) -> Result<()> {
        self.check(request)
    }

    fn absent(&self, request: &Request) -> Vec<Absent> {
        if !self.may_be_absent() {
            return Vec::new();
        }
        // A flush goes on while the disk is drained.
        let _guard = if request.op == Op::Flush { self.epochs.guard() } else { self.epochs.enter() };
        match self.check(request) {
            Ok(()) => self.layers_now().absent_for(request),
            Err(_) => Vec::new(),
        }
    }

    fn run(&self, request: &Request) -> Result<()> {
        self.run(request)
    }
}

impl Disk {
    /// Writes `from` at `at`. It can be read once this returns, and is durable after the next [`Disk::flush`].
    ///
    /// # Errors
    /// A disk that takes no writes, a range that does not fit it, or a host that is full or cannot write: any part
    /// of the range may then have been written.
    pub fn write(&self, at: GuestOffset, from: &[Segment<'_>]) -> Result<()> {
        let _guard = self.epochs.enter();
        let _inside = self.write_gate.enter();
        let len = total_len(from);
        self.check_range(GuestRange::new(at, len as u64))?;
        self.check_writable()?;
        self.layers_now().write(at, from).map_err(|error| self.fail_if_fatal(error))
    }

    /// Makes a range read as zeros; with `unmap` its space is given back.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn write_zeroes(&self, range: GuestRange, unmap: bool) -> Result<()> {
        self.clear(range, if unmap { Purpose::ZeroAndFree } else { Purpose::Zero })
    }

    /// Gives the space of a range back. Whole clusters read as zeros afterwards (except in version 2 images with a
    /// backing file, which cannot say so: there they are left alone); parts of clusters are left alone.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn discard(&self, range: GuestRange) -> Result<()> {
        self.clear(range, Purpose::Discard)
    }

    fn clear(&self, range: GuestRange, purpose: Purpose) -> Result<()> {
        let _guard = self.epochs.enter();
        let _inside = self.write_gate.enter();
        self.check_range(range)?;
        self.check_writable()?;
        if range.len == 0 {
            return Ok(());
        }
        self.layers_now().clear(range, purpose).map_err(|error| self.fail_if_fatal(error))
    }

    /// Reads a range into the host's page cache, as far as that is useful.
    ///
    /// # Errors
    /// As [`Disk::read`].
    pub fn prefetch(&self, range: GuestRange) -> Result<()> {
        let mut buf = AlignedBuf::zeroed(ZERO_CHUNK.min(range.len as usize));
        let mut done = 0;
        while done < range.len {
            let part = (range.len - done).min(buf.len() as u64);
            self.read(range.start + done, &[Segment::from_mut(&mut buf[..part as usize])])?;
            done += part;
        }
        Ok(())
    }

    /// Brings everything written before the call to stable storage, with the tables that lead to it.
    ///
    /// # Errors
    /// A host that cannot flush or write: the disk then takes no more writes.
    pub fn flush(&self) -> Result<()> {
        if self.is_read_only() {
            return self.check_range(GuestRange::new(GuestOffset::ZERO, 0));
        }
        self.check_flushable()?;
        self.commit()
    }

    /// Refuses a flush of a disk that takes no writes, or none any more.
    pub(crate) fn check_flushable(&self) -> Result<()> {
        self.check_range(GuestRange::new(GuestOffset::ZERO, 0))?;
        self.check_writable()
    }

    /// As [`Disk::flush`], checked.
    pub(super) fn commit(&self) -> Result<()> {
        self.layers_now().commit().map_err(|error| self.fail(error))
    }

    /// Gives back clusters that nothing leads to any more, once no request can still see them.
    pub(super) fn reclaim(&self, active: &Active) {
        if let Err(error) = active.reclaim(|| self.epochs.synchronize()) {
            tracing::warn!(disk = %self.path().display(), %error, "cannot free clusters: they are leaked until `vmstrata check --repair=leaks`");
        }
    }

    /// Ends the disk: waits for requests under way, flushes, and leaves an image that stock tools find clean.
    ///
    /// Later requests fail; a second call does nothing.
    ///
    /// # Errors
    /// What could not be flushed or written; the image is then as after a killed process, and the next
    /// process to open it finds everything.
    pub fn close(&self) -> Result<()> {
        let _changing = self.change();
        let before = self.state.close();
        // Requests that wait for a resume are refused.
        self.resume();
        let _tending = self.tending.lock();
        self.epochs.synchronize();
        match (before, self.failure()) {
            (Service::Closed, _) => return Ok(()),
            (Service::Failed, Some(cause)) if !self.is_read_only() => {
                return Err(Error::from(ErrorKind::Failed { cause }).in_file(self.path()));
            }
            _ => {}
        }
        self.commit()?;
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return Ok(()) };
        let left = leave_clean(active, || self.epochs.synchronize());
        left.map_err(|error| self.fail(error))
    }
}

impl Maintained for Disk {
    fn write_out(&self) -> bool {
        match &self.layers_now().top {
            Top::Qcow2(active) => active.write_out(),
            Top::Raw(_) | Top::Frozen => false,
        }
    }

    fn tend(&self, age: Duration) {
        let _tending = self.tending.lock();
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return };
        if self.state.service() != Service::Open {
            return;
        }
        if active.changes.is_commit_due(age) {
            // A failure fails the disk, and is logged there.
            let _ = self.commit();
        }
        if self.state.service() == Service::Open {
            self.reclaim(active);
        }
    }

    fn stands_on(&self, file: FileId) -> bool {
        let layers = self.layers_now();
        layers.frozen.as_ref().is_some_and(|map| map.layers().any(|layer| layer.identity.file == file))
    }

    fn path(&self) -> &Path {
        Disk::path(self)
    }
}
