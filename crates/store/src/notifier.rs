//! Signals events that belong to another process, and never waits for it.
//!
//! Place in the data flow: `export` tells a guest's driver of answers through an eventfd that the frontend handed over.
//!
//! A write to an eventfd waits while its counter is full, unless `O_NONBLOCK` is set. That flag belongs to the open file
//! description, so the frontend can clear it at any time, also between a look at it and the write. Hence the eventfd is never
//! written to. It is registered with an io_uring that carries out nothing but no-ops, and the kernel signals it for
//! each completion: it counts up a counter that has room, leaves a full one as it is, and wakes the poller. Where the host
//! forbids io_uring, [`aio`] has the kernel do the same.

mod aio;

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::thread;

use io_uring::{IoUring, opcode};
use parking_lot::Mutex;

use crate::io_uring_refused;
use aio::Aio;

/// See the module documentation.
pub struct EventNotifier {
    state: Mutex<State>,
}

#[expect(clippy::large_enum_variant, reason = "one for each queue, and nearly always the large one")]
enum State {
    Uring { uring: IoUring, has_event: bool },
    Aio(Aio),
}

impl EventNotifier {
    /// One without an event. Takes one or two descriptors.
    ///
    /// # Errors
    /// As [`crate::Ring::new`].
    pub fn new() -> io::Result<Self> {
        if io_uring_refused().is_some() {
            return Self::of_aio();
        }
        let uring = IoUring::builder().dontfork().build(1)?;
        Ok(Self { state: Mutex::new(State::Uring { uring, has_event: false }) })
    }

    /// One that does without io_uring.
    fn of_aio() -> io::Result<Self> {
        Ok(Self { state: Mutex::new(State::Aio(Aio::new()?)) })
    }

    /// Signals `event` from now on, or nothing. The event's file stays open without its descriptor.
    ///
    /// # Errors
    /// `EINVAL` when the descriptor is no eventfd: then nothing is signalled.
    pub fn set(&self, event: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut state = self.state.lock();
        let (uring, has_event) = match &mut *state {
            State::Uring { uring, has_event } => (uring, has_event),
            State::Aio(aio) => return aio.set(event),
        };
        if std::mem::take(has_event) {
            uring.submitter().unregister_eventfd()?;
        }
        if let Some(event) = event {
            uring.submitter().register_eventfd(event.as_raw_fd())?;
            *has_event = true;
        }
        Ok(())
    }

    /// Signals the event; `false` when there is none.
    ///
    /// # Errors
    /// What `io_uring_enter` reports and trying again does not cure.
    pub fn notify(&self) -> io::Result<bool> {
        let mut state = self.state.lock();
        let uring = match &mut *state {
            State::Uring { uring, has_event: true } => uring,
            State::Uring { .. } => return Ok(false),
            State::Aio(aio) => return aio.notify(),
        };
        // SAFETY: a no-op has neither descriptor nor memory.
        let pushed = unsafe { uring.submission().push(&opcode::Nop::new().build()) };
        // The queue is full when an error left an entry behind, which is as good as a new one.
        let _ = pushed;
        let submitted = loop {
            match uring.submit() {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is out of memory for the moment.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    thread::yield_now();
                }
                submitted => break submitted,
            }
        };
        uring.completion().for_each(drop);
        submitted.map(|_| true)
    }
}

impl fmt::Debug for EventNotifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventNotifier").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{Errno, read, write};

    use super::*;

    fn notifiers() -> [EventNotifier; 2] {
        [EventNotifier::new().unwrap(), EventNotifier::of_aio().unwrap()]
    }

    fn event(flags: EventfdFlags) -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | flags).unwrap()
    }

    fn count(event: &OwnedFd) -> Result<u64, Errno> {
        let mut count = [0; 8];
        read(event, &mut count).map(|_| u64::from_ne_bytes(count))
    }

    #[test]
    fn each_call_signals_the_event_that_is_set() {
        let (first, second) = (event(EventfdFlags::NONBLOCK), event(EventfdFlags::NONBLOCK));
        for notifier in notifiers() {
            assert!(!notifier.notify().unwrap());
            notifier.set(Some(first.as_fd())).unwrap();
            for _ in 0..5 {
                assert!(notifier.notify().unwrap());
            }
            assert_eq!(count(&first), Ok(5));
            notifier.set(Some(second.as_fd())).unwrap();
            assert!(notifier.notify().unwrap());
            assert_eq!((count(&first), count(&second)), (Err(Errno::AGAIN), Ok(1)));
            notifier.set(None).unwrap();
            assert!(!notifier.notify().unwrap());
            assert_eq!(count(&second), Err(Errno::AGAIN));
        }
    }

    #[test]
    fn a_full_event_that_blocks_is_not_waited_for() {
        for notifier in notifiers() {
            let event = event(EventfdFlags::empty());
            write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            notifier.set(Some(event.as_fd())).unwrap();
            for _ in 0..100 {
                assert!(notifier.notify().unwrap());
            }
            assert!(count(&event).is_ok());
        }
    }

    #[test]
    fn what_is_no_event_is_refused() {
        for notifier in notifiers() {
            let (reader, _writer) = io::pipe().unwrap();
            let refused = notifier.set(Some(reader.as_fd())).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
            assert!(!notifier.notify().unwrap());
        }
    }
}
