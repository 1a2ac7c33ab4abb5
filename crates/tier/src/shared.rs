//! What the threads of a tiered disk share: orders for its engine, the epochs of this host, and the loss window.
//!
//! Lock order: the changes of layers, the rebases, the epochs of this host, the orders, the window's state.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vmstrata_disk::snapshot::{SnapshotInfo, now_ns};
use vmstrata_disk::{Disk, Durability, Pace, WhenDurable, snapshot_together};

use crate::cuts::{Cut, Cuts};
use crate::error::{Error, Result};
use crate::flushes::Flushes;
use crate::head::Head;
use crate::meter::Meter;
use crate::pending::{CutState, Pending};
use crate::place::Place;
use crate::rebases::Rebases;
use crate::status::{TierState, TierStatus, WindowStatus};
use crate::window::{Watch, Window};

/// What the threads of a disk share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) orders: Mutex<Orders>,
    pub(crate) changed: Condvar,
    /// Signalled when the watch has to look.
    pub(crate) watched: Condvar,
    pub(crate) window: Window,
    pub(crate) pending: Pending,
    /// Held by who cuts the disks: the engine, or who takes a snapshot, for whom it may be too busy.
    pub(crate) cuts: Mutex<Cuts>,
    /// Held while layers are merged or deleted, and while a rebase that needs them begins.
    pub(crate) changing: Mutex<()>,
    pub(crate) rebases: Mutex<Rebases>,
    pub(crate) meter: Arc<Meter>,
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
    pub(crate) offer: Offer,
    pub(crate) status: TierStatus,
}

/// Whether another host may take the disks over. See `hand_over`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Offer {
    #[default]
    None,
    /// From the newest head, which stays that.
    Made,
    /// Until there is another head of this host.
    Withdrawn,
}

impl Shared {
    pub(crate) fn new(
        place: &Place,
        head: &Head,
        window: Window,
        cuts: Cuts,
        meter: Arc<Meter>,
    ) -> Result<Self> {
        let status = TierStatus::of(place, head);
        let orders = Orders {
            asked: 0,
            done: 0,
            failed: (0, String::new()),
            is_stopped: false,
            has_ended: false,
            flushes: Flushes::default(),
            offer: Offer::None,
            status,
        };
        let [changed, watched] = [Condvar::new(), Condvar::new()];
        let (orders, cuts) = (Mutex::new(orders), Mutex::new(cuts));
        let pending = Pending::of(&place.local)?;
        let (changing, rebases) = Default::default();
        Ok(Self { orders, changed, watched, window, pending, cuts, changing, rebases, meter })
    }

    /// Cuts off what was written to the disks until now, at one instant, if anything was.
    pub(crate) fn cut(&self, disks: &[Arc<Disk>]) -> Result<CutState> {
        let mut cuts = self.cuts.lock();
        if !self.window.is_dirty(disks) && !cuts.is_torn() {
            return Ok(CutState { epoch: cuts.newest(), pause: Duration::ZERO });
        }
        self.cut_now(&mut cuts, disks)
    }

    /// Cuts the disk off, whether it was written or not. Returns its layer.
    pub(crate) fn cut_anew(&self, disks: &[Arc<Disk>]) -> Result<Cut> {
        let mut cuts = self.cuts.lock();
        let number = self.cut_now(&mut cuts, disks)?.epoch;
        Ok(cuts.of(number).next().expect("cut now").clone())
    }

    fn cut_now(&self, cuts: &mut Cuts, disks: &[Arc<Disk>]) -> Result<CutState> {
        let number = cuts.newest().next();
        let time_ns = now_ns();
        let (name, labels) = (number.snapshot_name(), Vec::new());
        let info = SnapshotInfo { name, taken_ns: time_ns, labels, group: None, origin: None };
        let sizes: Vec<u64> = disks.iter().map(|disk| disk.size()).collect();
        let all: Vec<&Disk> = disks.iter().map(|disk| &**disk).collect();
        let taken = self.window.cut(disks, || {
            let taken = snapshot_together(&all, &info)?;
            all.iter().try_for_each(|disk| disk.finalize())?;
            Ok::<_, vmstrata_disk::Error>(taken)
        });
        // Else some of them may have it.
        let taken = taken.inspect_err(|_| cuts.failed(number))?;
        let pause = taken.first().map(|taken| taken.pause).unwrap_or_default();
        let layers = taken.into_iter().zip(sizes);
        cuts.add(layers.map(|(taken, size)| Cut { number, layer: taken.layer, time_ns, size }));
        self.show(cuts);
        Ok(CutState { epoch: number, pause })
    }

    /// Shows what is not published.
    pub(crate) fn show(&self, cuts: &Cuts) {
        let published = self.orders.lock().status.epoch;
        let layers = |number| cuts.of(number).map(|cut| cut.layer.clone()).collect::<Vec<_>>();
        self.window.set_pending(cuts.above(published).into_iter().flat_map(layers).collect());
    }

    pub(crate) fn status(&self) -> TierStatus {
        // Before the orders: it looks at the wire.
        let silent_since = self.window.silent_since(&self.meter);
        let orders = self.orders.lock();
        let mut status = orders.status.clone();
        status.window = WindowStatus { flushes_wait: orders.flushes.len(), ..self.window.status() };
        status.pending = self.pending.all();
        if (&status.state, orders.offer) == (&TierState::Publishing, Offer::Made) {
            status.state = TierState::HandedOver;
        }
        if let (TierState::Publishing, Some(since)) = (&status.state, silent_since) {
            let why = format!("{}: it does not answer", status.repository.display());
            status.state = TierState::Stalled { since_ns: since.ns, why };
        }
        status
    }

    /// Watches the loss window until the engine has ended.
    pub(crate) fn watch(&self, disks: &[Arc<Disk>]) {
        let mut watch = Watch::new(disks);
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
            watch.look(&self.window, disks, &self.meter);
            if self.window.is_cut_due(disks) {
                self.changed.notify_all();
            }
        }
        disks.iter().for_each(|disk| disk.pace(Pace::Free));
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

/// Why a disk is not published any more.
pub(crate) fn ended(orders: &Orders) -> Error {
    Error::NotPublished(match &orders.status.state {
        TierState::Fenced { why } => why.clone(),
        _ => format!("{}: it is being closed", orders.status.local.display()),
    })
}
