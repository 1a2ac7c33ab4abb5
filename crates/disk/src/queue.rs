//! Many requests at a time from one I/O thread.
//!
//! ```text
//!   push ──► map says: data in open files, zeros ──► ring ──► completion
//!        │   small read of pages that were read before: copied by the batch ─▲
//!        │   write where the active layer owns the clusters: page cache ─────▲
//!        └───────► anything else: a worker carries it out, blocking ─────────┘
//! ```
//!
//! The map decides, the ring moves bytes: nothing on the fast road blocks, locks or allocates (excepted are requests of more
//! than four segments, and a page that the host took back: [`views`]). Whatever the ring cannot finish (a file's end inside a cluster, an error) is carried out
//! again, whole, by a worker, which finds out what is wrong and says it well.

mod pins;
mod plan;
mod read;
mod reap;
#[cfg(test)]
mod tests;
mod views;
mod wait;
mod write;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_store::{Ring, RingCompletion, SegmentVec, are_zero, slice};

use crate::chain::DetectZeroes;
use crate::disk::Disk;
use crate::epoch::{Member, Phase, next_shard};
use crate::error::{IoContext as _, Result};
use crate::layers::Layers;
use crate::request::{Completion, Op, Request};
use crate::stats::{Begun, QueueStats};
use crate::workers::{Job, Mailbox};
use pins::Pins;
use plan::Part;
use read::Read;
use views::{Fetch, Views};

pub use wait::WATCHED_MAX;

/// See the module documentation. Belongs to the thread that uses it first.
#[derive(Debug)]
pub struct IoQueue {
    disk: Arc<Disk>,
    /// As of the disk's generation when they were last looked at.
    layers: Arc<Layers>,
    ring: Ring,
    pins: Pins,
    views: Views,
    /// What this queue's requests may still see.
    member: Member,
    /// This queue's writes under way.
    writer: Member,
    mailbox: Arc<Mailbox>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Reads that wait for the others of their batch.
    reads: Vec<Read>,
    in_flight: usize,
    at_workers: usize,
    /// Requests that wait for the disk to resume, and writes that wait for its layers to have changed.
    held: Vec<(Request, Begun)>,
    /// Finished without leaving this thread.
    ready: Vec<Completion>,
    /// Until when writes go to workers because the host holds writers back.
    writes_wait_until: Option<Instant>,
    /// Reused by `reap`.
    moved: Vec<RingCompletion>,
    replies: Vec<(u32, Result<()>)>,
    stats: QueueStats,
    detect_zeroes: DetectZeroes,
    /// The request that is being pushed.
    begun: Begun,
}

/// A request under way.
#[derive(Debug, Default)]
struct Slot {
    request: Option<Request>,
    phase: Option<Phase>,
    begun: Begun,
    parts_left: u32,
    failed: bool,
    /// Present while the request writes whole blocks around the page cache.
    writing: Option<Phase>,
    /// What a read will have brought into the host's memory.
    fetches: Option<Fetch>,
}

impl IoQueue {
    /// A queue for up to about `depth` requests at a time.
    ///
    /// # Errors
    /// A host without io_uring, or out of descriptors.
    pub fn new(disk: Arc<Disk>, depth: u32) -> Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        disk.call_when_changed(&mailbox);
        Ok(Self {
            layers: arc_swap::Guard::into_inner(disk.layers_now()),
            stats: disk.stats.join(),
            detect_zeroes: disk.options().detect_zeroes,
            begun: Begun::default(),
            disk,
            ring: Ring::new(depth).while_trying("set up io_uring")?,
            pins: Pins::default(),
            views: Views::default(),
            member: Member::new(next_shard()),
            writer: Member::new(next_shard()),
            mailbox,
            slots: Vec::new(),
            free: Vec::new(),
            reads: Vec::new(),
            in_flight: 0,
            at_workers: 0,
            held: Vec::new(),
            ready: Vec::new(),
            writes_wait_until: None,
            moved: Vec::new(),
            replies: Vec::new(),
        })
    }

    /// The disk that requests go to.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Requests pushed and not reaped.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests that other threads are busy with: nothing is gained by watching for their end, and their processor may be
    /// lost.
    pub fn at_others(&self) -> usize {
        self.at_workers + self.held.len()
    }

    /// Starts a request; it completes with an error if it makes no sense for the disk.
    pub fn push(&mut self, request: Request) {
        self.in_flight += 1;
        self.begun = self.stats.begin(request.op, request.range.len);
        self.start(request);
    }

    fn start(&mut self, mut request: Request) {
        let Some(phase) = self.member.try_enter(&self.disk.epochs) else {
            self.disk.epochs.call_when_open(&self.mailbox);
            return self.held.push((request, self.begun));
        };
        if let Err(error) = self.disk.check(&request) {
            return self.finish_now(request.token, phase, Err(error));
        }
        if self.detect_zeroes != DetectZeroes::Off {
            self.detect_zeroes(&mut request);
        }
        match request.op {
            Op::Read => self.read_soon(request, phase),
            Op::Write { fua: false } => self.push_write(request, phase),
            _ => self.leave_to_worker(request, phase),
        }
    }

    /// Makes a write of zeros a request for zeros, where whole clusters gain by it.
    #[cold]
    fn detect_zeroes(&self, request: &mut Request) {
        let Op::Write { fua } = request.op else { return };
        let (range, bits) = (request.range, self.layers.cluster_bits());
        let first = range.start.align_up(bits);
        let whole = if range.end().get() == self.disk.size() { 1 } else { bits.size() };
        if range.end().get() >= first.get() + whole && are_zero(&request.segments) {
            request.op = Op::WriteZeroes { unmap: self.detect_zeroes == DetectZeroes::Unmap, fua };
            request.segments.clear();
        }
    }

    /// Looks at the disk's layers if they have changed; false while that is not possible, and workers must do everything.
    #[inline]
    fn refresh(&mut self) -> bool {
        self.disk.generation() == self.layers.generation || self.take_new_layers()
    }

    #[cold]
    fn take_new_layers(&mut self) -> bool {
        if let Err(error) = self.ring.unpin_all() {
            tracing::warn!(%error, "io_uring does not let go of files for the moment");
            return false;
        }
        self.pins = Pins::default();
        let now = arc_swap::Guard::into_inner(self.disk.layers_now());
        let before = (self.views.clear(), std::mem::replace(&mut self.layers, now));
        // This queue may be the last to hold what a merge removed.
        self.disk.resources.workers().let_go(before);
        true
    }

    fn leave_to_worker(&mut self, request: Request, phase: Phase) {
        self.member.leave(&self.disk.epochs, phase);
        let slot = self.slot(request, None, 0);
        self.send_to_worker(slot);
    }

    fn finish_now(&mut self, token: u64, phase: Phase, result: Result<()>) {
        self.member.leave(&self.disk.epochs, phase);
        self.stats.end(self.begun, result.is_ok());
        self.ready.push(Completion { token, result });
    }

    fn slot(&mut self, request: Request, phase: Option<Phase>, parts: usize) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 requests")
        });
        let parts_left = u32::try_from(parts).expect("few parts");
        self.slots[number as usize] = Slot {
            request: Some(request),
            phase,
            begun: self.begun,
            parts_left,
            failed: false,
            writing: None,
            fetches: None,
        };
        number
    }

    fn send_to_worker(&mut self, slot: u32) {
        let request = self.slots[slot as usize].request.clone().expect("a slot in use has a request");
        self.stats.counters().sent_to_worker(request.op);
        self.hand_over(slot, request);
    }

    /// Has a worker carry `request` out: all of what the slot is about, or a part of it.
    fn hand_over(&mut self, slot: u32, request: Request) {
        self.at_workers += 1;
        let (disk, reply_to) = (Arc::clone(&self.disk), Arc::clone(&self.mailbox));
        let job = Job { disk, request, slot, reply_to };
        self.disk.resources.workers().send(job);
    }

    /// Hands everything pushed to the kernel, in one call if it takes any, and carries out what it is not needed for.
    pub fn submit(&mut self) {
        self.start_reads();
        if let Err(error) = self.ring.submit() {
            // Nothing is lost: entries stay queued, and the next call tries again.
            tracing::warn!(%error, "io_uring takes no requests for the moment");
        }
    }
}

/// The memory for a part of a request.
fn of_part(segments: &SegmentVec<'static>, part: &Part) -> SegmentVec<'static> {
    if let [only] = &segments[..]
        && part.len == only.len()
    {
        return segments.clone();
    }
    slice(segments, part.skip, part.len)
}

impl Drop for IoQueue {
    /// Waits for the requests under way: their memory is in use until then.
    fn drop(&mut self) {
        let mut finished = Vec::new();
        while self.in_flight > 0 {
            self.submit();
            self.reap(&mut finished);
            if self.in_flight > 0 {
                self.wait(&[], Some(Duration::from_millis(100)));
            }
        }
        // At once, with their locks: the kernel takes its time over a ring that is closed.
        if let Err(error) = self.ring.unpin_all() {
            tracing::warn!(%error, "files stay locked for a moment more");
        }
    }
}
