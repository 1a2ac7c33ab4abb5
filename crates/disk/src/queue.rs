//! Many requests at a time from one I/O thread.
//!
//! ```text
//!   push ──► map says: data in open files, zeros ──► ring ──► completion
//!        │   small read of pages that were read before: copied by the batch ─▲
//!        │   write where the active layer owns the clusters: page cache ─────▲
//!        │   flush without pending changes of tables: ring, or here if it is short and alone
//!        └───────► anything else: a worker carries it out, blocking ─────────┘
//! ```
//!
//! The map decides, the ring moves bytes: nothing on the fast road blocks, locks or allocates (excepted are requests of more
//! than four segments, and a page that the host took back: [`views`]). Whatever the ring cannot finish (a file's end inside a cluster, an error) is carried out
//! again, whole, by a worker, which finds out what is wrong and says it well.

mod absent;
mod durable;
mod flush;
mod limits;
mod pins;
mod plan;
mod read;
#[cfg(test)]
mod tests;
mod views;
mod write;

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use vmstrata_store::{Ring, RingCompletion, SegmentVec, are_zero, slice};

use crate::chain::DetectZeroes;
use crate::disk::Disk;
use crate::epoch::{Member, Phase, next_shard};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layers::Layers;
use crate::observer::{Durability, Hooked, IoObserver};
use crate::request::{Completion, Op, Request};
use crate::stats::{Begun, QueueStats};
use crate::throttle::Throttle;
use crate::workers::{Job, Mailbox, Reply};
use absent::Holds;
use flush::Flushes;
use limits::Throttled;
use pins::Pins;
use plan::Part;
use read::Read;
use views::{Fetch, Views};

/// See the module documentation. Belongs to the thread that uses it first; while a flush is in flight, that thread must not call
/// what flushes the disk otherwise ([`Disk::flush`], a snapshot, [`Disk::close`]), as that waits until the flush has been reaped.
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
    flushes: Flushes,
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
    replies: Vec<(u32, Reply)>,
    stats: QueueStats,
    detect_zeroes: DetectZeroes,
    /// As of the disk's hooks when they were last looked at.
    observer: Option<Arc<dyn IoObserver>>,
    throttle: Option<Arc<Throttle>>,
    durability: Option<Arc<dyn Durability>>,
    hooks_version: u64,
    /// Requests that wait for the disk's limits, by direction, and until when the first must.
    throttled: [VecDeque<Throttled>; 2],
    throttled_until: Option<Instant>,
    /// Requests that are done on this host, and wait for the disk's [`Durability`].
    held_here: usize,
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
    /// Whether it is among those in `held_here`.
    is_held_here: bool,
    /// Present while the request writes whole blocks around the page cache.
    writing: Option<Phase>,
    /// What a read will have brought into the host's memory.
    fetches: SmallVec<[Fetch; 1]>,
    /// What keeps the bytes of a read here meanwhile.
    holds: Holds,
}

impl IoQueue {
    /// A queue for up to about `depth` requests at a time.
    ///
    /// # Errors
    /// A host without io_uring, or out of descriptors or threads.
    pub fn new(disk: Arc<Disk>, depth: u32) -> Result<Self> {
        disk.resources.start_workers()?;
        let mailbox = Arc::new(Mailbox::new()?);
        disk.call_when_changed(&mailbox);
        let (hooks_version, Hooked { observer, throttle, durability }) = disk.hooks.get();
        Ok(Self {
            observer,
            throttle,
            durability,
            hooks_version,
            held_here: 0,
            throttled: Default::default(),
            throttled_until: None,
            layers: arc_swap::Guard::into_inner(disk.layers_now()),
            stats: disk.stats.join(),
            detect_zeroes: disk.options().detect_zeroes,
            begun: Begun::default(),
            ring: disk.resources.files().opener().ring(depth).while_trying("set up io_uring")?,
            disk,
            pins: Pins::default(),
            views: Views::default(),
            member: Member::new(next_shard()),
            writer: Member::new(next_shard()),
            mailbox,
            slots: Vec::new(),
            free: Vec::new(),
            reads: Vec::new(),
            flushes: Flushes::default(),
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
        self.at_workers + self.held.len() + self.throttled() + self.flushes.len()
    }

    /// Starts a request; it completes with an error if it makes no sense for the disk.
    pub fn push(&mut self, request: Request) {
        self.in_flight += 1;
        self.look_at_hooks();
        self.begun = self.stats.begin(request.op, request.range.len);
        if let Some(observer) = &self.observer {
            observer.begin(request.op, request.range);
        }
        if self.throttle.is_some() {
            return self.push_limited(request);
        }
        self.start(request);
    }

    #[inline]
    fn look_at_hooks(&mut self) {
        if self.disk.hooks.version() != self.hooks_version {
            self.take_hooks();
        }
    }

    #[cold]
    fn take_hooks(&mut self) {
        let (version, hooked) = self.disk.hooks.get();
        self.hooks_version = version;
        Hooked { observer: self.observer, throttle: self.throttle, durability: self.durability } = hooked;
        if self.throttled() > 0 {
            self.start_throttled();
        }
    }

    fn start(&mut self, mut request: Request) {
        let Some(phase) = self.member.try_enter(&self.disk.epochs) else {
            return self.start_drained(request);
        };
        if let Err(error) = self.disk.check(&request) {
            return self.finish_now(&request, phase, Err(error));
        }
        if self.detect_zeroes != DetectZeroes::Off {
            self.detect_zeroes(&mut request);
        }
        match request.op {
            Op::Read => self.read_soon(request, phase),
            Op::Write { .. } => self.push_write(request, phase),
            Op::Flush => self.push_flush(request, phase),
            _ => self.leave_to_worker(request, phase),
        }
    }

    /// Has a request wait until the disk goes on. A flush is of writes that have completed: it need not.
    #[cold]
    fn start_drained(&mut self, request: Request) {
        if request.op == Op::Flush {
            let slot = self.slot(request, None, 0);
            return self.send_to_worker(slot);
        }
        self.disk.epochs.call_when_open(&self.mailbox);
        self.held.push((request, self.begun));
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

    fn finish_now(&mut self, request: &Request, phase: Phase, result: Result<()>) {
        self.member.leave(&self.disk.epochs, phase);
        self.ready.push(self.end(request, self.begun, result));
    }

    #[inline]
    fn end(&self, request: &Request, begun: Begun, result: Result<()>) -> Completion {
        self.stats.end(begun, result.is_ok());
        if let Some(observer) = &self.observer {
            observer.end(request.op, request.range, &result);
        }
        Completion { token: request.token, result }
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
            is_held_here: false,
            writing: None,
            fetches: SmallVec::new(),
            holds: Holds::new(),
        };
        number
    }

    fn send_to_worker(&mut self, slot: u32) {
        let request = self.slots[slot as usize].request.clone().expect("a slot in use has a request");
        self.send(slot, request);
    }

    fn send(&mut self, slot: u32, request: Request) {
        self.stats.counters().sent_to_worker(request.op);
        self.hand_over(slot, request);
    }

    /// Has a worker carry `request` out: all of what the slot is about, or a part of it.
    fn hand_over(&mut self, slot: u32, request: Request) {
        self.send_job(slot, request, true);
    }

    /// Has a worker carry a request out, and wait itself for what is not here.
    #[cold]
    fn send_whatever_is_absent(&mut self, slot: u32) {
        let request = self.slots[slot as usize].request.clone().expect("a slot in use has a request");
        self.send_job(slot, request, false);
    }

    fn send_job(&mut self, slot: u32, request: Request, fetches: bool) {
        self.at_workers += 1;
        let (disk, reply_to) = (Arc::clone(&self.disk), Arc::clone(&self.mailbox));
        let resources = &self.disk.resources;
        let threads = if request.op == Op::Flush { resources.flushers() } else { resources.workers() };
        threads.send(Job { disk, request, slot, fetches, reply_to });
    }

    /// Hands everything pushed to the kernel, in one call if it takes any, and carries out what it is not needed for.
    pub fn submit(&mut self) {
        self.look_at_hooks();
        self.start_reads();
        self.start_flush();
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
        self.start_all_throttled();
        let mut finished = Vec::new();
        // Those that are done on this host use no memory any more, and may wait for long.
        while self.in_flight > self.held_here {
            self.submit();
            self.reap(&mut finished);
            if self.in_flight > self.held_here {
                self.wait(&[], Some(Duration::from_millis(100)));
            }
        }
        // At once, with their locks: the kernel takes its time over a ring that is closed.
        if let Err(error) = self.ring.unpin_all() {
            tracing::warn!(%error, "files stay locked for a moment more");
        }
    }
}

/// Descriptors a caller may watch in [`IoQueue::wait`].
pub const WATCHED_MAX: usize = 62;

impl IoQueue {
    /// Sleeps until a request has finished, one of `watched` is readable, or `timeout` has passed. May wake for no
    /// reason.
    ///
    /// Returns which of `watched` are readable, a bit for each position. Descriptors stay watched until the next
    /// call without them: make that call before closing one.
    ///
    /// # Panics
    /// When more than [`WATCHED_MAX`] descriptors are watched.
    pub fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> u64 {
        assert!(watched.len() <= WATCHED_MAX, "at most {WATCHED_MAX} descriptors can be watched");
        self.start_reads();
        self.start_flush();
        self.let_go();
        let timeout = if self.ready.is_empty() && self.mailbox.about_to_sleep() {
            let until_throttled =
                self.throttled_until.map(|until| until.saturating_duration_since(Instant::now()));
            timeout.into_iter().chain(until_throttled).min()
        } else {
            Some(Duration::ZERO)
        };
        let mailbox = Arc::clone(&self.mailbox);
        let mut all: SmallVec<[BorrowedFd<'_>; 8]> = SmallVec::from_slice(watched);
        all.push(mailbox.as_fd());
        let readable = self.ring.wait(&all, timeout).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot wait for io_uring");
            std::thread::sleep(Duration::from_millis(1));
            0
        });
        self.roused(readable >> watched.len() & 1 == 1);
        readable & ((1 << watched.len()) - 1)
    }

    /// For callers that sleep by other means than [`IoQueue::wait`] while nothing is under way: what to watch beside their own
    /// descriptors. `None` when there is something to look at already. After the sleep [`IoQueue::roused`] is called.
    ///
    /// # Panics
    /// When requests are under way.
    pub fn rest(&mut self) -> Option<BorrowedFd<'_>> {
        assert_eq!(self.in_flight, 0, "nothing is under way");
        self.let_go();
        let mailbox = &self.mailbox;
        mailbox.about_to_sleep().then(|| mailbox.as_fd())
    }

    /// The end of a [`IoQueue::rest`]; `called` is whether what was to be watched is readable.
    pub fn roused(&mut self, called: bool) {
        if called {
            self.mailbox.drain();
        }
        self.mailbox.awake();
    }

    /// A queue that sleeps must not keep files of layers that the disk has dropped.
    fn let_go(&mut self) {
        if self.in_flight == 0 {
            self.mailbox.answer();
        }
        self.refresh();
    }

    /// Appends finished requests to `out` and returns how many; never blocks.
    pub fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        let before = out.len();
        self.look_at_hooks();
        if self.throttled_until.is_some_and(|until| until <= Instant::now()) {
            self.start_throttled();
        }
        self.ring.reap(&mut self.moved);
        let mut moved = std::mem::take(&mut self.moved);
        for completion in moved.drain(..) {
            if completion.token == flush::TOKEN {
                self.flushed(completion.result.map(drop));
                continue;
            }
            let number = u32::try_from(completion.token).expect("a token is a slot");
            let is_whole = matches!(completion.result, Ok(moved) if moved == completion.expected);
            self.part_done(number, is_whole, out);
        }
        self.moved = moved;
        if self.mailbox.is_waiting() {
            let mut replies = std::mem::take(&mut self.replies);
            self.mailbox.take(&mut replies);
            self.at_workers -= replies.len();
            for (slot, reply) in replies.drain(..) {
                let is_part = self.slots[slot as usize].parts_left > 0;
                match reply {
                    reply if is_part => self.part_done(slot, matches!(reply, Reply::Ended(Ok(()))), out),
                    Reply::Fetched(fetched) => self.fetched(slot, fetched, out),
                    Reply::Ended(result) => out.extend(self.done_here(slot, result)),
                }
            }
            self.replies = replies;
            if !self.held.is_empty() {
                self.start_held();
            }
        }
        if self.flushes.is_wanted() {
            self.submit();
        }
        out.append(&mut self.ready);
        let count = out.len() - before;
        if count > 0
            && let Err(error) = self.layers.record()
        {
            self.fail_unrecorded(&mut out[before..], error);
        }
        self.in_flight -= count;
        count
    }

    /// Lets no request succeed that may have seen a change that the journal lacks.
    #[cold]
    fn fail_unrecorded(&self, completions: &mut [Completion], error: Error) {
        let error = self.disk.fail(error);
        for completion in completions.iter_mut().filter(|completion| completion.result.is_ok()) {
            completion.result = Err(ErrorKind::Failed { cause: error.to_string() }.into());
        }
    }

    /// A part has ended; the last one ends the request, or has a worker do all of it again.
    fn part_done(&mut self, number: u32, is_whole: bool, out: &mut Vec<Completion>) {
        let slot = &mut self.slots[number as usize];
        slot.failed |= !is_whole;
        slot.parts_left -= 1;
        if slot.parts_left > 0 {
            return;
        }
        if let Some(writing) = slot.writing.take() {
            // The layers are those that the write began on: they do not change while a writer is inside.
            self.layers.blocks.iter().for_each(|order| order.leave());
            self.writer.leave(&self.disk.write_gate, writing);
        }
        if slot.failed {
            if let Some(phase) = slot.phase.take() {
                self.member.leave(&self.disk.epochs, phase);
            }
            self.send_to_worker(number);
        } else {
            for fetch in std::mem::take(&mut slot.fetches) {
                self.views.note(&fetch);
            }
            if slot.request.as_ref().is_some_and(|request| request.op == Op::Write { fua: true }) {
                return self.flush_for(number);
            }
            out.push(self.release(number, Ok(())));
        }
    }

    /// Frees a slot.
    fn release(&mut self, number: u32, result: Result<()>) -> Completion {
        let slot = &mut self.slots[number as usize];
        let request = slot.request.take().expect("a slot in use has a request");
        if let Some(phase) = slot.phase.take() {
            self.member.leave(&self.disk.epochs, phase);
        }
        slot.holds.clear();
        self.free.push(number);
        let begun = slot.begun;
        self.end(&request, begun, result)
    }
}
