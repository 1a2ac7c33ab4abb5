//! A [`super::Ring`] over [`FaultStore`]s: the requests of a queue pass a [`FaultPlan`], under the same queue code as in
//! production.
//!
//! The thread that submits carries requests out, in the order in which they were pushed: the same pushes meet the same faults.
//! A request that the plan holds waits without a thread, and later ones pass it.
//!
//! Invariant: the log has a write or a flush as issued once it is submitted, and as completed once it is reaped. In between a
//! crash may lose it, as one that the kernel has.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::{Action, Emulated, Job, RingCompletion, poll_with};
use crate::fault::{Admission, FaultPlan, FaultStore, Held, OperationKind, Ticket};
use crate::{LocalFile, total_len};

/// See the module documentation; methods as of [`super::Ring`].
#[derive(Debug)]
pub(super) struct Simulated {
    plan: Arc<FaultPlan>,
    /// Not submitted yet.
    queued: Vec<Job>,
    held: Vec<(Job, Held)>,
    /// Carried out and not reaped; writes and flushes with their place in the log.
    done: Vec<(RingCompletion, Option<Ticket>)>,
    /// Readable when the plan has released what it held.
    released: Arc<OwnedFd>,
}

impl Simulated {
    pub(super) fn new(plan: &Arc<FaultPlan>) -> io::Result<Self> {
        let released = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        plan.call_when_released(&released);
        let plan = Arc::clone(plan);
        Ok(Self { plan, queued: Vec::new(), held: Vec::new(), done: Vec::new(), released })
    }

    fn run(&mut self, job: &Job, admission: Admission) {
        let (store, segments, at) = (store_of(job), job.used(), job.at + job.store().start().get());
        let (result, ticket) = match job.action {
            Action::Read | Action::ReadApart => (store.read_admitted(admission, segments, at), None),
            Action::Write => {
                let (ticket, written) = store.write_admitted(admission, segments, at);
                (written.map(|()| total_len(segments)), Some(ticket))
            }
            Action::Flush => {
                let (ticket, flushed) = store.flush_admitted(&admission);
                (flushed.map(|()| 0), Some(ticket))
            }
        };
        self.done.push((job.ended(result), ticket));
    }

    /// Carries out what was held and is not any more.
    fn run_released(&mut self) {
        // It never blocks, and is empty unless something was released.
        let _ = rustix::io::read(&self.released, &mut [0; 8]);
        let plan = Arc::clone(&self.plan);
        for (job, _) in self.held.extract_if(.., |(_, held)| plan.take_released(*held)).collect::<Vec<_>>() {
            self.run(&job, Admission::Go);
        }
    }
}

impl Emulated for Simulated {
    fn push(&mut self, job: Job) {
        // As with io_uring, at once.
        let _ = store_of(&job);
        self.queued.push(job);
    }

    fn submit(&mut self) {
        for job in std::mem::take(&mut self.queued) {
            let kind = match job.action {
                Action::Read | Action::ReadApart => OperationKind::Read,
                Action::Write => OperationKind::Write,
                Action::Flush => OperationKind::Flush,
            };
            match store_of(&job).try_admit(kind) {
                Ok(admission) => self.run(&job, admission),
                Err(held) => self.held.push((job, held)),
            }
        }
    }

    fn reap(&mut self, out: &mut Vec<RingCompletion>) {
        self.run_released();
        for (completion, ticket) in self.done.drain(..) {
            if let Some(ticket) = ticket {
                self.plan.completed(ticket, completion.result.is_ok());
            }
            out.push(completion);
        }
    }

    fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<u64> {
        self.submit();
        let timeout = if self.done.is_empty() { timeout } else { Some(Duration::ZERO) };
        poll_with(watched, self.released.as_fd(), timeout)
    }

    fn in_flight(&self) -> usize {
        self.queued.len() + self.held.len() + self.done.len()
    }
}

fn store_of(job: &Job) -> &FaultStore {
    job.store().file().and_then(LocalFile::simulated).expect("a simulated ring's files are FaultStores")
}
