//! Flushes that only have to flush a file: the ring makes them, or the queue's thread.
//!
//! ```text
//!   FLUSH, or the end of a write with FUA ──► waits for its batch, and for the flush in flight
//!                                                  │
//!                                                  ▼
//!                     alone, and short? ── yes ──► here ──► done
//!                                                  │ no
//!                                                  ▼
//!                     are table changes pending, or is there a flush log? ── yes ──► a thread for flushes commits
//!                                                  │ no
//!                                                  ▼
//!                                                ring ──► done ──► all that it is for complete
//! ```
//!
//! A write in place leaves no change, so a guest that overwrites and flushes needs no worker. A guest with nothing else under way
//! waits for no other thread either: to wake one, and to be woken by it, takes as long as a fast disk's flush does. What this
//! thread flushes is short, so that requests that come meanwhile wait little: few bytes were written to the file since the last
//! flush began, the last one here did not take long, and no layer that a snapshot froze waits for its flush.
//!
//! A failed flush is not repeated: it fails the file's [`Flusher`](crate::flusher::Flusher), and a worker reports the error to
//! each request that waits.

use std::io;
use std::time::{Duration, Instant};

use super::IoQueue;
use crate::epoch::Phase;
use crate::flusher::FlushClaim;
use crate::request::{Op, Request};

/// The ring's name for a flush; that of other requests is their slot.
pub(super) const TOKEN: u64 = u64::MAX;

/// Of a file with more bytes to write out, the ring makes the flush: other requests do not wait for it.
const SHORT_MAX: u64 = 256 << 10;
/// A flush that takes longer gains nothing by being made here.
const PATIENCE: Duration = Duration::from_millis(1);
/// For so many times as long the ring makes the next ones then: slow flushes take a ninth of the thread's time at most.
const HELD_BACK: u32 = 8;

/// The flushes of a queue.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// The slots of those that the flush in flight is for.
    in_flight: Option<(Vec<u32>, FlushClaim)>,
    /// The slots of those that the next one is for.
    waiting: Vec<u32>,
    /// Until when the ring makes all of them.
    slow_until: Option<Instant>,
}

impl Flushes {
    /// Requests that wait for one.
    pub(super) fn len(&self) -> usize {
        self.in_flight.as_ref().map_or(0, |(slots, _)| slots.len()) + self.waiting.len()
    }

    /// Whether the next one is to be started.
    pub(super) fn is_wanted(&self) -> bool {
        self.in_flight.is_none() && !self.waiting.is_empty()
    }

    /// Flushes here and now, unless flushes take long.
    fn now<T>(&mut self, flush: impl FnOnce() -> T) -> Option<T> {
        let begun = Instant::now();
        if self.slow_until.is_some_and(|until| begun < until) {
            return None;
        }
        let flushed = flush();
        let took = begun.elapsed();
        self.slow_until = (took > PATIENCE).then(|| begun + took * (1 + HELD_BACK));
        Some(flushed)
    }
}

impl IoQueue {
    /// Starts a flush, or the second half of a write that is to be durable, with its batch.
    pub(super) fn push_flush(&mut self, request: Request, phase: Phase) {
        let slot = self.slot(request, Some(phase), 0);
        self.flush_for(slot);
    }

    /// Flushes for the request in `slot`, which has nothing else to do, with its batch.
    pub(super) fn flush_for(&mut self, slot: u32) {
        self.flushes.waiting.push(slot);
    }

    /// Starts the flush for all that wait for one, unless one is in flight.
    #[inline]
    pub(super) fn start_flush(&mut self) {
        if self.flushes.is_wanted() {
            self.start_flush_for_all();
        }
    }

    fn start_flush_for_all(&mut self) {
        let slots = std::mem::take(&mut self.flushes.waiting);
        if self.disk.check_flushable().is_err() || !self.refresh() {
            return self.leave_flush_to_workers(slots);
        }
        let is_short = self.layers.begin_flush().is_some_and(|len| len <= SHORT_MAX) && self.in_flight == 1;
        let Some((file, claim)) = self.layers.try_claim_flush() else {
            return self.commit(slots, is_short);
        };
        let flushed = if is_short { self.flushes.now(|| file.flush()) } else { None };
        self.flushes.in_flight = Some((slots, claim));
        match flushed {
            Some(result) => self.flushed(result),
            None => self.ring.push_flush(file, TOKEN),
        }
    }

    /// Commits changes of tables, or has the flush log do so.
    fn commit(&mut self, slots: Vec<u32>, is_short: bool) {
        // What is elsewhere is not waited for here.
        if let [slot] = slots[..]
            && is_short
            && !self.disk.may_be_absent()
        {
            self.leave_epoch(slot);
            if let Some(result) = self.flushes.now(|| self.disk.flush()) {
                let completion = self.done_here(slot, result);
                return self.ready.extend(completion);
            }
        }
        self.leave_flush_to_workers(slots);
    }

    /// Nothing that a flush does may wait for the request that it is for.
    fn leave_epoch(&mut self, slot: u32) {
        if let Some(phase) = self.slots[slot as usize].phase.take() {
            self.member.leave(&self.disk.epochs, phase);
        }
    }

    fn leave_flush_to_workers(&mut self, slots: Vec<u32>) {
        for slot in slots {
            self.leave_epoch(slot);
            let waiting = &mut self.slots[slot as usize];
            let request = waiting.request.clone().expect("a slot in use has a request");
            // What it wrote is written.
            self.send(slot, Request { op: Op::Flush, ..request });
        }
    }

    /// The flush in flight has ended.
    #[cold]
    pub(super) fn flushed(&mut self, result: io::Result<()>) {
        let (slots, claim) = self.flushes.in_flight.take().expect("one was in flight");
        let is_done = result.is_ok();
        claim.end(result);
        if !is_done {
            return self.leave_flush_to_workers(slots);
        }
        for slot in slots {
            let completion = self.done_here(slot, Ok(()));
            self.ready.extend(completion);
        }
    }
}
