//! What is to go wrong, and the log of what happened.
//!
//! Place in the data flow: every operation of a [`super::FaultStore`] asks its plan for admission first, then
//! reports to it. One mutex guards all of it: this is for tests.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Moment, Operation, Record, StoreId};

/// The kinds of operation a plan tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationKind {
    /// `read_segments`.
    Read,
    /// `write_segments`.
    Write,
    /// `punch_hole`.
    PunchHole,
    /// `set_len`.
    SetLen,
    /// `flush`.
    Flush,
    /// `len`.
    Len,
    /// `extent`.
    Extent,
}

impl OperationKind {
    /// The kind of a recorded operation.
    pub fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Write { .. } => Self::Write,
            Operation::PunchHole { .. } => Self::PunchHole,
            Operation::SetLen { .. } => Self::SetLen,
            Operation::Flush => Self::Flush,
        }
    }
}

/// Which of the operations that match a fault it befalls, counted from 0 when the fault was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Only this one.
    Nth(u64),
    /// This one and all after it.
    From(u64),
}

/// What befalls an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It does nothing and fails with this errno.
    Fail(i32),
    /// A write writes its first `bytes`, a read reads them, then it fails; other operations just fail.
    Tear {
        /// Bytes that are moved.
        bytes: usize,
        /// The errno it fails with.
        errno: i32,
    },
    /// A read succeeds with its first `bytes` only; other operations are as usual.
    Short {
        /// Bytes that are read.
        bytes: usize,
    },
    /// It waits, undone, until [`FaultPlan::release`].
    Hold,
}

/// One thing to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Only operations of this kind, or of any.
    pub kind: Option<OperationKind>,
    /// Only operations on this store, or on any.
    pub store: Option<StoreId>,
    /// Which of them.
    pub when: When,
    /// What happens to it.
    pub effect: Effect,
}

impl Fault {
    fn matches(&self, store: StoreId, kind: OperationKind) -> bool {
        self.kind.is_none_or(|wanted| wanted == kind) && self.store.is_none_or(|wanted| wanted == store)
    }
}

/// What an operation is allowed.
pub(crate) enum Admission {
    /// All it wants.
    Go,
    /// To move `bytes`, then fail if there is an errno.
    Cut { bytes: usize, errno: Option<i32> },
}

/// An operation that waits for [`FaultPlan::release`]: the number of releases before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held(u64);

/// An operation in the log, if there is one.
#[derive(Debug)]
pub(crate) struct Ticket(Option<usize>);

/// Faults to come and the log so far, of any number of stores.
#[derive(Debug, Default)]
pub struct FaultPlan {
    state: Mutex<State>,
    changed: Condvar,
    reads_now: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// With the number of operations that have matched each.
    faults: Vec<(Fault, u64)>,
    /// One entry for each operation admitted.
    seen: Vec<(StoreId, OperationKind)>,
    held: usize,
    /// Grows with every release; an operation is held while it is what it was.
    releases: u64,
    /// Event descriptors of rings that hold operations, written at every release.
    rings: Vec<Weak<OwnedFd>>,
    records: bool,
    now: u64,
    log: Vec<Record>,
}

impl State {
    fn tick(&mut self) -> Moment {
        self.now += 1;
        Moment(self.now)
    }
}

impl FaultPlan {
    /// A plan without faults that counts operations.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A plan without faults that also logs what changes its stores, from [`Moment`] 1 on.
    pub fn recording() -> Arc<Self> {
        let plan = Self::default();
        plan.state.lock().records = true;
        Arc::new(plan)
    }

    /// Adds a fault; where several befall one operation, the one added first wins.
    pub fn add(&self, fault: Fault) {
        self.state.lock().faults.push((fault, 0));
    }

    /// Fails the `n`-th operation (from 0, from now on) of `kind`, or of any.
    pub fn fail_nth(&self, kind: Option<OperationKind>, n: u64, errno: i32) {
        self.add(Fault { kind, store: None, when: When::Nth(n), effect: Effect::Fail(errno) });
    }

    /// Fails the `n`-th operation (from 0, from now on) of `kind`, or of any, and all after it.
    pub fn fail_from(&self, kind: Option<OperationKind>, n: u64, errno: i32) {
        self.add(Fault { kind, store: None, when: When::From(n), effect: Effect::Fail(errno) });
    }

    /// From now on stores have everything in memory when they are asked ([`crate::LocalFile::read_now`]), which then is an
    /// operation of kind [`OperationKind::Read`]; before, they have nothing.
    pub fn read_now(&self) {
        self.reads_now.store(true, Ordering::Relaxed);
    }

    pub(super) fn reads_now(&self) -> bool {
        self.reads_now.load(Ordering::Relaxed)
    }

    /// Takes all faults back, and releases what is held.
    pub fn clear(&self) {
        self.state.lock().faults.clear();
        self.release();
    }

    /// Lets everything go that is held now.
    pub fn release(&self) {
        let mut state = self.state.lock();
        state.releases += 1;
        for ring in state.rings.iter().filter_map(Weak::upgrade) {
            // The counter cannot overflow, and nothing else can fail.
            let _ = rustix::io::write(&ring, &1_u64.to_ne_bytes());
        }
        self.changed.notify_all();
    }

    /// Waits until at least `count` operations are held; false if that has not happened within `patience`.
    pub fn wait_until_held(&self, count: usize, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.held < count {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.held >= count;
            }
        }
        true
    }

    /// Operations of `kind`, or of any, that have reached the stores so far, failed ones included.
    pub fn count(&self, kind: Option<OperationKind>) -> u64 {
        let state = self.state.lock();
        state.seen.iter().filter(|(_, seen)| kind.is_none_or(|kind| kind == *seen)).count() as u64
    }

    /// The log so far.
    pub fn log(&self) -> Vec<Record> {
        self.state.lock().log.clone()
    }

    /// The moment of the last thing that happened; what a test was told before now happened no later.
    pub fn now(&self) -> Moment {
        Moment(self.state.lock().now)
    }

    /// Makes `ring` readable at every release from now on.
    pub(crate) fn call_when_released(&self, ring: &Arc<OwnedFd>) {
        self.state.lock().rings.push(Arc::downgrade(ring));
    }

    /// Counts an operation and applies the first fault that befalls it; returns once it may go on.
    pub(super) fn admit(&self, store: StoreId, kind: OperationKind) -> Admission {
        self.try_admit(store, kind).unwrap_or_else(|held| {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, |state| state.releases == held.0);
            state.held -= 1;
            Admission::Go
        })
    }

    /// As [`FaultPlan::admit`], without waiting.
    ///
    /// # Errors
    /// The operation is held: it may go on when [`FaultPlan::take_released`] says so.
    pub(crate) fn try_admit(&self, store: StoreId, kind: OperationKind) -> Result<Admission, Held> {
        let mut state = self.state.lock();
        state.seen.push((store, kind));
        let mut effect = None;
        for (fault, matched) in state.faults.iter_mut().filter(|(fault, _)| fault.matches(store, kind)) {
            let befalls = match fault.when {
                When::Nth(n) => *matched == n,
                When::From(n) => *matched >= n,
            };
            *matched += 1;
            effect = effect.or(befalls.then_some(fault.effect));
        }
        Ok(match effect {
            None => Admission::Go,
            Some(Effect::Fail(errno)) => Admission::Cut { bytes: 0, errno: Some(errno) },
            Some(Effect::Tear { bytes, errno }) => Admission::Cut { bytes, errno: Some(errno) },
            Some(Effect::Short { bytes }) => Admission::Cut { bytes, errno: None },
            Some(Effect::Hold) => {
                state.held += 1;
                self.changed.notify_all();
                return Err(Held(state.releases));
            }
        })
    }

    /// Whether a held operation may go on; true once.
    pub(crate) fn take_released(&self, held: Held) -> bool {
        let mut state = self.state.lock();
        let is_released = state.releases != held.0;
        state.held -= usize::from(is_released);
        is_released
    }

    /// Logs an operation as handed to its store.
    pub(super) fn issue(&self, store: StoreId, operation: impl FnOnce() -> Operation) -> Ticket {
        let mut state = self.state.lock();
        if !state.records {
            return Ticket(None);
        }
        let issued = state.tick();
        state.log.push(Record { store, operation: operation(), issued, completed: None });
        Ticket(Some(state.log.len() - 1))
    }

    /// Logs how an operation ended.
    pub(crate) fn completed(&self, ticket: Ticket, succeeded: bool) {
        let Ticket(Some(index)) = ticket else { return };
        let mut state = self.state.lock();
        let now = state.tick();
        if succeeded {
            state.log[index].completed = Some(now);
        }
    }
}
