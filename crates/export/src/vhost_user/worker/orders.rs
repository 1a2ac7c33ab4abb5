//! What the control thread wants of an I/O thread, and how it gets there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

use parking_lot::Mutex;

use super::super::notify;
use super::super::queue::{QueueParts, Stopped};

/// What the control thread wants of an I/O thread.
pub(super) enum Order {
    Start(Box<QueueParts>),
    Stop { index: u16, reply: SyncSender<Stopped> },
    Exit,
}

/// Where orders wait: two for each queue at most, as the control thread waits until a queue has stopped.
#[derive(Debug)]
pub(super) struct Mailbox {
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
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { orders: Mutex::default(), pending: AtomicBool::new(false), wake: notify::event()? })
    }

    /// Leaves an order and wakes the I/O thread.
    pub(super) fn send(&self, order: Order) {
        self.orders.lock().push(order);
        self.pending.store(true, Ordering::Release);
        notify::signal(&self.wake);
    }

    /// Readable when there are orders.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Whether there may be orders.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes all orders, in the sequence they were left.
    pub(super) fn take(&self) -> Vec<Order> {
        notify::take(&self.wake);
        self.pending.swap(false, Ordering::AcqRel);
        // Whoever adds an order after this sets the flag again.
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
