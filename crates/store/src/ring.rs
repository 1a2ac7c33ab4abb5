//! Many reads and writes of raw files at a time, over one io_uring.
//!
//! Place in the data flow: every I/O thread of `disk` has one. It pushes requests for ranges of [`crate::Store`]s that
//! have a raw descriptor, hands them to the kernel in one call, and reaps completions. The same call that waits
//! for completions also waits for the thread's other descriptors (kicks, sockets), through polls that
//! stay armed from one wait to the next: in the steady state a wait is one system call.
//!
//! Invariants:
//! - A request's segments and its store stay where they are until its completion has been taken
//!   from the kernel; dropping the ring waits for all of them.
//! - Every entry's `user_data` is a slot (request), a generation (poll), or [`IGNORED`]; a completion
//!   of a generation that is not in the watch list is of a poll since removed, and is ignored.

mod pinned;
mod poll;
mod slots;
#[cfg(test)]
mod tests;
mod wait;

use std::fmt;
use std::io::{self, Write as _};
use std::thread;

use io_uring::{IoUring, squeue};
use vmstrata_types::HostOffset;

use crate::{OpenStore, SegmentVec};
use pinned::Pins;
pub use pinned::{PinnedFile, RingFile};
use poll::{IGNORED, PollTag, Watches};
use slots::{Direction, Slots};

/// A finished request.
#[derive(Debug)]
pub struct RingCompletion {
    /// As given when pushed.
    pub token: u64,
    /// Bytes moved, which may be fewer than expected: at the end of the file, or for no reason at all.
    pub result: io::Result<usize>,
    /// Bytes asked for.
    pub expected: usize,
}

/// A queue of reads and writes to raw files, for one thread at a time.
pub struct Ring {
    uring: IoUring,
    slots: Slots,
    /// Requests that the kernel may not have been handed yet.
    queued: usize,
    /// Taken from the kernel, not yet reaped.
    ready: Vec<RingCompletion>,
    watches: Watches,
    pins: Pins,
    /// Whether an enter can have a timeout (since Linux 5.11).
    timed_enter: bool,
}

impl Ring {
    /// A ring meant for up to `depth` requests at a time; more are allowed and cost memory.
    ///
    /// # Errors
    /// Whatever `io_uring_setup` reports: `ENOSYS` or `EPERM` where io_uring is switched off.
    pub fn new(depth: u32) -> io::Result<Self> {
        let entries = depth.clamp(8, 4096);
        let mut newer = IoUring::builder();
        // Completions are posted when this thread enters the kernel anyway, without interrupting it. (Deferring them
        // to its waits, as DEFER_TASKRUN does, measured the same, and would tie the ring to one thread.)
        newer.setup_coop_taskrun().setup_taskrun_flag();
        let build =
            |mut builder: io_uring::Builder| builder.setup_cqsize(entries * 4).dontfork().build(entries);
        // Before Linux 5.19 the kernel does not know these flags.
        build(newer).or_else(|_| build(IoUring::builder())).map(Self::over)
    }

    fn over(uring: IoUring) -> Self {
        let entries = uring.params().sq_entries();
        Self {
            timed_enter: uring.params().is_feature_ext_arg(),
            uring,
            slots: Slots::new(entries),
            queued: 0,
            ready: Vec::with_capacity(entries as usize),
            watches: Watches::default(),
            pins: Pins::default(),
        }
    }

    /// Queues a read of `file` at `at` into `segments`.
    ///
    /// At most 1,024 segments are used; the completion is then short.
    ///
    /// # Panics
    /// When the store has no raw descriptor, or the queue is full and the kernel refuses to take it.
    pub fn push_read(
        &mut self,
        file: impl Into<RingFile>,
        segments: SegmentVec<'static>,
        at: HostOffset,
        token: u64,
    ) {
        let entry = self.slots.fill(Direction::Read, file.into(), segments, at, token);
        self.request(&entry);
    }

    /// As [`Ring::push_read`], carried out by a thread of the kernel: for pieces of large requests. Copying those out of
    /// the page cache takes longer than handing them over, and one thread does not use all of the memory's bandwidth.
    ///
    /// # Panics
    /// As [`Ring::push_read`].
    pub fn push_read_apart(
        &mut self,
        file: impl Into<RingFile>,
        segments: SegmentVec<'static>,
        at: HostOffset,
        token: u64,
    ) {
        let entry = self.slots.fill(Direction::Read, file.into(), segments, at, token);
        self.request(&entry.flags(squeue::Flags::ASYNC));
    }

    /// Queues a write of `segments` to `file` at `at`.
    ///
    /// At most 1,024 segments are used; the completion is then short.
    ///
    /// # Panics
    /// When the store has no raw descriptor, or the queue is full and the kernel refuses to take it.
    pub fn push_write(
        &mut self,
        file: impl Into<RingFile>,
        segments: SegmentVec<'static>,
        at: HostOffset,
        token: u64,
    ) {
        let entry = self.slots.fill(Direction::Write, file.into(), segments, at, token);
        self.request(&entry);
    }

    /// Holds on to the store's file until [`Ring::unpin_all`], whoever else closes it; `None` when it cannot.
    pub fn pin(&mut self, store: &OpenStore) -> Option<PinnedFile> {
        self.pins.add(&self.uring.submitter(), store)
    }

    /// Lets go of every pinned file.
    ///
    /// # Errors
    /// As [`Ring::submit`]: the files stay pinned.
    pub fn unpin_all(&mut self) -> io::Result<()> {
        // What is queued names files by their index.
        self.submit()?;
        self.pins.clear(&self.uring.submitter());
        Ok(())
    }

    fn request(&mut self, entry: &squeue::Entry) {
        self.queued += 1;
        self.enqueue(entry);
    }

    /// Puts an entry in the submission queue, making room by submitting when it is full.
    fn enqueue(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry's descriptor and memory stay valid until its completion: requests keep their store
        // and segments in a slot, polls have no memory.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.submit().expect("the kernel takes requests from a ring that it made");
        }
    }

    /// Hands everything queued to the kernel.
    ///
    /// # Errors
    /// What `io_uring_enter` reports and trying again does not cure; what is queued stays queued.
    pub fn submit(&mut self) -> io::Result<()> {
        while !self.uring.submission().is_empty() {
            match self.uring.submitter().submit() {
                Ok(_) => {}
                Err(error) => self.recover(error)?,
            }
        }
        self.queued = 0;
        Ok(())
    }

    /// Makes a failed enter worth repeating, or gives its error back.
    fn recover(&mut self, error: io::Error) -> io::Result<()> {
        match error.raw_os_error() {
            Some(libc::EINTR) => Ok(()),
            // Completions are waiting for room (EBUSY), or the kernel for memory that they may hold (EAGAIN).
            Some(libc::EBUSY | libc::EAGAIN) => {
                self.drain();
                thread::yield_now();
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Appends finished requests to `out`; never sleeps.
    pub fn reap(&mut self, out: &mut Vec<RingCompletion>) {
        self.run_deferred();
        self.drain();
        out.append(&mut self.ready);
    }

    /// Lets the kernel post the completions that it has put off until its thread enters it.
    fn run_deferred(&mut self) {
        let queue = self.uring.submission();
        if queue.taskrun() || queue.cq_overflow() {
            drop(queue);
            // Fails only for a moment, or in a way that the next `submit` reports.
            let _ = self.uring.submitter().submit();
        }
    }

    /// Takes every completion the kernel has posted: requests into `ready`, polls into the watch list.
    fn drain(&mut self) {
        for completion in self.uring.completion() {
            let data = completion.user_data();
            if data == IGNORED {
                continue;
            }
            if let Some(tag) = PollTag::from_user_data(data) {
                self.watches.fired(tag);
                continue;
            }
            let (token, expected) = self.slots.empty(data);
            let moved = completion.result();
            let result =
                usize::try_from(moved).map_err(|_| io::Error::from_raw_os_error(moved.wrapping_neg()));
            self.ready.push(RingCompletion { token, result, expected });
        }
    }

    /// Submits everything, and waits for at least one completion.
    fn finish_some(&mut self) -> io::Result<()> {
        match self.uring.submitter().submit_and_wait(1) {
            Ok(_) => {}
            Err(error) => self.recover(error)?,
        }
        self.drain();
        Ok(())
    }

    /// Requests pushed and not yet completed, whether submitted or not; reaping lags behind.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }
}

impl Drop for Ring {
    /// Waits for everything in flight: the kernel is still using its memory. Aborts the process if it cannot,
    /// rather than let that memory be freed.
    fn drop(&mut self) {
        self.drain();
        while self.in_flight() > 0 {
            if let Err(error) = self.finish_some() {
                let waits = self.in_flight();
                let _ = writeln!(io::stderr(), "cannot wait for {waits} requests of a ring: {error}");
                std::process::abort();
            }
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("in_flight", &self.in_flight())
            .field("ready", &self.ready.len())
            .field("watches", &self.watches)
            .finish_non_exhaustive()
    }
}
