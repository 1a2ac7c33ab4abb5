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
//! makes one epoch longer, not the chain. Whoever takes a snapshot cuts the disks without that thread, which may be stuck in a repository, and leaves
//! it a name to give ([`crate::pending`]). A second thread watches the loss window, and slows the guest: [`Window`]. What the first could not publish
//! it tries again, in order, also after a restart: an epoch is a snapshot of the local disk whose name has its number, and the newest head
//! says which numbers are published.
//!
//! Local layers stand on the layers that were in the repository when this copy of the disk was made. Published ones are merged with
//! each other, never into one that is still to be shipped, which would be shipped with their bytes.
//!
//! Invariants: epochs are published in the order in which they were cut, each once; a copy that was fenced takes no more writes
//! and publishes nothing, and keeps its layers. An epoch that a rebase publishes may be the first after several. Lock order: see `shared`.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::{Disk, Format, OpenOptions, Resources};
use vmstrata_repo::Repository;
use vmstrata_types::told;

use crate::advice;
use crate::attach::point_at;
use crate::cuts::{Cut, Cuts};
use crate::error::{Error, Result};
use crate::head::{DiskState, EpochNumber, HeadNumber, OBJECTS_MAX, Object, ObjectId};
use crate::member::Member;
use crate::merge::Merge;
use crate::merger::Ground;
use crate::meter::Meter;
use crate::mount;
use crate::pin::Pin;
use crate::place::{Copy, Place};
use crate::publisher::Publisher;
use crate::rebase::{draft_of, remove_if_there};
use crate::rebases::{Drafted, Stage};
use crate::shared::{Offer, Orders, Shared};
use crate::stand;
use crate::states::keep;
use crate::status::{DurableAt, OnOutage, TierOptions, TierState};
use crate::window::{Begin, LOOK_EVERY, Moment, Window};

/// How often the disk's path is made to lead to the newest layer, at most.
const POINT_EVERY: Duration = Duration::from_secs(120);
/// Published epochs on this host that are merged into one.
const MERGE_AT: usize = 8;
/// How often it is looked for what may be deleted.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Lines of advice that are logged, each once: a guest may change them for ever.
const ADVICE_LOGGED: usize = 100;
/// How long to wait before what failed is tried again; twice as long each time, up to the second.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The thread that publishes a disk, or the disks of a group.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    place: Place,
    members: Vec<Member>,
    /// Those of the members.
    disks: Vec<Arc<Disk>>,
    publisher: Publisher,
    /// What was shipped of the epoch that is published next.
    shipped: Shipped,
    /// Keep what this host's copy stands on; `None` where one is missing.
    pins: Option<Vec<Pin>>,
    /// Whether the copy moves to the newest head even if that frees little: it reads layers past the cache, or was rebased.
    stands_anew: bool,
    /// When it was last looked for what may be deleted.
    swept: Instant,
    /// To which head the paths of the disks lead, since when.
    pointed: (HeadNumber, Instant),
    /// Of which epoch the disks were looked at for advice, and what of that is in the log.
    advised: (EpochNumber, BTreeSet<String>),
    /// Failures since something was published.
    failures: u32,
    retry_at: Option<Instant>,
    copy: Copy,
}

/// What was shipped of an epoch.
struct Shipped {
    epoch: EpochNumber,
    /// Of the first disks: the layer that each stands on, and what was shipped, if it was written.
    layers: Vec<(ObjectId, Option<Object>)>,
}

/// What a disk is published with.
pub(crate) struct Held {
    pub(crate) copy: Copy,
    pub(crate) publisher: Publisher,
    /// All that keep what the copy may stand on.
    pub(crate) pins: Vec<Pin>,
    /// Of what the publisher moves.
    pub(crate) meter: Arc<Meter>,
    /// The same repository, for merges.
    pub(crate) merges: Arc<dyn Repository>,
    /// The disks, if they are open already.
    pub(crate) running: Vec<Arc<Disk>>,
    /// Whether their lowest layers are not read through the cache.
    pub(crate) reads_past_cache: bool,
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
    /// Opens this host's copy of the disks, which it publishes once it runs. `opens` says how each disk is opened.
    pub(crate) fn new(
        place: &Place,
        options: TierOptions,
        opens: &[OpenOptions],
        resources: &Arc<Resources>,
        held: Held,
    ) -> Result<Self> {
        let Held { copy, mut publisher, pins, meter, merges, running, reads_past_cache } = held;
        let (stands_anew, is_late) = (reads_past_cache, Arc::<AtomicBool>::default());
        let mut running = running.into_iter();
        publisher.keep(options.epochs);
        let head = publisher.head();
        place.make_links()?;
        remove_if_there(&draft_of(place))?;
        let mut open = |(place, open): (Place, &OpenOptions)| {
            point_at(&place, &head.epoch)?;
            Member::new(place, running.next(), open, resources, (merges.clone(), is_late.clone()))
        };
        let members = place.members().into_iter().zip(opens).map(&mut open).collect::<Result<Vec<_>>>()?;
        let disks: Vec<Arc<Disk>> = members.iter().map(|member| member.disk.clone()).collect();
        let pins = needed(&members, &publisher, pins)?;
        if pins.is_none() {
            let repository = place.repository_name();
            let repository = repository.display();
            tracing::error!(%repository, "a pin is gone that keeps what this host's copy stands on: nothing is deleted");
        }
        let cuts = members.iter().map(Member::cuts).collect::<Result<Vec<_>>>()?;
        let size_of = |(member, cuts): (&Member, &Vec<Cut>)| {
            cuts.last().map_or(member.place.state(&head.epoch).size, |cut| cut.size)
        };
        let sizes = members.iter().zip(&cuts).map(size_of).collect();
        let cuts = Cuts::new(cuts, head.epoch.number);
        let unknown_since = |is_so: bool| is_so.then(|| Moment::at_ns(head.epoch.time_ns));
        let begin = Begin {
            title: place.to_string(),
            sizes,
            dirty: unknown_since(cuts.is_torn() || disks.iter().any(|disk| disk.has_written())),
            pending: unknown_since(!cuts.above(head.epoch.number).is_empty()),
            is_late: is_late.clone(),
        };
        let holds_flushes = options.durability != DurableAt::Host || options.on_outage == OnOutage::Stall;
        let window = Window::new(options, publisher.repository().device(), &disks, begin);
        let shared = Arc::new(Shared::new(place, head, window, cuts, meter)?);
        if holds_flushes {
            disks.iter().for_each(|disk| disk.hold_flushes(Some(shared.clone())));
        }
        let engine = Self {
            shared,
            members,
            disks,
            shipped: Shipped { epoch: EpochNumber::NONE, layers: Vec::new() },
            pins,
            stands_anew,
            swept: Instant::now(),
            pointed: (head.number, Instant::now()),
            advised: (EpochNumber::NONE, BTreeSet::new()),
            failures: 0,
            retry_at: None,
            place: place.clone(),
            publisher,
            copy,
        };
        engine.forget_indices();
        engine.report();
        Ok(engine)
    }

    /// The disks, in the order of their places.
    pub(crate) fn disks(&self) -> &[Arc<Disk>] {
        &self.disks
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// What the merges of the first disk read, and where they write.
    pub(crate) fn ground(&self) -> Arc<Ground> {
        Arc::clone(self.members[0].merger.ground())
    }

    pub(crate) fn repository(&self) -> Arc<dyn Repository> {
        self.publisher.repository().clone()
    }

    pub(crate) fn run(mut self) {
        while let Some((asked, is_asked)) = self.wait() {
            self.shared.window.look(&self.disks);
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
        let is_idle = |orders: &Orders| {
            let waits = orders.flushes.len() > 0 && orders.offer != Offer::Made;
            let is_wanted = waits && self.retry_at.is_none();
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
        let orders = self.shared.orders.lock();
        let (offer, waits) = (orders.offer, orders.flushes.len() > 0);
        drop(orders);
        if offer == Offer::Made {
            return false;
        }
        let is_rebased = self.shared.rebases.lock().is_waiting();
        let is_wanted = || {
            waits
                || offer == Offer::Withdrawn
                || is_rebased
                || window.is_pending()
                || window.is_cut_due(&self.disks)
                || self.members.iter().any(|member| member.merger.is_ready())
                || self.swept.elapsed() >= SWEEP_EVERY
                || !self.shared.pending.due(self.publisher.head().epoch.number).is_empty()
        };
        (waits || is_rebased || !window.is_held())
            && self.retry_at.map_or_else(is_wanted, |at| Instant::now() >= at)
    }

    /// Does what is due: while epochs are held, what was asked for.
    fn pass(&mut self, is_asked: bool) -> Result<()> {
        self.mend()?;
        self.publisher.settle()?;
        if self.shared.orders.lock().offer == Offer::Made {
            // No head but those of what is left.
            self.cut_and_publish()?;
            return self.name_published();
        }
        self.take_back()?;
        self.rebase()?;
        if is_asked || !self.shared.window.is_held() || self.shared.orders.lock().flushes.len() > 0 {
            self.cut_and_publish()?;
        }
        self.name_published()?;
        match self.bound() {
            Err(error) if !matches!(error, Error::Fenced { .. }) => {
                tracing::warn!(disk = %self.place, "its layers in the repository are not merged or deleted: {}", told(&error));
                Ok(())
            }
            bounded => bounded,
        }
    }

    /// Publishes the newest epoch once more if it was offered, so that no other host takes the disks over from there.
    fn take_back(&mut self) -> Result<()> {
        if self.shared.orders.lock().offer == Offer::None {
            return Ok(());
        }
        self.publisher.publish(self.publisher.head().epoch.clone())?;
        self.report();
        self.shared.orders.lock().offer = Offer::None;
        self.disks.iter().for_each(|disk| disk.resume());
        tracing::info!(disk = %self.place, "taken back: no other host has taken the disk over");
        Ok(())
    }

    /// Publishes what waits, and cuts the disks if that is due, or if flushes wait for that.
    fn cut_and_publish(&mut self) -> Result<()> {
        self.publish_all()?;
        let waits = self.shared.orders.lock().flushes.begin();
        if waits || self.shared.window.is_cut_due(&self.disks) {
            self.shared.cut(&self.disks)?;
            self.publish_all()?;
        }
        self.shared.orders.lock().flushes.published();
        Ok(())
    }

    /// Lets go of what ended rebases hold. Publishes the disk on the version for which a draft is shipped, or begins to.
    fn rebase(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let ended = shared.rebases.lock().take_ended();
        for ended in ended {
            if ended.may_be_merged {
                self.give_up_merges();
            }
            ended.objects.iter().for_each(|id| self.publisher.discard(*id));
            if let Err(error) = ended.pin.release(&**self.publisher.repository()) {
                tracing::warn!(disk = %self.place, "the pin of a rebase stays for now: {}", told(&error));
                shared.rebases.lock().put_back(ended);
            }
        }
        let Some(Drafted { number, layers, objects }) = shared.rebases.lock().drafted() else {
            return Ok(());
        };
        // It would go on with a chain that goes.
        self.give_up_merges();
        let stage = match layers {
            Some(layers) => {
                self.members[0].merger.begin(Merge::onto(objects, layers));
                Stage::Merging
            }
            None => {
                self.publish_as(number, objects)?;
                self.stands_anew = true;
                Stage::Published
            }
        };
        shared.rebases.lock().advance(stage);
        Ok(())
    }

    /// Publishes the epoch of a cut as these layers. Those before it are not published, but for snapshots.
    fn publish_as(&mut self, number: EpochNumber, objects: Vec<Object>) -> Result<()> {
        let named = self.shared.pending.all().into_iter().map(|snapshot| snapshot.epoch);
        if let Some(last) = named.filter(|named| *named < number).max() {
            self.publish_up_to(last)?;
            self.name_published()?;
        }
        let cut = self.shared.cuts.lock().of(number).next().expect("it stays until it is published").clone();
        let mut epoch = self.publisher.head().epoch.clone();
        let state = self.place.state_mut(&mut epoch);
        (state.size, state.objects) = (cut.size, objects);
        (epoch.number, epoch.time_ns) = (number, cut.time_ns);
        self.publisher.publish(epoch)?;
        self.note_published();
        self.report();
        Ok(())
    }

    fn give_up_merges(&mut self) {
        let written = self.members.iter_mut().flat_map(|member| member.merger.give_up());
        written.for_each(|id| self.publisher.discard(id));
    }

    /// Bounds what the repository holds: merges layers, and deletes what nobody needs.
    fn bound(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let _changing = shared.changing.lock();
        let merged = self.merge_layers().and_then(|()| self.stand());
        if merged.is_err() {
            self.give_up_merges();
        }
        self.end_rebase(&merged);
        merged?;
        if self.pins.is_some() && self.swept.elapsed() >= SWEEP_EVERY {
            self.swept = Instant::now();
            let layers = self.publisher.sweep()?;
            if layers > 0 {
                let repository = self.publisher.repository().describe();
                tracing::info!(repository, layers, "deleted what no epoch that is kept needs");
            }
        }
        Ok(())
    }

    /// Tells what became of a rebase in a pass in which merging went so.
    fn end_rebase(&mut self, merged: &Result<()>) {
        let is_rebased = matches!(self.shared.rebases.lock().stage(), Some(Stage::Published));
        if is_rebased && let Err(error) = self.point() {
            tracing::warn!(disk = %self.place, "rebased, and its path leads to an earlier state: {}", told(&error));
        }
        self.shared.rebases.lock().passed(merged.as_ref().err().map(|error| told(error)));
    }

    /// Goes on merging layers of the repository, of one disk at a time, and publishes the chain that has come out of it.
    fn merge_layers(&mut self) -> Result<()> {
        if self.shared.rebases.lock().is_drafting() {
            return Ok(());
        }
        for at in 0..self.members.len() {
            let mut others = self.members.iter().enumerate().filter(|(other, _)| *other != at);
            if others.any(|(_, other)| other.merger.is_under_way()) {
                continue;
            }
            let mut epoch = self.publisher.head().epoch.clone();
            let cuts = self.shared.cuts.lock();
            let on_host = cuts.of_disk(at).iter().find(|cut| cut.number == epoch.number);
            let on_host = on_host.map(|cut| cut.layer.clone());
            drop(cuts);
            let member = &mut self.members[at];
            let Some(objects) = member.merge_layers(&epoch, on_host)? else { continue };
            let chain = &mut member.place.state_mut(&mut epoch).objects;
            let (before, after) = (chain.len(), objects.len());
            *chain = objects;
            self.publisher.publish(epoch)?;
            let mut rebases = self.shared.rebases.lock();
            if matches!(rebases.stage(), Some(Stage::Merging)) {
                rebases.advance(Stage::Published);
                self.stands_anew = true;
            }
            drop(rebases);
            let repository = self.publisher.repository().describe();
            tracing::info!(repository, before, after, "layers are merged");
            self.report();
        }
        Ok(())
    }

    /// Lets go of layers that are kept for this host's copy alone, or that are read past the cache, or of another version of the base.
    fn stand(&mut self) -> Result<()> {
        if self.shared.rebases.lock().keeps_layers() {
            return Ok(());
        }
        let head = self.publisher.head();
        let is_wasteful = |pins: &Vec<Pin>| self.stands_anew || stand::is_wasteful(pins, &head.epoch);
        if !self.pins.as_ref().is_some_and(is_wasteful) {
            return Ok(());
        }
        let lowest = self.members.iter().map(|member| member.border()?.1).collect::<Option<Vec<_>>>();
        let Some(lowest) = lowest else { return Ok(()) };
        self.place.show(&head.epoch)?;
        let pin = stand::pin_for(&**self.publisher.repository(), head)?;
        let rebased = self.members.iter().zip(&lowest).try_for_each(|(member, lowest)| {
            let below = self.place.layer(member.place.state(&pin.epoch).newest());
            member.disk.rebase(lowest, None, (&below, Format::Qcow2))
        });
        // Some may stand on new layers and some on old ones: it is tried again, and each is kept.
        let pins = stand::pins_of(&**self.publisher.repository(), self.publisher.head().owner)?;
        self.pins = needed(&self.members, &self.publisher, pins)?;
        self.forget_indices();
        self.stands_anew &= rebased.is_err();
        Ok(rebased?)
    }

    /// Deletes indices of layers that were let go of, if that can be done.
    fn forget_indices(&self) {
        if let Err(error) = stand::forget_indices(&self.disks, &self.place.local) {
            let copy = self.place.local.display();
            tracing::warn!(%copy, %error, "indices of layers that it does not stand on any more stay");
        }
    }

    /// What a publication leaves to do.
    fn tidy(&mut self, is_asked: bool) {
        let points = is_asked || self.pointed.1.elapsed() >= POINT_EVERY;
        let pointed = if points { self.point() } else { Ok(()) };
        if let Err(error) = pointed.and_then(|()| self.merge_published()) {
            tracing::warn!(disk = %self.place, "published, and not tidied up: {}", told(&error));
        }
        self.advise();
    }

    /// Looks at the disks once for each epoch, as far as their bytes are on this host: guests change what is on them.
    fn advise(&mut self) {
        let number = self.publisher.head().epoch.number;
        let Some(files) = self.place.files().filter(|_| self.advised.0 != number) else { return };
        let own = |member: &Member| {
            let file = member.place.path.file_name().unwrap_or_default().display().to_string();
            advice::of_disk(&member.disk, files).into_iter().map(move |line| format!("{file}: {line}"))
        };
        let all: Vec<String> = self.members.iter().flat_map(own).collect();
        for line in &all {
            if self.advised.1.len() < ADVICE_LOGGED && self.advised.1.insert(line.clone()) {
                tracing::info!(disk = %self.place, "{line}");
            }
        }
        self.advised.0 = number;
        self.shared.orders.lock().status.advice = all;
    }

    /// Notes what became of a pass. Returns whether there will be others.
    fn settle(&mut self, asked: Option<u64>, passed: Result<()>) -> bool {
        let disk = &self.place;
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
            self.disks.iter().for_each(|disk| disk.refuse_writes(&why));
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
        let last = self.shared.cuts.lock().newest();
        self.publish_up_to(last)
    }

    /// The same as far as one of them.
    fn publish_up_to(&mut self, last: EpochNumber) -> Result<()> {
        let published = self.publisher.head().epoch.number;
        let waiting = self.shared.cuts.lock().above(published);
        for number in waiting.into_iter().filter(|number| *number <= last) {
            // Before the next one, which lets go of this state some time. The end of the pass tries again, and tells what fails.
            let _ = self.name_published();
            self.publish(number)?;
        }
        self.report();
        Ok(())
    }

    /// Gives states that are published the names that they waited for.
    fn name_published(&self) -> Result<()> {
        let (repository, pending) = (&**self.publisher.repository(), &self.shared.pending);
        for snapshot in pending.due(self.publisher.head().epoch.number) {
            let (disk, name) = (&self.place, &snapshot.name);
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

    fn publish(&mut self, number: EpochNumber) -> Result<()> {
        let shared = self.shared.clone();
        let cuts: Vec<Cut> = shared.cuts.lock().of(number).cloned().collect();
        let layers: Vec<PathBuf> = cuts.iter().map(|cut| cut.layer.clone()).collect();
        shared.window.publish(&layers, &shared.meter, || {
            let is_stopped = || shared.orders.lock().is_stopped;
            let wire = &shared.window.options().wire;
            let turn = wire.turn(self.publisher.repository().device(), &shared.meter, is_stopped);
            let _turn = turn.ok_or_else(|| self.closed())?;
            self.ship_and_publish(&cuts)
        })?;
        let layers = self.publisher.head().epoch.objects().count();
        self.shared.rebases.lock().published(number, layers);
        self.report();
        Ok(())
    }

    fn closed(&self) -> Error {
        Error::NotPublished(format!("{}: it is being closed", self.place.local.display()))
    }

    /// Publishes an epoch of which these are the layers of the disks.
    fn ship_and_publish(&mut self, cuts: &[Cut]) -> Result<()> {
        let mut epoch = self.publisher.head().epoch.clone();
        if epoch.objects().count() + self.members.len() > OBJECTS_MAX {
            return Err(Error::TooManyLayers { repository: self.publisher.repository().describe() });
        }
        let Cut { number, time_ns, .. } = cuts[0];
        (epoch.number, epoch.time_ns) = (number, time_ns);
        for (at, cut) in cuts.iter().enumerate() {
            let state = self.members[at].place.state_mut(&mut epoch);
            state.objects.extend(self.ship(at, cut, state)?);
            state.size = cut.size;
        }
        // A head that could not be created may still come to be: the next pass begins with it.
        self.publisher.publish(epoch)?;
        self.note_published();
        Ok(())
    }

    /// Else a branch would name epochs that were published.
    fn note_published(&mut self) {
        let number = self.publisher.head().epoch.number;
        if let Err(error) = self.copy.change(|record| record.published = Some(number)) {
            tracing::warn!(disk = %self.place, "published, and not noted: {}", told(&error));
        }
    }

    /// Ships the cut of a disk, unless that was done before another one failed.
    fn ship(&mut self, at: usize, cut: &Cut, below: &DiskState) -> Result<Option<Object>> {
        let newest = below.newest();
        if self.shipped.epoch != cut.number {
            self.shipped = Shipped { epoch: cut.number, layers: Vec::new() };
        }
        match self.shipped.layers.get(at) {
            Some((stands_on, shipped)) if *stands_on == newest => return Ok(*shipped),
            _ => {
                let others = self.shipped.layers.drain(at..).filter_map(|(_, shipped)| shipped);
                others.for_each(|shipped| self.publisher.discard(shipped.id));
            }
        }
        let shipped = self.members[at].ship(&**self.publisher.repository(), cut, below)?;
        self.shipped.layers.push((newest, shipped));
        Ok(shipped)
    }

    /// Merges away what some disks have of cuts that not all have: the next cut has what they hold.
    fn mend(&self) -> Result<()> {
        let shared = &self.shared;
        let torn = shared.cuts.lock().torn().clone();
        if torn.is_empty() {
            return Ok(());
        }
        for (at, member) in self.members.iter().enumerate() {
            let left = || -> Result<Vec<EpochNumber>> {
                let mut cuts = shared.cuts.lock();
                cuts.relist(at, member.cuts()?);
                Ok(cuts.torn_of(at))
            };
            let own = left()?;
            if own.is_empty() {
                continue;
            }
            tracing::warn!(disk = %member.place.path.display(), "not all disks of its group were cut: they are cut anew");
            member.merge(&own, || shared.orders.lock().is_stopped)?;
            if left()?.iter().any(|number| torn.contains(number)) {
                return Err(self.closed());
            }
        }
        shared.cuts.lock().mended(&torn);
        Ok(())
    }

    /// Makes the paths of the disks lead to what is published.
    fn point(&mut self) -> Result<()> {
        let head = self.publisher.head();
        if self.pointed.0 != head.number {
            self.members.iter().try_for_each(|member| point_at(&member.place, &head.epoch))?;
            self.pointed = (head.number, Instant::now());
        }
        Ok(())
    }

    /// Merges published epochs on this host into the newest of them.
    fn merge_published(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let _changing = shared.changing.lock();
        if shared.rebases.lock().keeps_layers() {
            return Ok(());
        }
        let published = self.publisher.head().epoch.number;
        for (at, member) in self.members.iter().enumerate() {
            let cuts = self.shared.cuts.lock();
            let done = cuts.of_disk(at).iter().map(|cut| cut.number).filter(|number| *number <= published);
            let done: Vec<EpochNumber> = done.collect();
            drop(cuts);
            if done.len() < MERGE_AT || member.merger.is_reading() {
                continue;
            }
            let merged = member.merge(&done[..done.len() - 1], || self.shared.orders.lock().is_stopped);
            self.shared.cuts.lock().relist(at, member.cuts()?);
            merged?;
        }
        Ok(())
    }

    /// Shows what there is to say.
    fn report(&self) {
        let head = self.publisher.head();
        let mut orders = self.shared.orders.lock();
        let status = &mut orders.status;
        status.epoch = head.epoch.number;
        (status.head, status.generation) = (head.number, head.generation);
        status.epoch_time_ns = head.epoch.time_ns;
        status.layers = head.epoch.objects().count();
        drop(orders);
        self.shared.show(&self.shared.cuts.lock());
        self.shared.window.look(&self.disks);
    }
}

/// The pins that keep what the disks of a copy stand on, of all that it made; `None` where one is missing. The others are released.
fn needed(members: &[Member], publisher: &Publisher, pins: Vec<Pin>) -> Result<Option<Vec<Pin>>> {
    let below = members.iter().map(|member| Some(member.border()?.0)).collect::<Option<_>>();
    let needed = below.map(|below| stand::needed(&**publisher.repository(), pins, below));
    Ok(needed.transpose()?.flatten())
}
