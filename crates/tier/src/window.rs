//! The loss window of a tiered disk, or of a group: how old the oldest write is that is not published, and what is done about it.
//!
//! ```text
//!   engine ── cut, ship, published ──►┌────────┐
//!   watch ─── looks, measures ───────►│ Window ├──► is a cut due?           the engine
//!   meter ─── moved, silent ─────────►│        ├──► pace of the writes      the disk's queues
//!                                     └────────┘──► do flushes wait?        the disk's queues
//! ```
//!
//! The watch is a thread beside the engine, which may be busy shipping, or stuck in a repository that does not answer. While the repository
//! answers, it slows writes as [`Pacer`] says. While it does not, or while epochs are held, guests write as fast as they can, up to a budget
//! of bytes; there writes wait, and none fails.
//!
//! Lock order: the wire, the engine's orders, the window's state.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::stats::Kind;
use vmstrata_disk::{Disk, Pace};
use vmstrata_repo::DeviceId;

use crate::meter::Meter;
use crate::pacer::{Pacer, Seen, Ship, shares};
use crate::status::{DurableAt, OnOutage, TierOptions, WindowStatus};

/// A repository that answers nothing for so long does not answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// The longest time between two looks at whether the guest has written, and of a disk that is written.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(250);
/// So little room is none.
const ROOM_MIN: u64 = 64 << 10;

/// A time: to be shown, and to be measured from, whatever becomes of the host's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// In nanoseconds since 1970.
    pub(crate) ns: u64,
    pub(crate) at: Instant,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self { ns: now_ns(), at: Instant::now() }
    }

    /// One in the past: as old as the clock says.
    pub(crate) fn at_ns(ns: u64) -> Self {
        let now = Self::now();
        let ago = Duration::from_nanos(now.ns.saturating_sub(ns));
        Self { ns, at: now.at.checked_sub(ago).unwrap_or(now.at) }
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Window {
    /// What is published, for the log.
    title: String,
    options: TierOptions,
    /// What the repository lies on.
    device: DeviceId,
    /// Whether the oldest write is older than the window, when it was looked last.
    is_late: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When it was last looked whether the guest has written.
    looked: Moment,
    /// When the oldest write that no epoch has came in, at the earliest.
    dirty: Option<Moment>,
    /// The bytes of each disk, and what guests had written, when they were last cut.
    sizes: Vec<u64>,
    written: u64,
    /// When the oldest write of the epochs that are not published came in, at the earliest, and the files of these.
    pending: Option<Moment>,
    files: Vec<PathBuf>,
    /// What guests wrote for the last cut.
    cut_bytes: u64,
    ship: Option<Shipping>,
    pacer: Pacer,
    held_until: Option<Moment>,
    /// Whether the engine's last try failed.
    is_failing: bool,
    /// What the watch found last.
    unpublished_bytes: u64,
    pace: Pace,
}

#[derive(Clone, Copy, Debug)]
struct Shipping {
    began: Instant,
    /// What guests wrote for it, and what is moved for it: written, and read back.
    bytes: u64,
    to_move: u64,
    /// What the meter said when it began.
    moved: u64,
}

/// What is known of disks when their engine begins.
#[derive(Debug)]
pub(crate) struct Begin {
    pub(crate) title: String,
    /// Of each disk, when it was last cut.
    pub(crate) sizes: Vec<u64>,
    /// When the oldest writes came in of which no epoch has any, and of epochs that are not published.
    pub(crate) dirty: Option<Moment>,
    pub(crate) pending: Option<Moment>,
    /// See [`Window`].
    pub(crate) is_late: Arc<AtomicBool>,
}

/// Bytes that guests have written.
fn written(disks: &[Arc<Disk>]) -> u64 {
    disks.iter().map(|disk| written_to(disk)).sum()
}

fn written_to(disk: &Disk) -> u64 {
    disk.stats().bytes_of(Kind::Write)
}

fn sizes(disks: &[Arc<Disk>]) -> Vec<u64> {
    disks.iter().map(|disk| disk.size()).collect()
}

/// Bytes that a file has on its device.
fn stored(path: &Path) -> u64 {
    path.metadata().map_or(0, |about| about.blocks() * 512)
}

impl State {
    fn is_dirty(&self, disks: &[Arc<Disk>]) -> bool {
        disks.iter().any(|disk| disk.has_written()) || sizes(disks) != self.sizes
    }

    /// When the oldest write came in that is not published, at the earliest.
    fn oldest(&self) -> Option<Moment> {
        self.pending.or(self.dirty)
    }

    fn is_late(&self, window: Duration) -> bool {
        self.oldest().is_some_and(|oldest| oldest.at.elapsed() > window)
    }

    fn is_held(&self) -> bool {
        self.held_until.is_some_and(|until| Instant::now() < until.at)
    }
}

impl Window {
    pub(crate) fn new(options: TierOptions, device: DeviceId, disks: &[Arc<Disk>], begin: Begin) -> Self {
        let Begin { title, sizes, dirty, pending, is_late } = begin;
        let state = State {
            looked: Moment::now(),
            dirty,
            sizes,
            written: written(disks),
            pending,
            files: Vec::new(),
            cut_bytes: 0,
            ship: None,
            pacer: Pacer::new(options.window.as_secs_f64()),
            held_until: None,
            is_failing: false,
            unpublished_bytes: 0,
            pace: Pace::Free,
        };
        Self { title, options, device, is_late, state: Mutex::new(state) }
    }

    pub(crate) fn options(&self) -> &TierOptions {
        &self.options
    }

    /// Looks whether the guest has written, and how much is not published: so many bytes.
    pub(crate) fn look(&self, disks: &[Arc<Disk>]) -> u64 {
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut state.looked, Moment::now());
        if state.dirty.is_none() && state.is_dirty(disks) {
            // Since the last look.
            state.dirty = Some(before);
        }
        let active =
            disks.iter().filter(|_| state.dirty.is_some()).map(|disk| stored(disk.path())).sum::<u64>();
        self.is_late.store(state.is_late(self.options.window), Ordering::Relaxed);
        state.unpublished_bytes = state.files.iter().map(|file| stored(file)).sum::<u64>() + active;
        state.unpublished_bytes
    }

    /// Whether there is anything to cut off.
    pub(crate) fn is_dirty(&self, disks: &[Arc<Disk>]) -> bool {
        self.state.lock().is_dirty(disks)
    }

    /// Whether the disks have to be cut, so that what is written is published in time.
    pub(crate) fn is_cut_due(&self, disks: &[Arc<Disk>]) -> bool {
        let state = self.state.lock();
        let bytes = written(disks).saturating_sub(state.written);
        state.dirty.is_some_and(|since| {
            bytes >= self.options.epoch_bytes
                || state.pacer.is_due(bytes as f64, since.at.elapsed().as_secs_f64())
        })
    }

    /// Whether epochs wait to be published.
    pub(crate) fn is_pending(&self) -> bool {
        self.state.lock().pending.is_some()
    }

    /// Cuts the disks with `cut`.
    pub(crate) fn cut<T, E>(&self, disks: &[Arc<Disk>], cut: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let (before, written, sizes) = (Moment::now(), written(disks), sizes(disks));
        let made = cut()?;
        let mut state = self.state.lock();
        state.cut_bytes = written.saturating_sub(state.written);
        (state.written, state.sizes) = (written, sizes);
        let since = state.dirty.take().unwrap_or(before);
        // What was written to the new layer meanwhile, the next look finds.
        state.looked = before;
        state.pending.get_or_insert(since);
        Ok(made)
    }

    /// Ships and publishes the epoch of a cut with `publish`. Of one that was cut before this process began, only its files tell
    /// how much was written for it.
    pub(crate) fn publish<T, E>(
        &self,
        layers: &[PathBuf],
        meter: &Meter,
        publish: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let stored: u64 = layers.iter().map(|layer| stored(layer)).sum();
        let bytes = match std::mem::take(&mut self.state.lock().cut_bytes) {
            0 => stored,
            bytes => bytes,
        };
        let ship =
            Shipping { began: Instant::now(), bytes, to_move: 2 * stored.max(1), moved: meter.moved() };
        self.state.lock().ship = Some(ship);
        let published = publish();
        let mut state = self.state.lock();
        state.ship = None;
        if published.is_ok() {
            state.pacer.took(ship.bytes as f64, ship.began.elapsed().as_secs_f64());
        }
        published
    }

    /// The files of the epochs that are not published; none when all are.
    pub(crate) fn set_pending(&self, files: Vec<PathBuf>) {
        let mut state = self.state.lock();
        if files.is_empty() {
            state.pending = None;
        }
        state.files = files;
    }

    /// Whether the engine's last try failed.
    pub(crate) fn set_failing(&self, is_failing: bool) {
        self.state.lock().is_failing = is_failing;
    }

    /// Holds epochs on this host for so long, or no longer.
    pub(crate) fn hold(&self, period: Option<Duration>) {
        let until = |period: Duration| {
            let now = Moment::now();
            Moment { ns: now.ns + period.as_nanos() as u64, at: now.at + period }
        };
        self.state.lock().held_until = period.map(until);
    }

    /// Whether epochs are held.
    pub(crate) fn is_held(&self) -> bool {
        self.state.lock().is_held()
    }

    /// Whether a flush that ends now has to wait until it is published.
    pub(crate) fn holds_flushes(&self) -> bool {
        let is_late = || {
            let state = self.state.lock();
            state.is_late(self.options.window) && !state.is_held()
        };
        match (self.options.durability, self.options.on_outage) {
            (DurableAt::Repository, _) => true,
            (DurableAt::Host, OnOutage::Continue) => false,
            (DurableAt::Host, OnOutage::Stall) => is_late(),
        }
    }

    /// Since when the repository has not answered, if that is too long: this disk, or those whose turn it waits for.
    pub(crate) fn silent_since(&self, meter: &Meter) -> Option<Moment> {
        let is_shipping = self.state.lock().ship.is_some();
        let others = || if is_shipping { self.options.wire.silence(self.device) } else { None };
        let silence = meter.silence().or_else(others).filter(|silence| *silence >= ANSWER_WITHIN)?;
        Some(Moment::at_ns(now_ns().saturating_sub(silence.as_nanos() as u64)))
    }

    /// What there is to say, but for flushes.
    pub(crate) fn status(&self) -> WindowStatus {
        let state = self.state.lock();
        WindowStatus {
            window: self.options.window,
            on_outage: self.options.on_outage,
            durability: self.options.durability,
            unpublished_bytes: state.unpublished_bytes,
            unpublished_since_ns: state.oldest().map(|oldest| oldest.ns),
            held_until_ns: state.held_until.filter(|_| state.is_held()).map(|until| until.ns),
            ships_bytes_a_second: state.pacer.rate().map(|rate| rate as u64),
            slowed_to_bytes_a_second: match state.pace {
                Pace::BytesPerSecond(rate) => Some(rate),
                Pace::Free | Pace::Stopped => None,
            },
            writes_wait: state.pace == Pace::Stopped,
            flushes_wait: 0,
        }
    }
}

/// What the watch keeps from one look to the next.
#[derive(Debug)]
pub(crate) struct Watch {
    looked: Instant,
    /// Of each disk.
    written: Vec<u64>,
    /// Bytes a second that guests wrote to each disk lately; falls slowly.
    guests: Vec<f64>,
    paces: Vec<Pace>,
    /// Whether the log says that the repository does not answer, and that writes wait.
    told_silent: bool,
    told_full: bool,
}

impl Watch {
    pub(crate) fn new(disks: &[Arc<Disk>]) -> Self {
        Self {
            looked: Instant::now(),
            written: disks.iter().map(|disk| written_to(disk)).collect(),
            guests: vec![0.0; disks.len()],
            paces: vec![Pace::Free; disks.len()],
            told_silent: false,
            told_full: false,
        }
    }

    /// How long until the next look.
    pub(crate) fn tick(window: &Window) -> Duration {
        let state = window.state.lock();
        let is_busy = state.oldest().is_some() || state.pace != Pace::Free;
        if is_busy {
            (window.options.window / 20).min(TICK)
        } else {
            (window.options.window / 10).min(LOOK_EVERY)
        }
    }

    /// Looks at the disks, and sets the pace of their writes.
    pub(crate) fn look(&mut self, window: &Window, disks: &[Arc<Disk>], meter: &Meter) {
        let unpublished = window.look(disks);
        self.measure_guests(disks);
        let silent = window.silent_since(meter);
        self.tell_silent(&window.title, silent.is_some());
        let is_outage = silent.is_some() || window.state.lock().is_failing;
        let wanted = if is_outage || window.is_held() {
            let room = window.room(disks, unpublished);
            if room < ROOM_MIN && !is_outage {
                tracing::warn!(disk = window.title, "held until its budget is used up: published again");
                window.hold(None);
            }
            self.tell_full(&window.title, unpublished, room < ROOM_MIN);
            self.pace_within(room, Watch::tick(window))
        } else {
            self.tell_full(&window.title, unpublished, false);
            window.pace(disks, meter, self.guests.iter().sum(), Watch::tick(window))
        };
        let mut state = window.state.lock();
        if is_other(state.pace, wanted) {
            state.pace = wanted;
        }
        let pace = state.pace;
        drop(state);
        self.set_paces(disks, pace);
    }

    fn measure_guests(&mut self, disks: &[Arc<Disk>]) {
        let now = Instant::now();
        let seconds = now.duration_since(self.looked).as_secs_f64().max(0.001);
        self.looked = now;
        for (disk, (before, guest)) in disks.iter().zip(self.written.iter_mut().zip(&mut self.guests)) {
            let written = written_to(disk);
            *guest = (written.saturating_sub(*before) as f64 / seconds).max(*guest * 0.8);
            *before = written;
        }
    }

    fn set_paces(&mut self, disks: &[Arc<Disk>], pace: Pace) {
        let wanted = match pace {
            Pace::BytesPerSecond(rate) => {
                let shares = shares(rate as f64, &self.guests);
                shares.into_iter().map(|share| Pace::BytesPerSecond(share as u64)).collect()
            }
            Pace::Free | Pace::Stopped => vec![pace; disks.len()],
        };
        for (disk, (pace, wanted)) in disks.iter().zip(self.paces.iter_mut().zip(wanted)) {
            if is_other(*pace, wanted) {
                *pace = wanted;
                disk.pace(wanted);
            }
        }
    }

    /// As fast as the guest can, as long as there is room: what it writes until the next looks leaves some of that.
    fn pace_within(&self, room: u64, tick: Duration) -> Pace {
        let rate = room as f64 / (2.0 * tick.as_secs_f64());
        match rate {
            _ if room < ROOM_MIN => Pace::Stopped,
            rate if rate < 2.0 * self.guests.iter().sum::<f64>() => Pace::BytesPerSecond(rate as u64),
            _ => Pace::Free,
        }
    }

    fn tell_silent(&mut self, title: &str, is_silent: bool) {
        match (std::mem::replace(&mut self.told_silent, is_silent), is_silent) {
            (false, true) => {
                let seconds = ANSWER_WITHIN.as_secs();
                tracing::error!(
                    disk = title,
                    "not published: its repository has answered nothing for {seconds} s"
                );
            }
            (true, false) => tracing::info!(disk = title, "its repository answers again"),
            _ => {}
        }
    }

    fn tell_full(&mut self, title: &str, unpublished: u64, is_full: bool) {
        match (std::mem::replace(&mut self.told_full, is_full), is_full) {
            (false, true) => tracing::error!(
                disk = title,
                "its writes wait: {unpublished} bytes are not published, and this host may keep no more of them (outage-bytes)"
            ),
            (true, false) => tracing::info!(disk = title, "its writes go on"),
            _ => {}
        }
    }
}

/// Whether a pace differs enough to wake the disk's queues.
fn is_other(now: Pace, wanted: Pace) -> bool {
    match (now, wanted) {
        (Pace::BytesPerSecond(now), Pace::BytesPerSecond(wanted)) => now.abs_diff(wanted) > now / 10,
        (now, wanted) => now != wanted,
    }
}

impl Window {
    /// Bytes that may be written while nothing is published.
    fn room(&self, disks: &[Arc<Disk>], unpublished: u64) -> u64 {
        let budget = self.options.outage_bytes.map(|bytes| bytes.get());
        let budget = budget.or_else(|| {
            let found = rustix::fs::statvfs(disks.first()?.path().parent()?).ok()?;
            Some(found.f_bavail.saturating_mul(found.f_frsize))
        });
        budget.unwrap_or(u64::MAX).saturating_sub(unpublished)
    }

    /// The pace at which what is written is published in time.
    fn pace(&self, disks: &[Arc<Disk>], meter: &Meter, guest: f64, tick: Duration) -> Pace {
        let mut state = self.state.lock();
        let ship = state.ship.map(|ship| {
            let moved = meter.moved().saturating_sub(ship.moved);
            let part = (moved as f64 / ship.to_move as f64).min(1.0);
            Ship { elapsed: ship.began.elapsed().as_secs_f64(), bytes: ship.bytes as f64, part }
        });
        let seen = Seen {
            dirty: written(disks).saturating_sub(state.written) as f64,
            age: state.dirty.map_or(0.0, |since| since.at.elapsed().as_secs_f64()),
            ship,
            guest,
            tick: tick.as_secs_f64(),
        };
        state.pacer.pace(&seen).map_or(Pace::Free, Pace::BytesPerSecond)
    }
}
