//! A [`super::Ring`] over one io_uring.
//!
//! Requests are handed to the kernel in one call. The same call that waits for completions also waits for the thread's other
//! descriptors, through polls that stay armed from one wait to the next: in the steady state a wait is one system call.
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

use io_uring::{IoUring, opcode, squeue};

use super::{Action, Job, RingCompletion};
use crate::OpenStore;
use pinned::Pins;
pub use pinned::{PinnedFile, RingFile};
use poll::{IGNORED, PollTag, Watches};
use slots::Slots;

/// See the module documentation; methods as of [`super::Ring`].
pub(super) struct Uring {
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

impl Uring {
    pub(in crate::ring) fn new(depth: u32) -> io::Result<Self> {
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

    /// Makes a ring and has it do nothing.
    ///
    /// # Errors
    /// Whatever the kernel reports: a filter may let rings be made, and not be used.
    pub(in crate::ring) fn try_out() -> io::Result<()> {
        let mut uring = IoUring::new(1)?;
        // SAFETY: a no-op has neither descriptor nor memory.
        let pushed = unsafe { uring.submission().push(&opcode::Nop::new().build()) };
        pushed.expect("the queue is empty");
        uring.submit_and_wait(1).map(drop)
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

    #[inline]
    pub(in crate::ring) fn push(&mut self, job: Job) {
        let is_apart = job.action == Action::ReadApart;
        let entry = self.slots.fill(job);
        self.queued += 1;
        self.enqueue(&if is_apart { entry.flags(squeue::Flags::ASYNC) } else { entry });
    }

    pub(in crate::ring) fn pin(&mut self, store: &OpenStore) -> Option<PinnedFile> {
        self.pins.add(&self.uring.submitter(), store)
    }

    pub(in crate::ring) fn unpin_all(&mut self) -> io::Result<()> {
        // What is queued names files by their index.
        self.submit()?;
        self.pins.clear(&self.uring.submitter());
        Ok(())
    }

    /// Puts an entry in the submission queue, making room by submitting when it is full.
    fn enqueue(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry's descriptor and memory stay valid until its completion: requests keep their store
        // and segments in a slot, polls have no memory.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.submit().expect("the kernel takes requests from a ring that it made");
        }
    }

    pub(in crate::ring) fn submit(&mut self) -> io::Result<()> {
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

    pub(in crate::ring) fn reap(&mut self, out: &mut Vec<RingCompletion>) {
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

    pub(in crate::ring) fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }
}

impl Drop for Uring {
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

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight())
            .field("ready", &self.ready.len())
            .field("watches", &self.watches)
            .finish_non_exhaustive()
    }
}
