//! How a server ends, and who is connected until then: one lock for both, so that nobody comes in beside a decision.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::super::notify;

/// How the control thread is told to end, also in the middle of a message.
#[derive(Debug)]
pub(super) struct Stop {
    requested: AtomicBool,
    event: OwnedFd,
    connection: Mutex<Option<UnixStream>>,
}

impl Stop {
    /// One that is not requested.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn new() -> io::Result<Self> {
        let event = notify::event()?;
        Ok(Self { requested: AtomicBool::new(false), event, connection: Mutex::default() })
    }

    /// Ends the connection, and lets nobody in any more.
    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::Release);
        notify::signal(&self.event);
        if let Some(connection) = &*self.connection.lock() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Lets nobody in any more, unless a frontend is connected: then nothing happens.
    pub(super) fn request_if_idle(&self) -> bool {
        let connection = self.connection.lock();
        if connection.is_some() {
            return false;
        }
        self.requested.store(true, Ordering::Release);
        notify::signal(&self.event);
        true
    }

    /// Makes a connection known; `false` when the server is ending.
    pub(super) fn enter(&self, stream: UnixStream) -> bool {
        let mut connection = self.connection.lock();
        if self.is_requested() {
            return false;
        }
        *connection = Some(stream);
        true
    }

    /// The connection is over.
    pub(super) fn leave(&self) {
        *self.connection.lock() = None;
    }

    /// Whether a frontend is connected.
    pub(super) fn is_connected(&self) -> bool {
        self.connection.lock().is_some()
    }

    pub(super) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_closes_because_it_is_idle_lets_nobody_in_and_a_connected_one_does_not_close() {
        let (one, other) = UnixStream::pair().unwrap();
        let stop = Stop::new().unwrap();
        assert!(stop.enter(one));
        assert!(!stop.request_if_idle() && !stop.is_requested());
        stop.leave();
        assert!(stop.request_if_idle() && stop.is_requested());
        assert!(!stop.enter(other));
    }
}
