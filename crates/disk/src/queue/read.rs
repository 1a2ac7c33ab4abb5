//! Reads: copied out of views, or handed to the ring, and to workers where that is faster.
//!
//! ```text
//!   pushed ──► its map entry is fetched ─ ─ submit ─ ─► all are planned ──► their pages are fetched ──► all are copied
//! ```
//!
//! Each step is made for the whole batch before the next one: what it looks at comes from anywhere in the host's memory,
//! and takes the processor longer to get than what is then done with it. It fetches those of a whole batch side by side.

use smallvec::SmallVec;
use vmstrata_store::{RingFile, SEGMENTS_MAX, SegmentVec, slice};
use vmstrata_types::GuestRange;

use super::plan::{Part, Parts};
use super::views::Fetch;
use super::{IoQueue, of_part};
use crate::epoch::Phase;
use crate::request::{Op, Request};
use crate::stats::Begun;

/// Pieces of this many bytes are read by threads of the kernel.
const APART_FROM: usize = 256 << 10;
/// Of requests of this many bytes that fall into small pieces, a worker reads the second half: each piece alone is not
/// worth handing over, and copying all of them takes this thread longer than the other half takes to be handed over.
const HALVED_FROM: u64 = 512 << 10;

/// Reads of a batch: of more, what was fetched for the first would make room for the last.
const BATCH_MAX: usize = 32;

/// A read that waits for the others of its batch.
#[derive(Debug)]
pub(super) struct Read {
    request: Request,
    phase: Phase,
    begun: Begun,
    /// `None` when a worker must carry it out.
    plan: Option<Parts>,
}

impl IoQueue {
    /// Carries a read out when all that is pushed is submitted, or earlier.
    #[inline]
    pub(super) fn read_soon(&mut self, request: Request, phase: Phase) {
        self.layers.prefetch(request.range.start);
        self.reads.push(Read { request, phase, begun: self.begun, plan: None });
        if self.reads.len() == BATCH_MAX {
            self.start_reads();
        }
    }

    /// Starts the reads that wait.
    #[inline]
    pub(super) fn start_reads(&mut self) {
        if !self.reads.is_empty() {
            self.start_batch();
        }
    }

    fn start_batch(&mut self) {
        let (begun, mut reads) = (self.begun, std::mem::take(&mut self.reads));
        if self.refresh() {
            for read in &mut reads {
                read.plan = self.layers.plan_read(&read.request, &self.pins, self.stats.counters());
            }
        }
        let since = self.views.begin();
        for read in &reads {
            self.views.prefetch(read.plan.as_deref().unwrap_or_default());
        }
        for Read { request, phase, begun, plan } in reads.drain(..) {
            self.begun = begun;
            match plan {
                Some(parts) => self.start_read(request, phase, parts),
                None => self.leave_to_worker(request, phase),
            }
        }
        self.views.look_back(since);
        (self.begun, self.reads) = (begun, reads);
    }

    /// Hands the pieces of a read to the ring that are not in views. Without any, it is done.
    fn start_read(&mut self, request: Request, phase: Phase, mut parts: Parts) {
        let Some((request, phase, holds)) = self.wait_for_absent(request, phase, &parts) else { return };
        let count = parts.len();
        let (counters, layers) = (self.stats.counters(), &*self.layers);
        let mut zeros = request.range.len;
        let mut count_part = |part: &Part| {
            counters.read_from(layers.depth_of(part.layer), part.len as u64);
            zeros -= part.len as u64;
        };
        self.views.read(&request, &mut parts, &mut count_part);
        // Of a request that was begun here a worker reads no half.
        let split = if parts.len() == count { split_of(&request, &parts) } else { parts.len() };
        let apart = parts.drain(split..).count();
        parts.iter().for_each(count_part);
        let second_half = (apart > 0).then(|| half(&request, &parts));
        // The reader counts.
        counters.read_zeros(zeros - second_half.as_ref().map_or(0, |half| half.range.len));
        if parts.is_empty() {
            return self.finish_now(&request, phase, Ok(()));
        }
        let fetches = Fetch::of(&parts);
        let reads = gather(parts, &request.segments);
        let slot = self.slot(request, Some(phase), reads.len() + usize::from(apart > 0));
        self.slots[slot as usize].fetches = fetches;
        self.slots[slot as usize].holds = holds;
        if let Some(request) = second_half {
            self.hand_over(slot, request);
        }
        for (part, memory) in reads {
            if let RingFile::Open(store) = &part.file {
                if self.layers.is_frozen(part.layer) && !store.may_be_absent() {
                    self.pins.add(&mut self.ring, part.layer, store);
                }
                self.views.add(part.layer, store, part.at + part.len as u64);
            }
            if part.len >= APART_FROM {
                self.ring.push_read_apart(part.file, memory, part.at, u64::from(slot));
            } else {
                self.ring.push_read(part.file, memory, part.at, u64::from(slot));
            }
        }
    }
}

/// Brings pieces together that lie next to each other in a file, wherever they belong: one read fills the memory of all of them.
fn gather(mut parts: Parts, segments: &SegmentVec<'static>) -> SmallVec<[(Part, SegmentVec<'static>); 1]> {
    parts.sort_unstable_by_key(|part| (part.layer, part.at));
    let mut reads: SmallVec<[(Part, SegmentVec<'static>); 1]> = SmallVec::new();
    for part in parts {
        let memory = of_part(segments, &part);
        match reads.last_mut() {
            Some((before, all))
                if before.layer == part.layer
                    && before.at + before.len as u64 == part.at
                    && all.len() + memory.len() <= SEGMENTS_MAX =>
            {
                before.len += part.len;
                all.extend(memory);
            }
            _ => reads.push((part, memory)),
        }
    }
    reads
}

/// From which piece on a worker reads the request.
fn split_of(request: &Request, parts: &Parts) -> usize {
    let is_scattered = parts.len() > 1 && parts.iter().all(|part| part.len < APART_FROM);
    if request.range.len < HALVED_FROM || !is_scattered {
        return parts.len();
    }
    let middle = request.range.len as usize / 2;
    // Where the first half is all zeros, this thread would be left with nothing to read.
    parts.iter().position(|part| part.skip >= middle).filter(|split| *split > 0).unwrap_or(parts.len())
}

/// What of a request comes after its first `parts`.
fn half(request: &Request, parts: &Parts) -> Request {
    let last = parts.last().expect("a request is split after a piece");
    let (skip, whole) = (last.skip + last.len, request.range.len as usize);
    Request {
        op: Op::Read,
        range: GuestRange::new(request.range.start + skip as u64, (whole - skip) as u64),
        segments: slice(&request.segments, skip, whole - skip),
        token: request.token,
    }
}
