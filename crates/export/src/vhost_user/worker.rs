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
//!
//! Here is the control thread's end; `orders` is what goes between, `thread` the loop.

mod orders;
mod thread;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use vmstrata_disk::{Disk, IoQueue};
use vmstrata_store::turns;

use super::Error;
use super::config::Device;
use super::queue::{QueueParts, Stopped};
use super::stats::Counters;
use orders::{Mailbox, Order};
use thread::Loop;

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
                    turns::answer_promptly();
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
