//! Sleeping until a completion or a watched descriptor wakes the ring's thread.
//!
//! Place in the data flow: the part of [`Uring`] that [`super::poll`] keeps the books of. Polls are entries of
//! the same queues as requests, so one system call submits requests, arms polls, and waits for both.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::opcode;
use io_uring::types::{Fd, SubmitArgs, Timespec};

use super::Uring;
use super::poll::{IGNORED, PollTag};

impl Uring {
    pub(in crate::ring) fn wait(
        &mut self,
        watched: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
    ) -> io::Result<u64> {
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

    pub(in crate::ring) fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
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
