//! Flushes that only have to flush a file: the ring makes them.
//!
//! ```text
//!   FLUSH, or the end of a write with FUA ──► are table changes pending? ── yes ──► a worker commits them
//!                                                  │ no
//!                                                  ▼
//!                      one in flight? ── yes ──► waits: the next one is for all that wait
//!                                │ no
//!                                ▼
//!                               ring ──► done ──► all that it is for complete
//! ```
//!
//! A write in place leaves no change, so a guest that overwrites and flushes needs no worker. A flush that fails is not made
//! again: it fails the file's [`Flusher`](crate::flusher::Flusher), and a worker that flushes for whoever waited says so.

use std::io;

use super::IoQueue;
use crate::epoch::Phase;
use crate::flusher::FlushClaim;
use crate::request::{Completion, Op, Request};

/// The ring's name for a flush; that of other requests is their slot.
pub(super) const TOKEN: u64 = u64::MAX;

/// The flushes of a queue.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// The slots of those that the flush in flight is for.
    in_flight: Option<(Vec<u32>, FlushClaim)>,
    /// The slots of those that came later.
    waiting: Vec<u32>,
}

impl Flushes {
    /// Requests that wait for one.
    pub(super) fn len(&self) -> usize {
        self.in_flight.as_ref().map_or(0, |(slots, _)| slots.len()) + self.waiting.len()
    }
}

impl IoQueue {
    /// Starts a flush, or the second half of a write that is to be durable.
    pub(super) fn push_flush(&mut self, request: Request, phase: Phase) {
        let slot = self.slot(request, Some(phase), 0);
        self.flush_for(slot);
    }

    /// Flushes for the request in `slot`, which has nothing else to do.
    pub(super) fn flush_for(&mut self, slot: u32) {
        if self.flushes.in_flight.is_some() {
            self.flushes.waiting.push(slot);
        } else {
            self.start_flush(vec![slot]);
        }
    }

    fn start_flush(&mut self, slots: Vec<u32>) {
        let is_possible = self.disk.check_flushable().is_ok() && self.refresh();
        match is_possible.then(|| self.layers.try_claim_flush()).flatten() {
            Some((file, claim)) => {
                self.ring.push_flush(file, TOKEN);
                self.flushes.in_flight = Some((slots, claim));
            }
            None => self.leave_flush_to_workers(slots),
        }
    }

    fn leave_flush_to_workers(&mut self, slots: Vec<u32>) {
        for slot in slots {
            let waiting = &mut self.slots[slot as usize];
            if let Some(phase) = waiting.phase.take() {
                self.member.leave(&self.disk.epochs, phase);
            }
            let request = waiting.request.clone().expect("a slot in use has a request");
            // What it wrote is written.
            self.send(slot, Request { op: Op::Flush, ..request });
        }
    }

    /// The flush in flight has ended.
    #[cold]
    pub(super) fn flushed(&mut self, result: io::Result<usize>, out: &mut Vec<Completion>) {
        let (slots, claim) = self.flushes.in_flight.take().expect("one was in flight");
        let is_done = result.is_ok();
        claim.end(result.map(drop));
        if is_done {
            slots.into_iter().for_each(|slot| out.push(self.release(slot, Ok(()))));
        } else {
            self.leave_flush_to_workers(slots);
        }
        let waiting = std::mem::take(&mut self.flushes.waiting);
        if !waiting.is_empty() {
            self.start_flush(waiting);
            self.submit();
        }
    }
}
