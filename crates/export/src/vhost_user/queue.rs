//! One queue of the device on its I/O thread: requests from its ring to the engine, and answers back.
//!
//! ```text
//!   Ring::next ─► parse ─┬─► IoQueue::push(Request { token: slot, head })   reads, writes, flushes, ranges
//!                        └─► Ring::answer                                   errors, GET_ID, nothing to do
//!   Completion ─► Queue::complete ─► Ring::answer ─► Queue::publish ─► call
//! ```

mod begin;
mod reports;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use vmstrata_disk::{Completion, IoQueue};
use vmstrata_store::EventNotifier;

use super::config::Device;
use super::notify;
use super::request::Status;
use super::ring::{Ring, RingError};
use super::stats::Counters;
use reports::{Report, Reports};

/// Requests taken from one ring before they are answered: half of those that wait, within these bounds.
///
/// Many make one system call. But a driver that gets all of its answers at once has nothing to do until then, and nor have
/// we after. With half of them it works on the first while we work on the others. (Beside taking all of up to 24, 4 KiB at a
/// depth of 8: 1.7 times as many writes, 2.1 as many reads; at 32: 1.1 times as many of both. Less than four a time: reads
/// at 8 gain nothing.)
const TAKE_MIN: u32 = 4;
const TAKE_MAX: u32 = 24;

/// What a stopped queue leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped {
    /// The next entry of the available ring to take.
    pub(super) next_available: u16,
}

/// What it takes to run a queue.
pub(super) struct QueueParts {
    pub(super) index: u16,
    pub(super) ring: Ring,
    pub(super) ring_size: u16,
    /// Absent: the driver expects to be polled.
    pub(super) kick: Option<Arc<OwnedFd>>,
    /// Without an event: the driver polls.
    pub(super) call: Arc<EventNotifier>,
    pub(super) err: Option<Arc<OwnedFd>>,
    /// The features its driver negotiated.
    pub(super) features: u64,
}

#[derive(Debug)]
enum State {
    Running,
    /// Takes nothing more; the sender waits for what is in flight.
    Stopping(SyncSender<Stopped>),
    /// The driver broke the rules: nothing more is taken until the queue is set up anew.
    Broken,
}

/// A request in flight, found by its head.
#[derive(Clone, Copy)]
struct Pending {
    /// Completions still to come.
    parts: u16,
    status: Status,
    /// Bytes written to guest memory if all goes well.
    written: u32,
}

/// A running queue.
pub(super) struct Queue {
    parts: QueueParts,
    device: Arc<Device>,
    state: State,
    pending: Box<[Pending]>,
    reports: Reports,
    /// The upper half of this queue's tokens.
    token: u64,
}

impl Queue {
    /// A queue whose completions carry `slot` (see [`slot_of`]).
    pub(super) fn new(parts: QueueParts, device: Arc<Device>, slot: usize) -> Self {
        let pending = Pending { parts: 0, status: Status::Ok, written: 0 };
        let pending = vec![pending; usize::from(parts.ring_size)].into_boxed_slice();
        let reports = Reports::new(Instant::now());
        Self { parts, device, state: State::Running, pending, reports, token: (slot as u64) << 16 }
    }

    pub(super) fn index(&self) -> u16 {
        self.parts.index
    }

    /// What to watch for kicks.
    pub(super) fn kick(&self) -> Option<&OwnedFd> {
        self.parts.kick.as_deref().filter(|_| self.is_running())
    }

    /// Whether the queue must be looked at because its driver will not kick.
    pub(super) fn is_polled(&self) -> bool {
        self.parts.kick.is_none() && self.is_running()
    }

    /// Whether someone waits for what is in flight.
    pub(super) fn is_stopping(&self) -> bool {
        matches!(self.state, State::Stopping(_))
    }

    fn is_running(&self) -> bool {
        matches!(self.state, State::Running)
    }

    /// Takes nothing more: the kick descriptor does not behave like one.
    pub(super) fn break_kick(&mut self) {
        self.state = State::Broken;
    }

    /// Takes requests from the ring and pushes them; how many.
    #[inline]
    pub(super) fn take(&mut self, io: &mut IoQueue, counters: &Counters) -> u32 {
        if !self.is_running() {
            return 0;
        }
        let share = self.parts.ring.waiting().div_ceil(2).clamp(TAKE_MIN, TAKE_MAX);
        for taken in 0..share {
            match self.parts.ring.next() {
                Ok(Some(chain)) => self.begin(chain, io, counters),
                Ok(None) => return taken,
                Err(error) => {
                    self.break_off(&error);
                    return taken + 1;
                }
            }
        }
        share
    }

    fn break_off(&mut self, error: &RingError) {
        tracing::error!(queue = self.index(), %error, "queue stopped: its driver broke the rules; reset the device");
        self.state = State::Broken;
        if let Some(err) = &self.parts.err {
            notify::call_once(err);
        }
    }

    /// Notes that the engine finished one part of a request.
    #[inline]
    pub(super) fn complete(&mut self, completion: &Completion, counters: &Counters) {
        let head = completion.token as u16;
        let pending = &mut self.pending[usize::from(head)];
        pending.parts = pending.parts.checked_sub(1).expect("a completion for every part, once");
        if let Err(error) = &completion.result {
            if pending.status == Status::Ok {
                counters.errors.add(1);
            }
            pending.status = Status::IoError;
            let queue = self.parts.index;
            match self.reports.failed(Instant::now()) {
                Report::Log => tracing::warn!(queue, %error, "request failed"),
                Report::LogLast => {
                    tracing::warn!(queue, %error, "request failed; more of this queue's are not logged for a minute");
                }
                Report::Skip => tracing::debug!(queue, %error, "request failed"),
            }
        }
        if pending.parts == 0 {
            let written = if pending.status == Status::Ok { pending.written } else { 0 };
            self.parts.ring.answer(head, pending.status as u8, written);
        }
    }

    /// Shows the driver what was answered, and calls it if it wants to be called.
    #[inline]
    pub(super) fn publish(&mut self, counters: &Counters) {
        if self.parts.ring.publish() && notify::call(&self.parts.call) {
            counters.calls.add(1);
        }
    }

    /// Asks for kicks; whether there is work already.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        self.is_running() && self.parts.ring.enable_kicks()
    }

    /// Kicks are not needed for now.
    pub(super) fn woke(&mut self) {
        if self.is_running() {
            self.parts.ring.disable_kicks();
        }
    }

    /// Takes nothing more; `reply` hears when nothing is in flight.
    pub(super) fn begin_stop(&mut self, reply: SyncSender<Stopped>) {
        self.state = State::Stopping(reply);
    }

    /// Whether the queue is stopping and has nothing in flight any more.
    pub(super) fn is_drained(&self) -> bool {
        self.is_stopping() && self.parts.ring.in_flight() == 0
    }

    /// Tells the one who waits for it that the queue is done.
    pub(super) fn finish_stop(self) {
        let next_available = self.parts.ring.next_available();
        let State::Stopping(reply) = self.state else { panic!("only a stopping queue is finished") };
        drop(self.parts);
        // The one who waited may be gone after a panic; then nobody needs to know.
        let _ = reply.send(Stopped { next_available });
    }
}

/// The slot a completion belongs to.
#[inline]
pub(super) fn slot_of(completion: &Completion) -> usize {
    (completion.token >> 16) as usize
}
