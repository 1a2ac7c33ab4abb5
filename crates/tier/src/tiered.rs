//! The engine of a tiered disk: it cuts the disk on this host, ships what was cut off, and publishes it.
//!
//! ```text
//!   guest ──► active layer ── cut: a snapshot ──► epoch-N ── ship, publish ──► head ──► the disk's path leads there
//!             (this host)                        (this host)                   │
//!                                   published epochs are merged on this host ◄─┘
//! ```
//!
//! One thread does all of it, beside the data path. It cuts when the first write since the last cut is as old as the window, or when the guest
//! has written so many bytes; never while an epoch waits to be published, so a repository that does not answer makes one
//! epoch longer, not the chain. What it could not publish it tries again, in order, also after a restart: an epoch is a snapshot of the local
//! disk whose name has its number, and the newest head says which numbers are published.
//!
//! Local layers stand on the layers that were in the repository when this copy of the disk was made. Published ones are merged with
//! each other, never into one that is still to be shipped, which would be shipped with their bytes.
//!
//! Invariants: epochs are published in the order in which they were cut, each once; a copy that was fenced takes no more writes
//! and publishes nothing, and keeps its layers.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmstrata_disk::merge::{Merge, MergeOptions, Selection};
use vmstrata_disk::snapshot::{self, SnapshotInfo, now_ns};
use vmstrata_disk::stats::Kind;
use vmstrata_disk::{CreateOptions, Disk, Format, OpenOptions, Resources, create};
use vmstrata_types::{ClusterBits, told};

use crate::attach::{attach, check_image, point_at, seal};
use crate::dense::ship_state;
use crate::error::{Error, Result};
use crate::head::{Epoch, EpochNumber, Generation, Head, OBJECTS_MAX, OwnerId};
use crate::place::{Copy, Place};
use crate::publisher::{Claim, Publisher};

/// How often the disk's path is made to lead to the newest layer, at most.
const POINT_EVERY: Duration = Duration::from_secs(120);
/// Published epochs on this host that are merged into one.
const MERGE_AT: usize = 8;
/// How long to wait before what failed is tried again; twice as long each time, up to the second.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// The longest time between two looks at whether the guest has written.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// When a disk is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierOptions {
    /// How old a write is at most when it is cut off.
    pub window: Duration,
    /// Bytes that the guest writes at most until then.
    pub epoch_bytes: u64,
}

impl TierOptions {
    /// The shortest window and the longest.
    pub const WINDOWS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(600)];
}

impl Default for TierOptions {
    fn default() -> Self {
        Self { window: Duration::from_secs(30), epoch_bytes: 1 << 30 }
    }
}

/// What the engine is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierState {
    /// It publishes.
    Publishing,
    /// It could not, and tries again.
    Stalled {
        /// In nanoseconds since 1970.
        since_ns: u64,
        /// Why.
        why: String,
    },
    /// Another copy of the disk publishes.
    Fenced {
        /// Who, and since when.
        why: String,
    },
}

/// What of a disk is published, and what is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierStatus {
    /// The repository's directory.
    pub repository: PathBuf,
    /// The directory of this host's copy.
    pub local: PathBuf,
    /// Whose copy this is.
    pub owner: OwnerId,
    /// The generation that it publishes.
    pub generation: Generation,
    /// The newest epoch that is published.
    pub epoch: EpochNumber,
    /// When the disk had that state, in nanoseconds since 1970.
    pub epoch_time_ns: u64,
    /// Layers of that epoch.
    pub layers: usize,
    /// Bytes on this host that are not published.
    pub unpublished_bytes: u64,
    /// When the oldest write came in that is not published, at the earliest.
    pub unpublished_since_ns: Option<u64>,
    /// What the engine is doing.
    pub state: TierState,
}

/// A tiered disk that is published from this host until this is dropped.
#[derive(Debug)]
pub struct Tiered {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Debug)]
struct Orders {
    /// Counts those who asked for a cut that is published; those up to `done` have it.
    asked: u64,
    done: u64,
    /// Up to whom it failed, and why.
    failed: (u64, String),
    is_stopped: bool,
    has_ended: bool,
    status: TierStatus,
}

/// An epoch on this host.
#[derive(Clone, Debug)]
struct Cut {
    number: EpochNumber,
    layer: PathBuf,
    time_ns: u64,
    size: u64,
}

/// Takes a disk over, of which another host has published the newest epoch. Whoever asks has made sure that this host is off, and
/// what it did not publish is lost. Returns the head that begins the new generation, and where an earlier copy on this host was put.
///
/// # Errors
/// A disk of which nothing is published, or that this host's copy publishes; whatever host and repository report.
pub fn take_over(
    place: &Place,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<(Head, Option<PathBuf>)> {
    let no_head = || Error::NoHead { repository: place.repository.display().to_string() };
    let repository = place.open_repository()?.ok_or_else(no_head)?;
    let newest = crate::look::newest(&*repository)?.ok_or_else(no_head)?;
    let (mut copy, mut aside) = (Copy::hold(place)?, None);
    // One without a base was never written.
    if let Some((owner, base)) = copy.record().and_then(|record| Some((record.owner, record.base?))) {
        let is_whole =
            || Ok::<_, Error>(place.disk().exists() && holds(place, open, base, newest.epoch.number)?);
        if owner == newest.owner && is_whole()? {
            return Err(Error::OwnCopy { copy: place.local.clone() });
        }
        let (path, new) = copy.set_aside()?;
        (copy, aside) = (new, Some(path));
    }
    let owner = OwnerId::draw();
    copy.note(owner, None)?;
    let mut publisher = Publisher::claim(repository, owner, Claim::TakeOver)?;
    make_copy(&mut copy, place, &mut publisher, open, resources)?;
    Ok((publisher.head().clone(), aside))
}

/// Makes the layer of this host that takes writes, on what is published; of a disk of which nothing is, its image first.
fn make_copy(
    copy: &mut Copy,
    place: &Place,
    publisher: &mut Publisher,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<()> {
    if publisher.head().epoch.number == EpochNumber::NONE {
        let (epoch, _held) = attach(place, publisher.repository(), open, resources)?;
        publisher.publish(epoch.clone())?;
        seal(place, &epoch)?;
        point_at(place, &epoch)?;
    }
    let epoch = &publisher.head().epoch;
    let top = epoch.objects.last().expect("an epoch has a layer").id.layer_name();
    let options = CreateOptions {
        size: Some(epoch.size),
        cluster_bits: ClusterBits::from_size(128 << 10).expect("a power of two"),
        subclusters: open.subclusters,
        backing: Some((place.repository.join(top.as_str()), Format::Qcow2)),
        // Nobody has written to one that is there: the copy has no base.
        force: true,
        ..CreateOptions::default()
    };
    create(&place.disk(), &options)?;
    copy.note(publisher.head().owner, Some(epoch.number))
}

/// How the local disk is opened: its lowest layers lie in the repository.
fn open_options(place: &Place, open: &OpenOptions) -> OpenOptions {
    let mut open = OpenOptions { format: Some(Format::Qcow2), read_only: false, ..open.clone() };
    open.allow_backing.extend([place.repository.clone(), place.local.clone()]);
    open
}

/// The epochs that are layers of the local disk, oldest first.
fn cuts(disk: &Path, open: &OpenOptions) -> Result<Vec<Cut>> {
    let own = snapshot::list(disk, open)?.into_iter().filter(snapshot::Snapshot::is_own);
    let mut cuts: Vec<Cut> = own
        .filter_map(|layer| {
            let info = layer.info?;
            let (time_ns, size) = (info.taken_ns, layer.virtual_size);
            Some(Cut { number: EpochNumber::of(&info.name)?, layer: layer.layer, time_ns, size })
        })
        .collect();
    cuts.sort_by_key(|cut| cut.number);
    Ok(cuts)
}

/// Whether the copy has the state of this epoch: because it was made on it, or as a layer.
fn holds(place: &Place, open: &OpenOptions, base: EpochNumber, epoch: EpochNumber) -> Result<bool> {
    let layers = || cuts(&place.disk(), &open_options(place, open));
    Ok(base == epoch || layers()?.iter().any(|cut| cut.number == epoch))
}

impl Tiered {
    /// Opens a tiered disk, or makes an ordinary image one, and publishes it from now on.
    ///
    /// # Errors
    /// [`Error::Fenced`] for a disk that another copy publishes; an image that cannot be tiered; a repository that does not answer;
    /// whatever the host reports.
    pub fn open(
        place: &Place,
        options: TierOptions,
        open: &OpenOptions,
        resources: &Arc<Resources>,
    ) -> Result<(Arc<Disk>, Self)> {
        let repository = place.open_repository()?;
        if repository.is_none() {
            check_image(&place.path)?;
        }
        let mut copy = Copy::hold(place)?;
        let base = copy.record().and_then(|record| record.base);
        let repository = match (repository, base) {
            (Some(repository), _) => repository,
            (None, None) => place.make_repository()?,
            // A file system that is not mounted must not become another.
            (None, Some(_)) => {
                return Err(Error::NoHead { repository: place.repository.display().to_string() });
            }
        };
        let owner = match copy.record() {
            Some(record) => record.owner,
            None => {
                let owner = OwnerId::draw();
                copy.note(owner, None)?;
                owner
            }
        };
        let claim = if base.is_some() { Claim::Resume } else { Claim::First };
        let mut publisher = Publisher::claim(repository, owner, claim)?;
        match base {
            None => make_copy(&mut copy, place, &mut publisher, open, resources)?,
            Some(base) => {
                let epoch = publisher.head().epoch.number;
                if !holds(place, open, base, epoch)? {
                    return Err(Error::OldCopy { copy: place.local.clone(), epoch });
                }
            }
        }
        let head = publisher.head();
        point_at(place, &head.epoch)?;
        let open = open_options(place, open);
        let disk = Disk::open(&place.disk(), &open, resources)?;
        let unknown_since = head.epoch.time_ns;
        let cuts = cuts(disk.path(), &open)?;
        let is_pending = cuts.iter().any(|cut| cut.number > head.epoch.number);
        let pending_since_ns = is_pending.then_some(unknown_since);
        let engine = Engine {
            shared: Arc::new(Shared::new(place, head)),
            written: written(&disk),
            size: cuts.last().map_or(head.epoch.size, |cut| cut.size),
            dirty_since: disk.has_written().then(|| Moment { ns: unknown_since, ..Moment::now() }),
            cuts,
            pending_since_ns,
            looked: Moment::now(),
            shipped: None,
            pointed: (head.epoch.number, Instant::now()),
            failures: 0,
            retry_at: None,
            place: place.clone(),
            options,
            open,
            resources: resources.clone(),
            disk: disk.clone(),
            publisher,
            _copy: copy,
        };
        engine.report();
        let shared = engine.shared.clone();
        let thread = std::thread::Builder::new().name("tier".into()).spawn(move || engine.run());
        let thread = thread.map_err(Error::of_file(&place.path, "start the thread that publishes it"))?;
        Ok((disk, Self { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// What is published now, and what is not.
    pub fn status(&self) -> TierStatus {
        self.shared.orders.lock().status.clone()
    }

    /// Cuts the disk and waits until that is published, and the disk's path leads to it.
    ///
    /// # Errors
    /// [`Error::NotPublished`], also at `deadline`: the engine tries on, unless it was fenced.
    pub fn sync(&self, deadline: Instant) -> Result<TierStatus> {
        let mut orders = self.shared.orders.lock();
        orders.asked += 1;
        let own = orders.asked;
        self.shared.changed.notify_all();
        loop {
            if orders.done >= own {
                return Ok(orders.status.clone());
            }
            if orders.failed.0 >= own {
                return Err(Error::NotPublished(orders.failed.1.clone()));
            }
            if orders.has_ended {
                let why = match &orders.status.state {
                    TierState::Fenced { why } => why.clone(),
                    _ => format!("{}: it is being closed", orders.status.local.display()),
                };
                return Err(Error::NotPublished(why));
            }
            if self.shared.changed.wait_until(&mut orders, deadline).timed_out() {
                let repository = orders.status.repository.display();
                return Err(Error::NotPublished(format!("{repository}: it takes longer, and goes on")));
            }
        }
    }

    /// Has the engine end soon. What is not published stays on this host.
    pub fn begin_stop(&self) {
        self.shared.orders.lock().is_stopped = true;
        self.shared.changed.notify_all();
    }

    /// Ends the engine. Returns whether it has ended by `deadline`: a repository may hang.
    pub fn stop(&self, deadline: Instant) -> bool {
        self.begin_stop();
        let mut orders = self.shared.orders.lock();
        while !orders.has_ended {
            if self.shared.changed.wait_until(&mut orders, deadline).timed_out() {
                return false;
            }
        }
        drop(orders);
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a thread that publishes a disk panicked");
        }
        true
    }
}

impl Drop for Tiered {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

impl Shared {
    fn new(place: &Place, head: &Head) -> Self {
        let status = TierStatus {
            repository: place.repository.clone(),
            local: place.local.clone(),
            owner: head.owner,
            generation: head.generation,
            epoch: head.epoch.number,
            epoch_time_ns: head.epoch.time_ns,
            layers: head.epoch.objects.len(),
            unpublished_bytes: 0,
            unpublished_since_ns: None,
            state: TierState::Publishing,
        };
        let orders = Orders {
            asked: 0,
            done: 0,
            failed: (0, String::new()),
            is_stopped: false,
            has_ended: false,
            status,
        };
        Self { orders: Mutex::new(orders), changed: Condvar::new() }
    }
}

/// A time: to be shown, and to be measured from, whatever becomes of the host's clock.
#[derive(Clone, Copy, Debug)]
struct Moment {
    /// In nanoseconds since 1970.
    ns: u64,
    at: Instant,
}

impl Moment {
    fn now() -> Self {
        Self { ns: now_ns(), at: Instant::now() }
    }
}

/// Bytes that guests have written.
fn written(disk: &Disk) -> u64 {
    disk.stats().bytes_of(Kind::Write)
}

/// The thread that publishes a disk.
struct Engine {
    shared: Arc<Shared>,
    place: Place,
    options: TierOptions,
    open: OpenOptions,
    resources: Arc<Resources>,
    disk: Arc<Disk>,
    publisher: Publisher,
    /// The disk's bytes, and what guests had written, when it was last cut.
    size: u64,
    written: u64,
    /// The epochs that are layers of the local disk, oldest first.
    cuts: Vec<Cut>,
    /// When the oldest write that no epoch has came in, at the earliest.
    dirty_since: Option<Moment>,
    /// The same of epochs that are not published.
    pending_since_ns: Option<u64>,
    looked: Moment,
    /// An epoch whose layer is in the repository, and which could not be published.
    shipped: Option<Epoch>,
    /// What the disk's path leads to, since when.
    pointed: (EpochNumber, Instant),
    /// Failures since something was published.
    failures: u32,
    retry_at: Option<Instant>,
    _copy: Copy,
}

impl Drop for Engine {
    fn drop(&mut self) {
        let mut orders = self.shared.orders.lock();
        orders.has_ended = true;
        if std::thread::panicking() {
            let why = "a defect of vmstrata, which the log names: serve the disk again".to_owned();
            orders.status.state = TierState::Stalled { since_ns: now_ns(), why };
        }
        self.shared.changed.notify_all();
    }
}

impl Engine {
    fn run(mut self) {
        while let Some((asked, is_asked)) = self.wait() {
            self.look();
            if !is_asked && !self.is_due() {
                continue;
            }
            let passed = self.pass(is_asked);
            if passed.is_ok() {
                self.tidy(is_asked);
            }
            if !self.settle(is_asked.then_some(asked), passed) {
                break;
            }
        }
    }

    /// Waits for orders, or for the next look. Returns how many have asked for a cut, and whether one of them waits; `None` to
    /// end.
    fn wait(&self) -> Option<(u64, bool)> {
        let mut orders = self.shared.orders.lock();
        let is_asked = |orders: &Orders| orders.asked > orders.done.max(orders.failed.0);
        if !is_asked(&orders) && !orders.is_stopped {
            let until_look = (self.options.window / 10).min(LOOK_EVERY);
            self.shared.changed.wait_for(&mut orders, until_look);
        }
        (!orders.is_stopped).then(|| (orders.asked, is_asked(&orders)))
    }

    /// Looks whether the guest has written.
    fn look(&mut self) {
        let before = std::mem::replace(&mut self.looked, Moment::now());
        if self.dirty_since.is_none() && self.is_dirty() {
            // Since the last look.
            self.dirty_since = Some(before);
        }
        self.report();
    }

    fn is_dirty(&self) -> bool {
        self.disk.has_written() || self.disk.size() != self.size
    }

    fn is_due(&self) -> bool {
        match self.retry_at {
            Some(at) => Instant::now() >= at,
            None => self.pending_since_ns.is_some() || self.is_cut_due(),
        }
    }

    fn is_cut_due(&self) -> bool {
        self.dirty_since.is_some_and(|since| {
            since.at.elapsed() >= self.options.window
                || written(&self.disk) - self.written >= self.options.epoch_bytes
        })
    }

    /// Publishes what waits, and cuts the disk if that is due, or if `cuts`.
    fn pass(&mut self, cuts: bool) -> Result<()> {
        self.publish_all()?;
        if (cuts || self.is_cut_due()) && self.is_dirty() {
            self.cut()?;
            self.publish_all()?;
        }
        Ok(())
    }

    /// What a publication leaves to do.
    fn tidy(&mut self, is_asked: bool) {
        let points = is_asked || self.pointed.1.elapsed() >= POINT_EVERY;
        let pointed = if points { self.point() } else { Ok(()) };
        if let Err(error) = pointed.and_then(|()| self.merge_published()) {
            tracing::warn!(disk = %self.place.path.display(), "published, and not tidied up: {}", told(&error));
        }
    }

    /// Notes what became of a pass. Returns whether there will be others.
    fn settle(&mut self, asked: Option<u64>, passed: Result<()>) -> bool {
        let disk = self.place.path.display();
        let Err(error) = passed else {
            let mut orders = self.shared.orders.lock();
            orders.done = asked.unwrap_or(orders.done);
            if orders.status.state != TierState::Publishing {
                tracing::info!(%disk, "published again");
                orders.status.state = TierState::Publishing;
            }
            (self.failures, self.retry_at) = (0, None);
            self.shared.changed.notify_all();
            return true;
        };
        let why = told(&error);
        let is_fenced = matches!(error, Error::Fenced { .. });
        if is_fenced {
            self.disk.refuse_writes(&why);
        }
        let mut orders = self.shared.orders.lock();
        if orders.is_stopped {
            return false;
        }
        if let Some(asked) = asked {
            orders.failed = (asked, why.clone());
        }
        orders.status.state = match &orders.status.state {
            _ if is_fenced => TierState::Fenced { why },
            TierState::Stalled { since_ns, .. } => TierState::Stalled { since_ns: *since_ns, why },
            _ => {
                tracing::error!(%disk, "not published, and tried again: {why}");
                TierState::Stalled { since_ns: now_ns(), why }
            }
        };
        let [first, longest] = RETRY;
        self.retry_at = Some(Instant::now() + (first * (1 << self.failures.min(10))).min(longest));
        self.failures += 1;
        self.shared.changed.notify_all();
        !is_fenced
    }

    /// Ships and publishes the epochs of this host that are not published, oldest first.
    fn publish_all(&mut self) -> Result<()> {
        let pending: Vec<Cut> = self.pending().cloned().collect();
        pending.iter().try_for_each(|cut| self.publish(cut))?;
        self.pending_since_ns = None;
        self.report();
        Ok(())
    }

    fn pending(&self) -> impl Iterator<Item = &Cut> {
        let published = self.publisher.head().epoch.number;
        self.cuts.iter().filter(move |cut| cut.number > published)
    }

    fn publish(&mut self, cut: &Cut) -> Result<()> {
        let epoch = match self.shipped.take() {
            Some(shipped) => shipped,
            None => {
                let mut objects = self.publisher.head().epoch.objects.clone();
                if objects.len() == OBJECTS_MAX {
                    return Err(Error::TooManyLayers { repository: self.publisher.repository().describe() });
                }
                let below = objects.last().map(|object| object.id);
                objects.push(ship_state(
                    self.publisher.repository(),
                    &cut.layer,
                    below,
                    &self.open,
                    &self.resources,
                )?);
                Epoch { number: cut.number, time_ns: cut.time_ns, size: cut.size, objects }
            }
        };
        // A head that could not be created may still come to be: the same is tried again.
        self.publisher.publish(self.shipped.insert(epoch).clone())?;
        self.shipped = None;
        self.report();
        Ok(())
    }

    /// Cuts off what was written until now.
    fn cut(&mut self) -> Result<()> {
        let published = self.publisher.head().epoch.number;
        let number = self.cuts.last().map_or(published, |cut| cut.number.max(published)).next();
        let (written, size, time_ns) = (written(&self.disk), self.disk.size(), now_ns());
        let (name, labels) = (number.snapshot_name(), Vec::new());
        let info = SnapshotInfo { name, taken_ns: time_ns, labels, group: None, origin: None };
        let layer = self.disk.snapshot(&info)?.layer;
        self.cuts.push(Cut { number, layer, time_ns, size });
        (self.written, self.size) = (written, size);
        self.pending_since_ns = Some(self.dirty_since.take().map_or(time_ns, |since| since.ns));
        Ok(())
    }

    /// Makes the disk's path lead to what is published.
    fn point(&mut self) -> Result<()> {
        let epoch = &self.publisher.head().epoch;
        if self.pointed.0 != epoch.number {
            point_at(&self.place, epoch)?;
            self.pointed = (epoch.number, Instant::now());
        }
        Ok(())
    }

    /// Merges published epochs on this host into the newest of them.
    fn merge_published(&mut self) -> Result<()> {
        let published = self.cuts.len() - self.pending().count();
        if published < MERGE_AT {
            return Ok(());
        }
        let names = self.cuts[..published - 1].iter().map(|cut| cut.number.snapshot_name());
        let merged = self.merge(&names.collect::<Vec<_>>());
        self.cuts = cuts(self.disk.path(), &self.open)?;
        merged
    }

    /// Merges snapshots into the layer above them, as far as there is time.
    fn merge(&self, names: &[String]) -> Result<()> {
        let selection = Selection::named(self.disk.path(), names, &self.open)?;
        for range in selection.ranges(self.disk.path(), &self.open)? {
            let mut merge = Merge::of_disk(&self.disk, range, &MergeOptions::default())?;
            while let Some(action) = merge.select() {
                if self.shared.orders.lock().is_stopped {
                    return Ok(());
                }
                merge.apply(action)?;
            }
        }
        Ok(())
    }

    /// Shows what there is to say.
    fn report(&self) {
        let active = self.dirty_since.map(|_| self.disk.path());
        let files = self.pending().map(|cut| &*cut.layer).chain(active);
        let bytes = files.map(|file| file.metadata().map_or(0, |about| about.blocks() * 512)).sum();
        let head = self.publisher.head();
        let status = &mut self.shared.orders.lock().status;
        status.epoch = head.epoch.number;
        status.epoch_time_ns = head.epoch.time_ns;
        status.layers = head.epoch.objects.len();
        status.unpublished_bytes = bytes;
        status.unpublished_since_ns = self.pending_since_ns.or(self.dirty_since.map(|since| since.ns));
    }
}
