//! Sleeping until a completion or a watched descriptor wakes the ring's thread.
//!
//! Place in the data flow: the part of [`Ring`] that [`super::poll`] keeps the books of. Polls are entries of
//! the same queues as requests, so one system call submits requests, arms polls, and waits for both.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::opcode;
use io_uring::types::{Fd, SubmitArgs, Timespec};

use super::Ring;
use super::poll::{IGNORED, PollTag};

impl Ring {
    /// Submits what is queued, then sleeps until a completion is there to reap, one of `watched` is readable (or
    /// closed by its other end, or in error), or `timeout` has passed. May wake for no reason.
    ///
    /// Returns which of `watched` are readable, a bit for each position. Readiness may be out of date: use descriptors
    /// that do not block.
    ///
    /// The ring holds on to what it watches until a `wait` is called without it, or [`Ring::unwatch`]. Before
    /// a descriptor is closed one of the two must happen: the ring knows descriptors by number, and would not
    /// see that the number means another file now.
    ///
    /// # Errors
    /// What `io_uring_enter` reports and trying again does not cure.
    ///
    /// # Panics
    /// When more than 64 descriptors are watched.
    pub fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<u64> {
        self.run_deferred();
        self.drain();
        self.arm(watched)?;
        if self.ready.is_empty() && !self.watches.any_fired() {
            self.sleep(timeout)?;
            self.drain();
        } else if self.queued > 0 {
            self.submit()?;
        }
        Ok(self.watches.take_fired())
    }

    /// Stops watching `fd`; to be called before it is closed.
    ///
    /// # Errors
    /// As [`Ring::submit`].
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let stale = self.watches.forget(fd.as_raw_fd());
        self.remove_polls(&stale)
    }

    /// Makes the watch list that of `watched`, with a poll armed for each that has not fired.
    fn arm(&mut self, watched: &[BorrowedFd<'_>]) -> io::Result<()> {
        let stale = self.watches.replace(watched);
        self.remove_polls(&stale)?;
        while let Some((fd, tag)) = self.watches.arm_next() {
            let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build();
            self.enqueue(&entry.user_data(tag.user_data()));
        }
        Ok(())
    }

    /// Removes polls at once, so that the kernel lets go of their files.
    fn remove_polls(&mut self, stale: &[PollTag]) -> io::Result<()> {
        if stale.is_empty() {
            return Ok(());
        }
        for tag in stale {
            let entry = opcode::PollRemove::new(tag.user_data()).build();
            self.enqueue(&entry.user_data(IGNORED));
        }
        self.submit()
    }

    /// One enter: submits, and waits for a completion of any kind.
    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let slept = match timeout {
            None => self.uring.submitter().submit_and_wait(1),
            Some(timeout) if self.timed_enter => {
                let timespec = Timespec::from(timeout);
                self.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timespec))
            }
            Some(timeout) => self.poll_ring(timeout),
        };
        match slept {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            Err(error) => self.recover(error),
        }
    }

    /// In place of an enter with a timeout: the ring itself can be polled.
    fn poll_ring(&mut self, timeout: Duration) -> io::Result<usize> {
        let submitted = self.uring.submitter().submit()?;
        // SAFETY: the ring, and so its descriptor, outlives this call.
        let fd = unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) };
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        let timespec = rustix::event::Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        rustix::event::poll(&mut polled, Some(&timespec))?;
        Ok(submitted)
    }
}
