//! Sleeping until there is something to do.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::IoQueue;

/// Descriptors a caller may watch in [`IoQueue::wait`].
pub const WATCHED_MAX: usize = 62;

impl IoQueue {
    /// Sleeps until a request has finished, one of `watched` is readable, or `timeout` has passed. May wake for no
    /// reason.
    ///
    /// Returns which of `watched` are readable, a bit for each position. Descriptors stay watched until the next
    /// call without them: make that call before closing one.
    ///
    /// # Panics
    /// When more than [`WATCHED_MAX`] descriptors are watched.
    pub fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> u64 {
        assert!(watched.len() <= WATCHED_MAX, "at most {WATCHED_MAX} descriptors can be watched");
        self.start_reads();
        self.let_go();
        let timeout = if self.ready.is_empty() && self.mailbox.about_to_sleep() {
            timeout
        } else {
            Some(Duration::ZERO)
        };
        let mailbox = Arc::clone(&self.mailbox);
        let mut all: SmallVec<[BorrowedFd<'_>; 8]> = SmallVec::from_slice(watched);
        all.push(mailbox.as_fd());
        let readable = self.ring.wait(&all, timeout).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot wait for io_uring");
            std::thread::sleep(Duration::from_millis(1));
            0
        });
        self.roused(readable >> watched.len() & 1 == 1);
        readable & ((1 << watched.len()) - 1)
    }

    /// For whoever sleeps by other means than [`IoQueue::wait`] while nothing is under way: what to watch, beside what it waits
    /// for. `None` when there is something to look at already. After the sleep [`IoQueue::roused`] is called.
    ///
    /// # Panics
    /// When requests are under way.
    pub fn rest(&mut self) -> Option<BorrowedFd<'_>> {
        assert_eq!(self.in_flight, 0, "nothing is under way");
        self.let_go();
        let mailbox = &self.mailbox;
        mailbox.about_to_sleep().then(|| mailbox.as_fd())
    }

    /// The end of a [`IoQueue::rest`]; `called` is whether what was to be watched is readable.
    pub fn roused(&mut self, called: bool) {
        if called {
            self.mailbox.drain();
        }
        self.mailbox.awake();
    }

    /// Asleep it is not to keep the files of layers that the disk has no more.
    fn let_go(&mut self) {
        if self.in_flight == 0 {
            self.mailbox.answer();
        }
        self.refresh();
    }
}
