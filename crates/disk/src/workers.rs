//! Threads for requests that may block, and the mailboxes through which their results come back.

mod lanes;

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use vmstrata_store::{Fetched, Planted};

use crate::absent::{Absent, fetch_all};
use crate::error::{IoContext as _, Result};
use crate::request::Request;
use crate::threads;
use lanes::{DiskId, Lanes};

/// What requests are carried out on: a disk.
pub(crate) trait CarryOut: Debug + Send + Sync {
    /// Refuses a request that makes no sense.
    fn check(&self, request: &Request) -> Result<()>;

    /// What a request would have to wait for, because it is elsewhere.
    fn absent(&self, request: &Request) -> Vec<Absent>;

    /// Carries a request out, blocking until it is done.
    fn run(&self, request: &Request) -> Result<()>;
}

/// What a queue hears of a request.
#[derive(Debug)]
pub(crate) enum Reply {
    /// It has ended.
    Ended(Result<()>),
    /// What it needs has come to this host, or cannot be had: the queue starts it again.
    Fetched(Result<Fetched>),
}

/// A request on its way through a worker.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) disk: Arc<dyn CarryOut>,
    pub(crate) request: Request,
    /// Where the queue that sent it keeps its state.
    pub(crate) slot: u32,
    /// Whether it waits, without a thread, for what it needs and is elsewhere.
    pub(crate) fetches: bool,
    pub(crate) reply_to: Arc<Mailbox>,
}

impl Job {
    fn carry_out(self) {
        let result = self.disk.run(&self.request);
        let planted =
            Planted::DoubledWrite.is_there().then(|| (Arc::clone(&self.disk), self.request.clone()));
        self.end(result);
        planted.map(|(disk, request)| disk.run(&request));
    }

    fn end(self, result: Result<()>) {
        let Self { disk, slot, reply_to, .. } = self;
        // The disk goes first: the reader of the reply may have to be its last user.
        drop(disk);
        reply_to.post(slot, Reply::Ended(result));
    }

    /// Lets the request wait without this thread if what it needs is elsewhere; gives it back otherwise.
    fn unless_absent(self) -> Option<Self> {
        let absent = if self.fetches { self.disk.absent(&self.request) } else { Vec::new() };
        if absent.is_empty() {
            return Some(self);
        }
        let Self { disk, slot, reply_to, .. } = self;
        drop(disk);
        fetch_all(absent, move |fetched| reply_to.post(slot, Reply::Fetched(fetched)));
        None
    }
}

/// The most threads for flushes.
const FLUSHERS_MAX: usize = 32;

enum Work {
    CarryOut(Job),
    LetGo(Box<dyn Send>),
}

/// The threads of a process, from the first [`Workers::start`] on. They end when this is dropped and the jobs are done.
///
/// Disks take turns, and none can have all threads: see [`Lanes::next`].
#[derive(Debug)]
pub(crate) struct Workers {
    queue: Arc<Queue>,
    name: &'static str,
    threads: usize,
    started: Mutex<usize>,
}

impl Workers {
    /// Threads for `count` jobs of a disk at a time, at least one, and as many again for other disks.
    pub(crate) fn new(count: usize) -> Self {
        let busy_max = count.max(1);
        Self::named("worker", busy_max, 2 * busy_max)
    }

    /// Threads that wait for storage, one for each of so many disks: those that flush at the same time can share a sync then.
    pub(crate) fn for_flushes(workers: usize) -> Self {
        Self::named("flush", 1, (8 * workers).clamp(1, FLUSHERS_MAX))
    }

    fn named(name: &'static str, busy_max: usize, threads: usize) -> Self {
        let lanes = Mutex::new(Lanes::new(busy_max, threads));
        let queue = Arc::new(Queue { lanes, changed: Condvar::new() });
        Self { queue, name, threads, started: Mutex::new(0) }
    }

    /// Starts the threads that have not begun: who only opens disks needs none.
    ///
    /// # Errors
    /// A host that cannot start them.
    pub(crate) fn start(&self) -> Result<()> {
        let mut started = self.started.lock();
        while *started < self.threads {
            let queue = Arc::clone(&self.queue);
            threads::start(format!("{}-{started}", self.name), move || queue.work())?;
            *started += 1;
        }
        Ok(())
    }

    pub(crate) fn send(&self, job: Job) {
        self.queue.lanes.lock().add(DiskId::of(&job.disk), Work::CarryOut(job));
        self.queue.changed.notify_one();
    }

    /// Drops `what`, which may take long: the last to close a large file that was deleted frees its space.
    pub(crate) fn let_go(&self, what: impl Send + 'static) {
        self.queue.lanes.lock().add(DiskId::NONE, Work::LetGo(Box::new(what)));
        self.queue.changed.notify_one();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.lanes.lock().is_open = false;
        self.queue.changed.notify_all();
    }
}

/// What the threads share.
struct Queue {
    lanes: Mutex<Lanes>,
    /// Signalled when there may be work for one more thread.
    changed: Condvar,
}

impl Queue {
    /// Carries jobs out until there is no one left to send any.
    fn work(&self) {
        while let Some((disk, work)) = self.take() {
            match work {
                Work::LetGo(what) => drop(what),
                Work::CarryOut(job) => {
                    let job = job.unless_absent().and_then(|job| self.carry_out_start(disk, job));
                    if let Some(job) = job {
                        job.carry_out();
                    }
                }
            }
            self.lanes.lock().done(disk);
        }
        // The others may have waited for the last job.
        self.changed.notify_all();
    }

    /// Waits for work; `None` when there will be no more.
    fn take(&self) -> Option<(DiskId, Work)> {
        let mut lanes = self.lanes.lock();
        loop {
            if let Some(taken) = lanes.take() {
                if lanes.next().is_some() {
                    self.changed.notify_one();
                }
                return Some(taken);
            }
            if lanes.is_done() {
                return None;
            }
            self.changed.wait(&mut lanes);
        }
    }

    /// Carries out the start of a long job, and sends the rest on its way, to the end of the queue; returns what is short
    /// enough to be carried out at once, if that is left.
    fn carry_out_start(&self, disk: DiskId, mut job: Job) -> Option<Job> {
        while job.request.is_long() {
            // All of it, before any of it is carried out.
            let checked = job.disk.check(&job.request);
            if let Err(error) = checked.and_then(|()| job.disk.run(&job.request.split_front())) {
                job.end(Err(error));
                return None;
            }
            let mut lanes = self.lanes.lock();
            // Without anybody who can send something that would wait, it is carried out here.
            if lanes.is_open {
                lanes.add(disk, Work::CarryOut(job));
                return None;
            }
        }
        Some(job)
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

/// Results for one queue. Its descriptor is readable while results wait that were posted to a sleeping queue.
#[derive(Debug)]
pub(crate) struct Mailbox {
    results: Mutex<Vec<(u32, Reply)>>,
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

    /// Answers for the request in `slot`.
    pub(crate) fn post(&self, slot: u32, reply: Reply) {
        self.results.lock().push((slot, reply));
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
        // A later call is heard: what its caller changed was not looked at yet.
        self.waiting.swap(false, Ordering::SeqCst);
    }

    /// Moves the results that wait to the end of `out`.
    pub(crate) fn take(&self, out: &mut Vec<(u32, Reply)>) {
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
    use std::sync::{Barrier, mpsc};

    use vmstrata_store::SegmentVec;
    use vmstrata_types::{GuestOffset, GuestRange};

    use super::*;
    use crate::request::Op;

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
        workers.start().unwrap();
        workers.let_go(Tell(tell));
        assert!(told.recv().unwrap().unwrap().starts_with("worker-"));
    }
    /// Each waits until all are there: with fewer threads none would end.
    #[test]
    fn more_disks_flush_at_a_time_than_there_are_workers() {
        #[derive(Debug)]
        struct Meets(Arc<Barrier>);
        impl CarryOut for Meets {
            fn check(&self, _: &Request) -> Result<()> {
                Ok(())
            }
            fn absent(&self, _: &Request) -> Vec<Absent> {
                Vec::new()
            }
            fn run(&self, _: &Request) -> Result<()> {
                self.0.wait();
                Ok(())
            }
        }
        let (disks, all) = (8, Arc::new(Barrier::new(8)));
        let flushers = Workers::for_flushes(1);
        flushers.start().unwrap();
        let mailbox = Arc::new(Mailbox::new().unwrap());
        for slot in 0..disks {
            let disk: Arc<dyn CarryOut> = Arc::new(Meets(Arc::clone(&all)));
            let range = GuestRange::new(GuestOffset::ZERO, 0);
            let request = Request { op: Op::Flush, range, segments: SegmentVec::new(), token: 0 };
            flushers.send(Job { disk, request, slot, fetches: false, reply_to: Arc::clone(&mailbox) });
        }
        let mut replies = Vec::new();
        while replies.len() < disks as usize {
            mailbox.take(&mut replies);
            std::thread::yield_now();
        }
    }
}
