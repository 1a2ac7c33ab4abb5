//! The I/O thread itself: the loop that looks at its queues, the engine and its orders, or sleeps.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use vmstrata_disk::{Completion, IoQueue};

use super::super::config::Device;
use super::super::notify;
use super::super::poller::Poller;
use super::super::queue::{Queue, QueueParts, slot_of};
use super::super::stats::Counters;
use super::WorkerOptions;
use super::orders::{Mailbox, Order};

/// How long to sleep at most when a driver without a kick descriptor expects to be polled.
const POLLED_SLEEP: Duration = Duration::from_micros(100);

/// The thread itself. `io` comes first: dropping it waits for the kernel before the rings go.
pub(super) struct Loop {
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
    pub(super) fn new(
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

    pub(super) fn run(mut self) {
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
        let mut busy = false;
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
