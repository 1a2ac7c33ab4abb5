//! Threads for requests that may block, and the mailboxes through which their results come back.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use smallvec::SmallVec;
use vmstrata_store::turns;

use crate::disk::Disk;
use crate::error::{IoContext as _, Result};
use crate::request::Request;
use crate::write::{TOGETHER_MAX, is_small_write};

/// A request on its way through a worker.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) disk: Arc<Disk>,
    pub(crate) request: Request,
    /// Whether the queue has parts of the request under way. It must then not wait for who changes the layers, as that one may
    /// wait for the queue; the queue sends all of it again.
    pub(crate) is_part: bool,
    /// Where the queue that sent it keeps its state.
    pub(crate) slot: u32,
    pub(crate) reply_to: Arc<Mailbox>,
}

impl Job {
    fn end(self, result: Result<()>) {
        let Self { disk, slot, reply_to, .. } = self;
        // The disk goes first: whoever reads the reply may want to be its last user.
        drop(disk);
        reply_to.post(slot, result);
    }
}

enum Work {
    CarryOut(Job),
    LetGo(Box<dyn Send>),
}

/// The threads of a process. They end when this is dropped and the jobs are done.
#[derive(Debug)]
pub(crate) struct Workers {
    jobs: Arc<Sender<Work>>,
}

impl Workers {
    /// Starts `count` threads, at least one.
    ///
    /// # Panics
    /// When the host cannot start a thread.
    pub(crate) fn new(count: usize) -> Self {
        let (jobs, queue) = crossbeam_channel::unbounded::<Work>();
        let (jobs, threads) = (Arc::new(jobs), count.max(1));
        for number in 0..threads {
            let (queue, again) = (queue.clone(), Arc::downgrade(&jobs));
            std::thread::Builder::new()
                .name(format!("worker-{number}"))
                .spawn(move || {
                    turns::answer_promptly();
                    work(&queue, &again, threads);
                })
                .expect("the host can start threads");
        }
        Self { jobs }
    }

    pub(crate) fn send(&self, job: Job) {
        self.give(Work::CarryOut(job));
    }

    /// Drops `what`, which may take long: the last to close a large file that was deleted frees its space.
    pub(crate) fn let_go(&self, what: impl Send + 'static) {
        self.give(Work::LetGo(Box::new(what)));
    }

    fn give(&self, work: Work) {
        // The work itself cannot be shown.
        assert!(self.jobs.send(work).is_ok(), "workers live as long as their sender");
    }
}

/// Carries jobs out until there is no one left to send any. What is left of a long one goes to the end of the queue, `again`.
fn work(queue: &Receiver<Work>, again: &Weak<Sender<Work>>, threads: usize) {
    let mut jobs = Vec::with_capacity(TOGETHER_MAX);
    let mut odd = None;
    while let Some(first) = odd.take().or_else(|| queue.recv().ok()) {
        match first {
            Work::LetGo(what) => drop(what),
            Work::CarryOut(job) => {
                let Some(job) = carry_out_start(job, again) else { continue };
                jobs.push(job);
                odd = gather(queue, queue.len() / threads, &mut jobs);
                carry_out(&mut jobs);
            }
        }
    }
}

/// Carries out the start of a long job, and sends the rest on its way; returns what is short enough to be carried out at once,
/// if that is left.
fn carry_out_start(mut job: Job, again: &Weak<Sender<Work>>) -> Option<Job> {
    while job.request.is_long() {
        // All of it, before any of it is carried out.
        let checked = job.disk.check(&job.request);
        if let Err(error) = checked.and_then(|()| job.disk.run(&job.request.split_front())) {
            job.end(Err(error));
            return None;
        }
        // Without it nobody can send anything that would wait.
        if let Some(again) = again.upgrade() {
            assert!(again.send(Work::CarryOut(job)).is_ok(), "this thread receives");
            return None;
        }
    }
    Some(job)
}

/// Adds up to `share` small writes to the same disk that wait to the one in `jobs`; returns what was none, if that
/// was met. A thread takes no more than its share: what waits for a slow store should wait on all threads at once.
fn gather(queue: &Receiver<Work>, share: usize, jobs: &mut Vec<Job>) -> Option<Work> {
    if !is_small_write(&jobs[0].request) {
        return None;
    }
    while jobs.len() < TOGETHER_MAX.min(1 + share) {
        match queue.try_recv().ok()? {
            Work::CarryOut(job) if is_small_write(&job.request) && Arc::ptr_eq(&job.disk, &jobs[0].disk) => {
                jobs.push(job);
            }
            other => return Some(other),
        }
    }
    None
}

fn carry_out(jobs: &mut Vec<Job>) {
    let results = {
        let requests: SmallVec<[&Request; TOGETHER_MAX]> = jobs.iter().map(|job| &job.request).collect();
        match &jobs[..] {
            [Job { disk, request, is_part: true, .. }] => vec![disk.run_once(request)],
            _ => jobs[0].disk.run_together(&requests),
        }
    };
    jobs.drain(..).zip(results).for_each(|(job, result)| job.end(result));
}

/// Results for one queue. Its descriptor is readable while results wait that were posted to a sleeping queue.
#[derive(Debug)]
pub(crate) struct Mailbox {
    results: Mutex<Vec<(u32, Result<()>)>>,
    waiting: AtomicBool,
    /// Whether the owner sleeps, or is about to.
    sleeping: AtomicBool,
    wake: OwnedFd,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(std::io::Error::from)
            .while_trying("make an event descriptor")?;
        Ok(Self {
            results: Mutex::default(),
            waiting: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            wake,
        })
    }

    fn post(&self, slot: u32, result: Result<()>) {
        self.results.lock().push((slot, result));
        self.call();
    }

    /// Has the owner look at what it waits for.
    pub(crate) fn call(&self) {
        self.waiting.store(true, Ordering::SeqCst);
        // Pairs with the fence in `about_to_sleep`: one of the two sees what the other wrote.
        fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // The counter cannot overflow, and nothing else can fail.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Whether results wait, or the owner was called.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// The owner looks at what it may have been called for; no results can wait.
    pub(crate) fn answer(&self) {
        // Whoever calls later is heard: what it changed before was not looked at yet.
        self.waiting.swap(false, Ordering::SeqCst);
    }

    /// Moves the results that wait to the end of `out`.
    pub(crate) fn take(&self, out: &mut Vec<(u32, Result<()>)>) {
        let mut results = self.results.lock();
        self.waiting.store(false, Ordering::SeqCst);
        out.append(&mut results);
    }

    /// Asks to be woken from now on; false when results wait already.
    pub(crate) fn about_to_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.is_waiting() {
            self.sleeping.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// The owner is awake.
    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Makes the descriptor unreadable again.
    pub(crate) fn drain(&self) {
        let mut count = [0; 8];
        // Empty unless someone wrote: both are fine.
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_is_let_go_is_dropped_by_a_worker() {
        struct Tell(mpsc::Sender<Option<String>>);
        impl Drop for Tell {
            fn drop(&mut self) {
                self.0.send(std::thread::current().name().map(str::to_owned)).unwrap();
            }
        }
        let (tell, told) = mpsc::channel();
        let workers = Workers::new(2);
        workers.let_go(Tell(tell));
        assert!(told.recv().unwrap().unwrap().starts_with("worker-"));
    }
}
