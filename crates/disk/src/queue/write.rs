//! Writes that a queue's thread makes itself.

use std::time::{Duration, Instant};

use vmstrata_store::{RingFile, slice};

use super::plan::Parts;
use super::{IoQueue, of_part};
use crate::epoch::Phase;
use crate::request::{Op, Request};

/// A write into the page cache that takes longer was held back by the host, whose shortest pause for writers is 6 ms. What
/// takes less may have waited for a processor: up to a tick, which is 4 ms on many hosts.
const WRITE_PATIENCE: Duration = Duration::from_millis(5);
/// For how long writes go to workers then.
const HOLD_BACK: Duration = Duration::from_millis(50);

impl IoQueue {
    /// Starts a write; a worker makes those that must wait for more than the host's page cache. All wait while the layers
    /// change.
    pub(super) fn push_write(&mut self, request: Request, phase: Phase) {
        let Some(writing) = self.writer.try_enter(&self.disk.write_gate) else {
            // That takes less time than a worker, which would wait as well.
            self.member.leave(&self.disk.epochs, phase);
            self.disk.write_gate.call_when_open(&self.mailbox);
            return self.held.push((request, self.begun));
        };
        // Only now: layers change only while no writer is inside.
        let is_current = self.refresh();
        let plan = || self.layers.plan_write(&request, self.stats.counters());
        match is_current.then(plan).flatten() {
            Some(parts) if parts.is_empty() => self.written(request, phase),
            Some(parts) if self.layers.blocks.is_some() => {
                return self.start_write(request, phase, writing, parts);
            }
            Some(parts) => self.write_now(request, phase, &parts),
            None if is_current && self.write_unplanned(&request) => {
                self.written(request, phase);
            }
            None => self.leave_to_worker(request, phase),
        }
        self.writer.leave(&self.disk.write_gate, writing);
    }

    /// Starts the requests that were held; those that must wait again are held again.
    pub(super) fn start_held(&mut self) {
        for (request, begun) in std::mem::take(&mut self.held) {
            self.begun = begun;
            self.start(request);
        }
        self.submit();
    }

    /// Hands the pieces of a write around the page cache to the ring.
    fn start_write(&mut self, request: Request, phase: Phase, writing: Phase, parts: Parts) {
        let segments = request.segments.clone();
        let slot = self.slot(request, Some(phase), parts.len());
        self.slots[slot as usize].writing = Some(writing);
        for part in parts {
            let of_part = of_part(&segments, &part);
            self.ring.push_write(part.file, of_part, part.at, u64::from(slot));
        }
    }

    /// Writes into the page cache here and now.
    ///
    /// The ring would not do better: file systems that cannot promise not to block (ext4, for buffered writes) make the
    /// kernel hand every write to a thread of its own, which costs several times the copy. When the host holds
    /// writers back because too many pages are dirty, workers take over for a while, so that reads go on.
    fn write_now(&mut self, request: Request, phase: Phase, parts: &Parts) {
        let written = patiently(&mut self.writes_wait_until, || {
            parts.iter().all(|part| {
                let segments = slice(&request.segments, part.skip, part.len);
                matches!(&part.file, RingFile::Open(store) if store.write_segments(&segments, part.at).is_ok())
            })
        });
        if written {
            self.written(request, phase);
        } else {
            // A worker writes it again, whole, and finds out what is wrong.
            self.leave_to_worker(request, phase);
        }
    }

    /// Ends a write, or makes it durable first.
    fn written(&mut self, request: Request, phase: Phase) {
        if request.op == (Op::Write { fua: true }) {
            self.push_flush(request, phase);
        } else {
            self.finish_now(&request, phase, Ok(()));
        }
    }

    /// Writes what cannot simply be overwritten, here and now; false when a worker has to.
    fn write_unplanned(&mut self, request: &Request) -> bool {
        // It leaves changes. This thread does not commit them, nor wait for a flush that it has in flight itself.
        if request.op != (Op::Write { fua: false }) || self.layers.is_flush_claimed() {
            return false;
        }
        let write = || self.layers.try_write(request.range.start, &request.segments);
        patiently(&mut self.writes_wait_until, write)
    }
}

/// Writes into the page cache unless the host held writers back a moment ago; returns whether all was written.
fn patiently(wait_until: &mut Option<Instant>, write: impl FnOnce() -> bool) -> bool {
    let begun = Instant::now();
    if wait_until.is_some_and(|until| begun < until) || !write() {
        return false;
    }
    *wait_until = (begun.elapsed() > WRITE_PATIENCE).then(|| begun + HOLD_BACK);
    true
}
