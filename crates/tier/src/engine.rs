//! The engine of a tiered disk: it cuts the disk on this host, ships what was cut off, and publishes it.
//!
//! ```text
//!   guest ──► active layer ── cut: a snapshot ──► epoch-N ── ship, publish ──► head ──► the disk's path leads there
//!             (this host)                        (this host)                   │
//!                 published epochs are merged: on this host, and as layers of the repository ◄─┘
//! ```
//!
//! One thread does all of it, beside the data path. It cuts so that a write is published before it is as old as the window, or when the guest
//! has written so many bytes, or when a flush waits to be published; never while an epoch waits to be published, so a repository that does not answer
//! makes one epoch longer, not the chain. Whoever takes a snapshot cuts the disk without that thread, which may be stuck in a repository, and leaves
//! it a name to give ([`Pending`]). A second thread watches the loss window, and slows the guest: [`Window`]. What the first could not publish
//! it tries again, in order, also after a restart: an epoch is a snapshot of the local disk whose name has its number, and the newest head
//! says which numbers are published.
//!
//! Local layers stand on the layers that were in the repository when this copy of the disk was made. Published ones are merged with
//! each other, never into one that is still to be shipped, which would be shipped with their bytes.
//!
//! Invariants: epochs are published in the order in which they were cut, each once; a copy that was fenced takes no more writes
//! and publishes nothing, and keeps its layers. Lock order: the epochs of this host, the orders, the window's state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmstrata_disk::merge::{Merge, MergeOptions, Selection};
use vmstrata_disk::snapshot::{SnapshotInfo, now_ns};
use vmstrata_disk::{Disk, Durability, OpenOptions, Pace, Resources, Taken, WhenDurable};
use vmstrata_repo::Repository;
use vmstrata_types::told;

use crate::attach::point_at;
use crate::copies::{Cut, cuts, open_options};
use crate::dense::ship_state;
use crate::error::{Error, Result};
use crate::flushes::Flushes;
use crate::head::{Epoch, EpochNumber, Head, OBJECTS_MAX};
use crate::merger::{Ground, Merger};
use crate::meter::Meter;
use crate::mount;
use crate::pending::{CutState, Pending};
use crate::pin::Pin;
use crate::place::{Copy, Place};
use crate::publisher::Publisher;
use crate::stand;
use crate::states::keep;
use crate::status::{DurableAt, OnOutage, TierOptions, TierState, TierStatus, WindowStatus};
use crate::window::{Begin, LOOK_EVERY, Moment, Watch, Window};

/// How often the disk's path is made to lead to the newest layer, at most.
const POINT_EVERY: Duration = Duration::from_secs(120);
/// Published epochs on this host that are merged into one.
const MERGE_AT: usize = 8;
/// How often it is looked for what may be deleted.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How long to wait before what failed is tried again; twice as long each time, up to the second.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// What the threads of a disk share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) orders: Mutex<Orders>,
    pub(crate) changed: Condvar,
    /// Signalled when the watch has to look.
    pub(crate) watched: Condvar,
    pub(crate) window: Window,
    pub(crate) pending: Pending,
    cuts: Mutex<Cuts>,
    meter: Arc<Meter>,
}

/// The epochs of this host. Who cuts the disk holds them: the engine, or who takes a snapshot, for whom it may be too busy.
#[derive(Debug)]
struct Cuts {
    /// Those that are layers of the local disk, oldest first.
    layers: Vec<Cut>,
    /// What was published when the engine began.
    begun: EpochNumber,
}

impl Cuts {
    /// The newest epoch, on this host or published.
    fn newest(&self) -> EpochNumber {
        self.layers.last().map_or(self.begun, |cut| cut.number.max(self.begun))
    }

    fn above(&self, published: EpochNumber) -> impl Iterator<Item = &Cut> {
        self.layers.iter().filter(move |cut| cut.number > published)
    }
}

#[derive(Debug)]
pub(crate) struct Orders {
    /// Counts those who asked for all that is cut off to be published; for those up to `done` it is.
    pub(crate) asked: u64,
    pub(crate) done: u64,
    /// Up to whom it failed, and why.
    pub(crate) failed: (u64, String),
    pub(crate) is_stopped: bool,
    pub(crate) has_ended: bool,
    pub(crate) flushes: Flushes,
    pub(crate) status: TierStatus,
}

impl Shared {
    fn new(place: &Place, head: &Head, window: Window, cuts: Vec<Cut>, meter: Arc<Meter>) -> Result<Self> {
        let status = TierStatus {
            repository: place.repository.clone(),
            local: place.local.clone(),
            owner: head.owner,
            generation: head.generation,
            epoch: head.epoch.number,
            epoch_time_ns: head.epoch.time_ns,
            layers: place.state(&head.epoch).objects.len(),
            state: TierState::Publishing,
            window: WindowStatus::default(),
            cache: None,
            silent_since: None,
            mount_warnings: mount::warnings(&place.repository),
            pending: Vec::new(),
        };
        let orders = Orders {
            asked: 0,
            done: 0,
            failed: (0, String::new()),
            is_stopped: false,
            has_ended: false,
            flushes: Flushes::default(),
            status,
        };
        let [changed, watched] = [Condvar::new(), Condvar::new()];
        let cuts = Mutex::new(Cuts { layers: cuts, begun: head.epoch.number });
        let (orders, pending) = (Mutex::new(orders), Pending::of(&place.local)?);
        Ok(Self { orders, changed, watched, window, pending, cuts, meter })
    }

    /// Cuts off what was written until now, if anything was.
    pub(crate) fn cut(&self, disk: &Disk) -> Result<CutState> {
        let mut cuts = self.cuts.lock();
        if !self.window.is_dirty(disk) {
            return Ok(CutState { epoch: cuts.newest(), pause: Duration::ZERO });
        }
        let number = cuts.newest().next();
        let (size, time_ns) = (disk.size(), now_ns());
        let (name, labels) = (number.snapshot_name(), Vec::new());
        let info = SnapshotInfo { name, taken_ns: time_ns, labels, group: None, origin: None };
        let Taken { layer, pause, .. } = self.window.cut(disk, || disk.snapshot(&info))?;
        cuts.layers.push(Cut { number, layer, time_ns, size });
        self.show(&cuts);
        Ok(CutState { epoch: number, pause })
    }

    /// Shows what is not published.
    fn show(&self, cuts: &Cuts) {
        let published = self.orders.lock().status.epoch;
        self.window.set_pending(cuts.above(published).map(|cut| cut.layer.clone()).collect());
    }

    pub(crate) fn status(&self) -> TierStatus {
        // Before the orders: it looks at the wire.
        let silent_since = self.window.silent_since(&self.meter);
        let orders = self.orders.lock();
        let mut status = orders.status.clone();
        status.window = WindowStatus { flushes_wait: orders.flushes.len(), ..self.window.status() };
        status.pending = self.pending.all();
        if let (TierState::Publishing, Some(since)) = (&status.state, silent_since) {
            let why = format!("{}: it does not answer", status.repository.display());
            status.state = TierState::Stalled { since_ns: since.ns, why };
        }
        status
    }

    /// Watches the loss window until the engine has ended.
    pub(crate) fn watch(&self, disk: &Disk) {
        let mut watch = Watch::new(disk);
        loop {
            let tick = Watch::tick(&self.window);
            let mut orders = self.orders.lock();
            if !orders.has_ended {
                self.watched.wait_for(&mut orders, tick);
            }
            if orders.has_ended {
                break;
            }
            drop(orders);
            watch.look(&self.window, disk, &self.meter);
            if self.window.is_cut_due(disk) {
                self.changed.notify_all();
            }
        }
        disk.pace(Pace::Free);
    }
}

impl Durability for Shared {
    fn hold(&self, then: WhenDurable) -> Option<WhenDurable> {
        if !self.window.holds_flushes() {
            return Some(then);
        }
        let mut orders = self.orders.lock();
        orders.flushes.wait(then);
        self.changed.notify_all();
        None
    }
}

/// The thread that publishes a disk.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    place: Place,
    open: OpenOptions,
    resources: Arc<Resources>,
    disk: Arc<Disk>,
    publisher: Publisher,
    merger: Merger,
    /// Keeps what this host's copy stands on.
    pin: Option<Pin>,
    /// When it was last looked for what may be deleted.
    swept: Instant,
    /// What the disk's path leads to, since when.
    pointed: (EpochNumber, Instant),
    /// Failures since something was published.
    failures: u32,
    retry_at: Option<Instant>,
    copy: Copy,
}

/// What a disk is published with.
pub(crate) struct Held {
    pub(crate) copy: Copy,
    pub(crate) publisher: Publisher,
    /// Of what the publisher moves.
    pub(crate) meter: Arc<Meter>,
    /// The same repository, for merges.
    pub(crate) merges: Arc<dyn Repository>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        let mut orders = self.shared.orders.lock();
        orders.has_ended = true;
        if std::thread::panicking() {
            let why = "a defect of vmstrata, which the log names: serve the disk again".to_owned();
            orders.flushes.fail(&why);
            orders.status.state = TierState::Stalled { since_ns: now_ns(), why };
        }
        self.shared.changed.notify_all();
        self.shared.watched.notify_all();
    }
}

impl Engine {
    /// Opens this host's copy of a disk, which it publishes once it runs.
    pub(crate) fn new(
        place: &Place,
        options: TierOptions,
        open: &OpenOptions,
        resources: &Arc<Resources>,
        held: Held,
    ) -> Result<(Arc<Disk>, Self)> {
        let Held { copy, mut publisher, meter, merges } = held;
        publisher.keep(options.epochs);
        let head = publisher.head();
        point_at(place, &head.epoch)?;
        let open = open_options(place, open);
        let disk = Disk::open(&place.disk(), &open, resources)?;
        let pin = stand::border(&disk, &place.repository)
            .map(|(below, _)| stand::pin_of(&**publisher.repository(), head.owner, below));
        let pin = pin.transpose()?.flatten();
        if pin.is_none() {
            let repository = place.repository.display();
            tracing::error!(%repository, "the pin is gone that keeps what this host's copy stands on: nothing is deleted");
        }
        let merger = Merger::new(Ground {
            repository: merges,
            place: place.clone(),
            open: open.clone(),
            resources: resources.clone(),
        });
        let cuts = cuts(disk.path(), &open)?;
        let is_pending = cuts.iter().any(|cut| cut.number > head.epoch.number);
        let unknown_since = |is_so: bool| is_so.then(|| Moment::at_ns(head.epoch.time_ns));
        let begin = Begin {
            size: cuts.last().map_or(place.state(&head.epoch).size, |cut| cut.size),
            dirty: unknown_since(disk.has_written()),
            pending: unknown_since(is_pending),
        };
        let holds_flushes = options.durability != DurableAt::Host || options.on_outage == OnOutage::Stall;
        let window = Window::new(options, publisher.repository().device(), &disk, begin);
        let shared = Arc::new(Shared::new(place, head, window, cuts, meter)?);
        if holds_flushes {
            disk.hold_flushes(Some(shared.clone()));
        }
        let engine = Engine {
            shared,
            merger,
            pin,
            swept: Instant::now(),
            pointed: (head.epoch.number, Instant::now()),
            failures: 0,
            retry_at: None,
            place: place.clone(),
            open,
            resources: resources.clone(),
            disk: disk.clone(),
            publisher,
            copy,
        };
        engine.forget_indices();
        engine.report();
        Ok((disk, engine))
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    pub(crate) fn repository(&self) -> Arc<dyn Repository> {
        self.publisher.repository().clone()
    }

    pub(crate) fn run(mut self) {
        while let Some((asked, is_asked)) = self.wait() {
            self.shared.window.look(&self.disk);
            if !is_asked && !self.is_due() {
                continue;
            }
            let passed = self.pass();
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
        let is_idle = |orders: &Orders| {
            let is_wanted = orders.flushes.len() > 0 && self.retry_at.is_none();
            !is_asked(orders) && !is_wanted && !orders.is_stopped
        };
        if is_idle(&orders) {
            let until_look = (self.shared.window.options().window / 10).min(LOOK_EVERY);
            self.shared.changed.wait_for(&mut orders, until_look);
        }
        (!orders.is_stopped).then(|| (orders.asked, is_asked(&orders)))
    }

    fn is_due(&self) -> bool {
        let window = &self.shared.window;
        let waits = self.shared.orders.lock().flushes.len() > 0;
        let is_wanted = || {
            waits
                || window.is_pending()
                || window.is_cut_due(&self.disk)
                || self.merger.is_ready()
                || self.swept.elapsed() >= SWEEP_EVERY
                || !self.shared.pending.due(self.publisher.head().epoch.number).is_empty()
        };
        (waits || !window.is_held()) && self.retry_at.map_or_else(is_wanted, |at| Instant::now() >= at)
    }

    /// Publishes what waits, and cuts the disk if that is due, or if flushes wait for that.
    fn pass(&mut self) -> Result<()> {
        self.publisher.settle()?;
        self.publish_all()?;
        let waits = self.shared.orders.lock().flushes.begin();
        let window = &self.shared.window;
        if waits || window.is_cut_due(&self.disk) {
            self.shared.cut(&self.disk)?;
            self.publish_all()?;
        }
        self.shared.orders.lock().flushes.published();
        self.name_published()?;
        match self.bound() {
            Err(error) if !matches!(error, Error::Fenced { .. }) => {
                let disk = self.place.path.display();
                tracing::warn!(%disk, "its layers in the repository are not merged or deleted: {}", told(&error));
                Ok(())
            }
            bounded => bounded,
        }
    }

    /// Bounds what the repository holds: merges layers, and deletes what nobody needs.
    fn bound(&mut self) -> Result<()> {
        let merged = self.merge_layers().and_then(|()| self.stand());
        if merged.is_err() {
            self.merger.give_up().into_iter().for_each(|id| self.publisher.discard(id));
        }
        merged?;
        if self.pin.is_some() && self.swept.elapsed() >= SWEEP_EVERY {
            self.swept = Instant::now();
            let layers = self.publisher.sweep()?;
            if layers > 0 {
                let repository = self.publisher.repository().describe();
                tracing::info!(repository, layers, "deleted what no epoch that is kept needs");
            }
        }
        Ok(())
    }

    /// Goes on merging layers of the repository, and publishes the chain that has come out of it.
    fn merge_layers(&mut self) -> Result<()> {
        let head = &self.publisher.head().epoch;
        let chain = &self.place.state(head).objects;
        let newest = self.place.state(head).newest();
        let cuts = self.shared.cuts.lock();
        let on_host = cuts.layers.iter().find(|cut| cut.number == head.number).map(|cut| cut.layer.clone());
        drop(cuts);
        let state = on_host.unwrap_or_else(|| self.place.layer(newest));
        let Some(objects) = self.merger.go_on(chain, state)? else { return Ok(()) };
        let (before, after) = (chain.len(), objects.len());
        let mut epoch = head.clone();
        epoch.disks[0].objects = objects;
        self.publisher.publish(epoch)?;
        let repository = self.publisher.repository().describe();
        tracing::info!(repository, before, after, "layers are merged");
        self.report();
        Ok(())
    }

    /// Lets go of layers that are kept for this host's copy alone.
    fn stand(&mut self) -> Result<()> {
        let head = &self.publisher.head().epoch;
        let is_wasteful = |pin: &Pin| stand::is_wasteful(pin, head);
        let Some((_, Some(lowest))) = self
            .pin
            .as_ref()
            .filter(|pin| is_wasteful(pin))
            .and_then(|_| stand::border(&self.disk, &self.place.repository))
        else {
            return Ok(());
        };
        self.place.show(head)?;
        let repository = &**self.publisher.repository();
        let pin = stand::pin_for(repository, self.publisher.head())?;
        self.disk.rebase(&lowest, &self.place.layer(self.place.state(&pin.epoch).newest()))?;
        self.forget_indices();
        let before = self.pin.replace(pin);
        before.map_or(Ok(()), |pin| pin.release(repository))
    }

    /// Deletes indices of layers that were let go of, if that can be done.
    fn forget_indices(&self) {
        if let Err(error) = stand::forget_indices(&self.disk, &self.place.local) {
            let copy = self.place.local.display();
            tracing::warn!(%copy, %error, "indices of layers that it does not stand on any more stay");
        }
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
        self.shared.window.set_failing(passed.is_err());
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
        let advice = mount::advice(&error).map(|advice| format!("; {advice}"));
        let why = told(&error) + &advice.unwrap_or_default();
        let is_fenced = matches!(error, Error::Fenced { .. });
        if is_fenced {
            self.disk.refuse_writes(&why);
        }
        let mut orders = self.shared.orders.lock();
        if is_fenced {
            orders.flushes.fail(&why);
        } else {
            orders.flushes.put_back();
        }
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
        let published = self.publisher.head().epoch.number;
        let waiting: Vec<Cut> = self.shared.cuts.lock().above(published).cloned().collect();
        for cut in &waiting {
            // Before the next one, which lets go of this state some time. The end of the pass tries again, and tells what fails.
            let _ = self.name_published();
            self.publish(cut)?;
        }
        self.report();
        Ok(())
    }

    /// Gives states that are published the names that they waited for.
    fn name_published(&self) -> Result<()> {
        let (repository, pending) = (&**self.publisher.repository(), &self.shared.pending);
        for snapshot in pending.due(self.publisher.head().epoch.number) {
            let (disk, name) = (self.place.path.display(), &snapshot.name);
            let kept = match keep(repository, &snapshot) {
                Ok(pin) => Some(pin),
                Err(error @ (Error::NameTaken { .. } | Error::NotKept { .. })) => {
                    tracing::error!(%disk, name, "a snapshot is lost: {}", told(&error));
                    None
                }
                Err(error) => return Err(error),
            };
            let is_wanted = pending.remove(name, snapshot.taken_ns)?;
            kept.filter(|_| !is_wanted).map_or(Ok(()), |pin| pin.release(repository))?;
        }
        Ok(())
    }

    fn publish(&mut self, cut: &Cut) -> Result<()> {
        let shared = self.shared.clone();
        shared.window.publish(&cut.layer, &shared.meter, || {
            let is_stopped = || shared.orders.lock().is_stopped;
            let wire = &shared.window.options().wire;
            let turn = wire.turn(self.publisher.repository().device(), &shared.meter, is_stopped);
            let closed =
                || Error::NotPublished(format!("{}: it is being closed", self.place.local.display()));
            let _turn = turn.ok_or_else(closed)?;
            self.ship_and_publish(cut)
        })?;
        self.report();
        Ok(())
    }

    fn ship_and_publish(&mut self, cut: &Cut) -> Result<()> {
        let mut epoch = self.publisher.head().epoch.clone();
        if epoch.objects().count() == OBJECTS_MAX {
            return Err(Error::TooManyLayers { repository: self.publisher.repository().describe() });
        }
        let state = &mut epoch.disks[0];
        let (repository, below) = (self.publisher.repository(), state.newest());
        state.objects.push(ship_state(&**repository, &cut.layer, Some(below), &self.open, &self.resources)?);
        let &Cut { number, time_ns, size, .. } = cut;
        state.size = size;
        // A head that could not be created may still come to be: the next pass begins with it.
        self.publisher.publish(Epoch { number, time_ns, ..epoch })?;
        // Else a branch would name epochs that were published.
        if let Err(error) = self.copy.change(|record| record.published = Some(number)) {
            tracing::warn!(disk = %self.place.path.display(), "published, and not noted: {}", told(&error));
        }
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
        let published = self.publisher.head().epoch.number;
        let held = self.shared.cuts.lock();
        let done = held.layers.iter().filter(|cut| cut.number <= published);
        let names: Vec<String> = done.map(|cut| cut.number.snapshot_name()).collect();
        drop(held);
        if names.len() < MERGE_AT || self.merger.is_reading() {
            return Ok(());
        }
        let merged = self.merge(&names[..names.len() - 1]);
        let mut held = self.shared.cuts.lock();
        held.layers = cuts(self.disk.path(), &self.open)?;
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
        let head = self.publisher.head();
        let mut orders = self.shared.orders.lock();
        let status = &mut orders.status;
        status.epoch = head.epoch.number;
        status.epoch_time_ns = head.epoch.time_ns;
        status.layers = self.place.state(&head.epoch).objects.len();
        drop(orders);
        self.shared.show(&self.shared.cuts.lock());
        self.shared.window.look(&self.disk);
    }
}
