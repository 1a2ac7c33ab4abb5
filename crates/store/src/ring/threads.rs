//! A [`super::Ring`] on a host that forbids io_uring: a few threads of its own make the calls, and an eventfd tells of
//! completions.
//!
//! Threads belong to one ring, so a file whose storage hangs holds up no other ring. They begin when there is work for them.
//!
//! Invariant: the eventfd is readable exactly while there are completions that were not reaped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use super::{Action, Emulated, Job, RingCompletion, poll_with};
use crate::total_len;

/// Most threads of one ring.
const THREADS_MAX: usize = 4;

/// See the module documentation; methods as of [`super::Ring`].
#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<Shared>,
    /// Not handed over yet.
    queued: Vec<Job>,
    in_flight: usize,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when there is work, or none will come any more.
    work: Condvar,
    /// Signalled when the last request is done.
    idle: Condvar,
    done: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Jobs that a thread is busy with.
    busy: usize,
    done: Vec<RingCompletion>,
    threads: usize,
    is_closed: bool,
}

impl Job {
    fn run(&self) -> RingCompletion {
        let (store, segments) = (self.store(), self.used());
        self.ended(match self.action {
            Action::Read | Action::ReadApart => store.read_segments(segments, self.at),
            Action::Write => store.write_segments(segments, self.at).map(|()| total_len(segments)),
            Action::Flush => store.flush().map(|()| 0),
        })
    }
}

impl Threads {
    pub(super) fn new() -> io::Result<Self> {
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (state, work, idle) = (Mutex::default(), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { state, work, idle, done });
        Ok(Self { shared, queued: Vec::new(), in_flight: 0 })
    }
}

impl Emulated for Threads {
    fn push(&mut self, job: Job) {
        // As with io_uring, which uses it.
        let _ = job.store().ring_fd();
        self.queued.push(job);
        self.in_flight += 1;
    }

    fn submit(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let mut state = self.shared.state.lock();
        state.jobs.extend(self.queued.drain(..));
        while state.threads < THREADS_MAX.min(state.jobs.len() + state.busy) {
            let shared = Arc::clone(&self.shared);
            match thread::Builder::new().name("ring".into()).spawn(move || shared.work()) {
                Ok(_) => state.threads += 1,
                Err(_) => break,
            }
        }
        if state.threads == 0 {
            // The host has no thread to spare: this one does it.
            while let Some(job) = state.jobs.pop_front() {
                state.busy += 1;
                drop(state);
                let completion = job.run();
                state = self.shared.state.lock();
                self.shared.finish(&mut state, completion);
            }
        }
        drop(state);
        self.shared.work.notify_all();
    }

    fn reap(&mut self, out: &mut Vec<RingCompletion>) {
        let mut state = self.shared.state.lock();
        if state.done.is_empty() {
            return;
        }
        self.in_flight -= state.done.len();
        out.append(&mut state.done);
        // It never blocks, and is readable.
        let _ = rustix::io::read(&self.shared.done, &mut [0; 8]);
    }

    fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<u64> {
        self.submit();
        poll_with(watched, self.shared.done.as_fd(), timeout)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Threads {
    /// Waits for everything in flight: its memory is in use until then.
    fn drop(&mut self) {
        self.submit();
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        self.shared.work.notify_all();
        self.shared.idle.wait_while(&mut state, |state| state.busy > 0 || !state.jobs.is_empty());
    }
}

impl Shared {
    /// Carries requests out until the ring is dropped.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            while let Some(job) = state.jobs.pop_front() {
                state.busy += 1;
                drop(state);
                let completion = job.run();
                state = self.state.lock();
                self.finish(&mut state, completion);
            }
            if state.is_closed {
                return;
            }
            self.work.wait(&mut state);
        }
    }

    fn finish(&self, state: &mut State, completion: RingCompletion) {
        if state.done.is_empty() {
            // Full it cannot be: it is read before it is written again.
            let _ = rustix::io::write(&self.done, &1_u64.to_ne_bytes());
        }
        state.done.push(completion);
        state.busy -= 1;
        if state.busy == 0 && state.jobs.is_empty() {
            self.idle.notify_all();
        }
    }
}
