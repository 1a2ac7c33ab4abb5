//! One queue of the device on its I/O thread: requests from its ring to the engine, and answers back.
//!
//! ```text
//!   Ring::next ─► parse ─┬─► IoQueue::push(Request { token: slot, head })   reads, writes, flushes, ranges
//!                        └─► Ring::answer                                   errors, GET_ID, nothing to do
//!   Completion ─► Queue::complete ─► Ring::answer ─► Queue::publish ─► call
//! ```

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use vmstrata_disk::{Completion, IoQueue, Op, Request};
use vmstrata_store::{EventNotifier, SegmentVec, copy_from_slice, copy_to_slice, slice};
use vmstrata_types::{GuestOffset, GuestRange};

use super::config::{Device, MAX_RANGES};
use super::notify;
use super::request::{Command, RANGE_LEN, Shape, Status, ZeroRange, discard_range, parse, zero_range};
use super::ring::{Chain, Ring, RingError};
use super::stats::Counters;

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
        // The receiver may be gone after a panic; then the stop needs no answer.
        let _ = reply.send(Stopped { next_available });
    }
}

/// The slot a completion belongs to.
#[inline]
pub(super) fn slot_of(completion: &Completion) -> usize {
    (completion.token >> 16) as usize
}

/// Bytes of the longest list of ranges.
const ENTRIES_LEN: usize = MAX_RANGES as usize * RANGE_LEN;

/// What a request that moves no data consists of.
type Parts = SmallVec<[(Op, GuestRange); 4]>;

impl Queue {
    /// Hands a request to the engine, or answers it.
    #[inline]
    fn begin(&mut self, chain: Chain, io: &mut IoQueue, counters: &Counters) {
        counters.requests.add(1);
        let (readable, writable) = (chain.readable_len, chain.writable_len);
        let shape = Shape { readable, writable, descriptors: chain.descriptors };
        let head = chain.head;
        match parse(&chain.header, shape, &self.device.limits()) {
            Ok(Command::Read(range)) => {
                counters.read_bytes.add(range.len);
                self.transfer(head, Op::Read, range, chain.writable, io);
            }
            Ok(Command::Write(range)) => {
                counters.written_bytes.add(range.len);
                let fua = self.device.writes_through(self.parts.features);
                self.transfer(head, Op::Write { fua }, range, chain.readable, io);
            }
            Ok(Command::Flush) => self.flush(head, io, counters),
            Ok(Command::Discard { count }) => {
                let parts = self.discards(&chain.readable, count);
                self.start(head, parts, io, counters);
            }
            Ok(Command::WriteZeroes { count }) => {
                let parts = self.zeroes(&chain.readable, count);
                self.start(head, parts, io, counters);
            }
            Ok(Command::GetId { len }) => {
                copy_from_slice(&slice(&chain.writable, 0, len), &self.device.serial[..len]);
                self.parts.ring.answer(head, Status::Ok as u8, len as u32);
            }
            Err(status) => {
                counters.errors.add(1);
                self.parts.ring.refuse(head, status as u8);
            }
        }
    }

    #[inline]
    fn transfer(
        &mut self,
        head: u16,
        op: Op,
        range: GuestRange,
        segments: SegmentVec<'static>,
        io: &mut IoQueue,
    ) {
        if range.len == 0 {
            return self.parts.ring.refuse(head, Status::Ok as u8);
        }
        let written = if matches!(op, Op::Read) { u32::try_from(range.len).unwrap_or(u32::MAX) } else { 0 };
        self.pending[usize::from(head)] = Pending { parts: 1, status: Status::Ok, written };
        io.push(Request { op, range, segments, token: self.token | u64::from(head) });
    }

    fn flush(&mut self, head: u16, io: &mut IoQueue, counters: &Counters) {
        if self.device.limits().read_only {
            return self.parts.ring.refuse(head, Status::Ok as u8);
        }
        let everything = GuestRange::new(GuestOffset::ZERO, 0);
        self.start(head, Ok(Parts::from_iter([(Op::Flush, everything)])), io, counters);
    }

    /// The ranges to discard that `data` lists, or a status when one of them is not allowed.
    fn discards(&self, data: &SegmentVec<'static>, count: usize) -> Result<Parts, Status> {
        let limits = &self.device.limits();
        let entry = |entry: &_| discard_range(entry, limits).map(|range| (Op::Discard, range));
        entries(data, count, &mut [0; ENTRIES_LEN]).iter().map(entry).collect()
    }

    /// The ranges to zero that `data` lists, or a status when one of them is not allowed.
    fn zeroes(&self, data: &SegmentVec<'static>, count: usize) -> Result<Parts, Status> {
        let limits = &self.device.limits();
        let fua = self.device.writes_through(self.parts.features);
        let part = |zero: ZeroRange| (Op::WriteZeroes { unmap: zero.unmap, fua }, zero.range);
        let entry = |entry: &_| zero_range(entry, limits).map(part);
        entries(data, count, &mut [0; ENTRIES_LEN]).iter().map(entry).collect()
    }

    /// Pushes the parts of a request that moves no data, or answers it with the status it got instead.
    fn start(&mut self, head: u16, parts: Result<Parts, Status>, io: &mut IoQueue, counters: &Counters) {
        let parts = match parts {
            Ok(parts) => parts,
            Err(status) => {
                counters.errors.add(1);
                return self.parts.ring.refuse(head, status as u8);
            }
        };
        let wanted = |&&(op, range): &&(Op, GuestRange)| matches!(op, Op::Flush) || range.len > 0;
        let count = parts.iter().filter(wanted).count();
        if count == 0 {
            return self.parts.ring.refuse(head, Status::Ok as u8);
        }
        self.pending[usize::from(head)] = Pending { parts: count as u16, status: Status::Ok, written: 0 };
        for &(op, range) in parts.iter().filter(wanted) {
            let token = self.token | u64::from(head);
            io.push(Request { op, range, segments: SegmentVec::new(), token });
        }
    }
}

/// Copies `count` entries of a discard or write-zeroes request out of guest memory, once.
fn entries<'a>(
    data: &SegmentVec<'static>,
    count: usize,
    into: &'a mut [u8; ENTRIES_LEN],
) -> &'a [[u8; RANGE_LEN]] {
    let bytes = &mut into[..count * RANGE_LEN];
    copy_to_slice(data, bytes);
    bytes.as_chunks().0
}

/// Failures of a queue that are logged in each period.
const REPORTED_MAX: u32 = 10;
const PERIOD: Duration = Duration::from_secs(60);

/// How many failures of requests are logged: a guest can bring about any number of them.
#[derive(Debug)]
struct Reports {
    since: Instant,
    made: u32,
}

/// What to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    Log,
    /// And say that others are not, for a while.
    LogLast,
    Skip,
}

impl Reports {
    fn new(now: Instant) -> Self {
        Self { since: now, made: 0 }
    }

    /// A request failed.
    fn failed(&mut self, now: Instant) -> Report {
        if now.duration_since(self.since) >= PERIOD {
            *self = Self::new(now);
        }
        self.made = self.made.saturating_add(1);
        match self.made {
            ..REPORTED_MAX => Report::Log,
            REPORTED_MAX => Report::LogLast,
            _ => Report::Skip,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_fills_no_log_with_its_failures() {
        let mut now = Instant::now();
        let mut reports = Reports::new(now);
        for _ in 0..3 {
            let made: Vec<Report> = (0..1000).map(|_| reports.failed(now)).collect();
            assert!(made[..9].iter().all(|report| *report == Report::Log));
            assert_eq!(made[9], Report::LogLast);
            assert!(made[10..].iter().all(|report| *report == Report::Skip));
            now += PERIOD;
        }
    }
}
