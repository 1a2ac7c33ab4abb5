//! An I/O thread: owns some queues of a device and one [`IoQueue`], and moves requests between them.
//!
//! ```text
//!   loop:  orders from the control thread
//!          take from every ring ─► one submit ─► reap ─► answer ─► publish and call, once a ring
//!          nothing to do? look again for a while, then ask for kicks and sleep
//! ```
//!
//! A queue belongs to exactly one thread, so nothing on this path is locked. The control thread changes a
//! queue only by stopping it here first; stopping waits until everything in flight is answered.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;
use vmstrata_disk::{Completion, Disk, IoQueue};

use super::config::Device;
use super::poller::Poller;
use super::queue::{Queue, QueueParts, Stopped, slot_of};
use super::stats::Counters;
use super::{Error, notify};

/// How I/O threads work.
#[derive(Clone, Debug)]
pub(super) struct WorkerOptions {
    pub(super) name: String,
    /// Queues one thread may have to serve.
    pub(super) slots: usize,
    /// Requests in flight on one thread.
    pub(super) depth: u32,
    pub(super) poll: Duration,
}

/// The control thread's end of an I/O thread.
#[derive(Debug)]
pub(super) struct Worker {
    mailbox: Arc<Mailbox>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread for `device` on `disk`.
    ///
    /// # Errors
    /// When the thread or its ring cannot be made.
    pub(super) fn spawn(
        disk: Arc<Disk>,
        device: Arc<Device>,
        options: &WorkerOptions,
    ) -> Result<Self, Error> {
        let mailbox = Arc::new(Mailbox::new().map_err(Error::Thread)?);
        let counters = Arc::new(Counters::default());
        let (ready, started) = sync_channel(1);
        let thread = {
            let (mailbox, counters) = (Arc::clone(&mailbox), Arc::clone(&counters));
            let (name, options) = (options.name.clone(), options.clone());
            let body = move || match IoQueue::new(disk, options.depth) {
                Ok(io) => {
                    let _ = ready.send(Ok(()));
                    Loop::new(io, device, mailbox, counters, &options).run();
                }
                Err(error) => {
                    let _ = ready.send(Err(Error::Disk(error)));
                }
            };
            std::thread::Builder::new().name(name).spawn(body).map_err(Error::Thread)?
        };
        started.recv().expect("the thread reports before it ends")?;
        Ok(Self { mailbox, counters, thread: Some(thread) })
    }

    /// Hands a queue over; it runs at once.
    pub(super) fn start(&self, parts: QueueParts) {
        self.mailbox.send(Order::Start(Box::new(parts)));
    }

    /// Stops a queue and waits until everything it had in flight is answered.
    ///
    /// # Panics
    /// When the thread has panicked.
    pub(super) fn stop(&self, index: u16) -> Stopped {
        let (reply, stopped): (_, Receiver<Stopped>) = sync_channel(1);
        self.mailbox.send(Order::Stop { index, reply });
        stopped.recv().expect("the I/O thread runs until told to exit")
    }

    pub(super) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.mailbox.send(Order::Exit);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("an I/O thread panicked");
        }
    }
}

/// What the control thread wants of an I/O thread.
enum Order {
    Start(Box<QueueParts>),
    Stop { index: u16, reply: SyncSender<Stopped> },
    Exit,
}

/// Where orders wait: two for each queue at most, as the control thread waits until a queue has stopped.
#[derive(Debug)]
struct Mailbox {
    orders: Mutex<Vec<Order>>,
    /// Looked at in every round, so that the lock need not be.
    pending: AtomicBool,
    wake: OwnedFd,
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// When its wake-up descriptor cannot be made.
    fn new() -> std::io::Result<Self> {
        Ok(Self { orders: Mutex::default(), pending: AtomicBool::new(false), wake: notify::event()? })
    }

    /// Leaves an order and wakes the I/O thread.
    fn send(&self, order: Order) {
        self.orders.lock().push(order);
        self.pending.store(true, Ordering::Release);
        notify::signal(&self.wake);
    }

    /// Readable when there are orders.
    fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Whether there may be orders.
    #[inline]
    fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// The I/O thread was woken. Not when it takes orders: it may see one before it is signalled.
    fn woken(&self) {
        notify::take(&self.wake);
    }

    /// Takes all orders, in the sequence they were left.
    fn take(&self) -> Vec<Order> {
        self.pending.swap(false, Ordering::AcqRel);
        // A later order sets the flag again.
        std::mem::take(&mut *self.orders.lock())
    }
}

impl std::fmt::Debug for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Start(parts) => write!(f, "Start({})", parts.index),
            Self::Stop { index, .. } => write!(f, "Stop({index})"),
            Self::Exit => write!(f, "Exit"),
        }
    }
}

/// How long to sleep at most when a driver without a kick descriptor expects to be polled.
const POLLED_SLEEP: Duration = Duration::from_micros(100);

/// The thread itself. `io` comes first: dropping it waits for the kernel before the rings go.
struct Loop {
    io: IoQueue,
    slots: Vec<Option<Queue>>,
    device: Arc<Device>,
    mailbox: Arc<Mailbox>,
    counters: Arc<Counters>,
    poller: Poller,
    completions: Vec<Completion>,
    stopping: bool,
    looking: bool,
}

impl Loop {
    fn new(
        io: IoQueue,
        device: Arc<Device>,
        mailbox: Arc<Mailbox>,
        counters: Arc<Counters>,
        options: &WorkerOptions,
    ) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            io,
            slots: (0..options.slots).map(|_| None).collect(),
            device,
            mailbox,
            counters,
            poller: Poller::new(options.poll, processors),
            completions: Vec::with_capacity(options.depth as usize),
            stopping: false,
            looking: false,
        }
    }

    fn run(mut self) {
        loop {
            if self.mailbox.is_pending() && self.take_orders().is_break() {
                return;
            }
            if self.round() {
                self.note_work();
            } else if self.io.at_others() == 0 && self.poller.look_again() {
                self.looking = true;
            } else {
                self.looking = false;
                self.sleep();
            }
        }
    }

    #[inline]
    fn note_work(&mut self) {
        if std::mem::take(&mut self.looking) {
            self.counters.polls.add(1);
        }
        self.poller.worked();
    }

    /// One look at everything; whether there was something to do.
    #[inline]
    fn round(&mut self) -> bool {
        let mut taken = 0;
        for queue in self.slots.iter_mut().flatten() {
            taken += queue.take(&mut self.io, &self.counters);
        }
        if taken > 0 {
            self.io.submit();
        }
        let reaped = if self.io.in_flight() > 0 { self.io.reap(&mut self.completions) } else { 0 };
        for completion in self.completions.drain(..) {
            let queue = self.slots[slot_of(&completion)].as_mut().expect("a queue stays until it is drained");
            queue.complete(&completion, &self.counters);
        }
        if taken > 0 || reaped > 0 {
            for queue in self.slots.iter_mut().flatten() {
                queue.publish(&self.counters);
            }
        }
        if self.stopping {
            self.finish_stops();
        }
        taken > 0 || reaped > 0
    }

    fn finish_stops(&mut self) {
        // Taken out first, closed last: the engine's ring must not watch a descriptor that is closed, whose
        // number the next one may get.
        let mut gone: SmallVec<[Queue; 4]> = SmallVec::new();
        for slot in &mut self.slots {
            if slot.as_ref().is_some_and(Queue::is_drained) {
                gone.extend(slot.take());
            }
        }
        if gone.is_empty() {
            return;
        }
        self.watch(Some(Duration::ZERO));
        gone.into_iter().for_each(Queue::finish_stop);
        self.stopping = self.slots.iter().flatten().any(Queue::is_stopping);
    }

    fn take_orders(&mut self) -> std::ops::ControlFlow<()> {
        for order in self.mailbox.take() {
            match order {
                Order::Start(parts) => self.start(*parts),
                Order::Stop { index, reply } => {
                    let queue = self.queue(index).expect("only a running queue is stopped");
                    queue.begin_stop(reply);
                    self.stopping = true;
                    // The frontend waits for the reply, and may stand still until it comes.
                    self.io.start_all_throttled();
                }
                Order::Exit => return std::ops::ControlFlow::Break(()),
            }
        }
        std::ops::ControlFlow::Continue(())
    }

    fn start(&mut self, parts: QueueParts) {
        let slot = self.slots.iter().position(Option::is_none).expect("as many slots as queues");
        self.slots[slot] = Some(Queue::new(parts, Arc::clone(&self.device), slot));
    }

    fn queue(&mut self, index: u16) -> Option<&mut Queue> {
        self.slots.iter_mut().flatten().find(|queue| queue.index() == index)
    }

    /// Sleeps until a kick, a completion or an order.
    fn sleep(&mut self) {
        // A stop that ended in this round may have taken the wake-up of an order.
        let mut busy = self.mailbox.is_pending();
        for queue in self.slots.iter_mut().flatten() {
            busy |= queue.prepare_sleep();
        }
        if !busy {
            self.wait();
        }
        self.slots.iter_mut().flatten().for_each(Queue::woke);
    }

    fn wait(&mut self) {
        let polled = self.slots.iter().flatten().any(Queue::is_polled);
        let began = Instant::now();
        let kicked = self.watch(polled.then_some(POLLED_SLEEP));
        self.poller.slept(began.elapsed());
        self.counters.sleeps.add(1);
        kicked.into_iter().for_each(|slot| self.kicked(slot));
    }

    /// Waits for orders, kicks and completions; returns the slots that were kicked.
    fn watch(&mut self, timeout: Option<Duration>) -> SmallVec<[usize; 16]> {
        let mut watched: SmallVec<[BorrowedFd<'_>; 16]> = SmallVec::new();
        let mut owners: SmallVec<[usize; 16]> = SmallVec::new();
        watched.push(self.mailbox.wake());
        for (slot, queue) in self.slots.iter().enumerate() {
            if let Some(kick) = queue.as_ref().and_then(Queue::kick) {
                watched.push(kick.as_fd());
                owners.push(slot);
            }
        }
        let ready = self.io.wait(&watched, timeout);
        // Bit 0 is the mailbox.
        if ready & 1 == 1 {
            self.mailbox.woken();
        }
        owners.into_iter().zip(1..).filter(|(_, bit)| ready >> bit & 1 == 1).map(|(slot, _)| slot).collect()
    }

    fn kicked(&mut self, slot: usize) {
        self.counters.kicks.add(1);
        let Some(queue) = &mut self.slots[slot] else { return };
        if !queue.kick().is_some_and(notify::take_theirs) {
            tracing::error!(queue = queue.index(), "queue stopped: its kick descriptor is no event");
            queue.break_kick();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use vmstrata_disk::{CreateOptions, OpenOptions, ResourceOptions, Resources, create};

    use super::super::config::DeviceParts;
    use super::*;

    /// As where the thread took the order before the event was signalled. It must not wake for it again and again.
    #[test]
    fn an_event_without_an_order_wakes_a_thread_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        create(&path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
        let disk =
            Disk::open(&path, &OpenOptions::default(), &Resources::new(ResourceOptions::default())).unwrap();
        let (disk_bytes, cluster_bits) = (disk.size(), disk.cluster_bits());
        let parts = DeviceParts { disk_bytes, cluster_bits, read_only: false, queues: 1, serial: "" };
        let options = WorkerOptions { name: "io".into(), slots: 1, depth: 8, poll: Duration::ZERO };
        let worker = Worker::spawn(disk, Arc::new(Device::new(&parts)), &options).unwrap();
        notify::signal(&worker.mailbox.wake);
        let is_taken = || {
            let mut wake = [PollFd::new(&worker.mailbox.wake, PollFlags::IN)];
            poll(&mut wake, Some(&Timespec::default())).unwrap() == 0
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_taken() {
            assert!(Instant::now() < deadline, "the thread wakes for it still");
            std::thread::yield_now();
        }
    }
}
