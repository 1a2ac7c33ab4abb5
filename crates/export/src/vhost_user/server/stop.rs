//! How a server ends, and who is connected until then: one lock for both, so that nobody comes in beside a decision.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::super::notify;

/// How the control thread is told to end, also in the middle of a message.
#[derive(Debug)]
pub(super) struct Stop {
    requested: AtomicBool,
    event: OwnedFd,
    connection: Mutex<Option<UnixStream>>,
    end: Mutex<End>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct End {
    requested_at: Option<Instant>,
    is_over: bool,
}

/// Says that the server has ended, when it is dropped.
pub(super) struct WhenEnded(Arc<Stop>);

impl WhenEnded {
    pub(super) fn new(stop: &Arc<Stop>) -> Self {
        Self(Arc::clone(stop))
    }
}

impl Drop for WhenEnded {
    fn drop(&mut self) {
        self.0.end.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl Stop {
    /// One that is not requested.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn new() -> io::Result<Self> {
        let event = notify::event()?;
        Ok(Self {
            requested: AtomicBool::new(false),
            event,
            connection: Mutex::default(),
            end: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Ends the connection, and lets nobody in any more.
    pub(super) fn request(&self) {
        self.note_request();
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
        self.note_request();
        true
    }

    fn note_request(&self) {
        self.requested.store(true, Ordering::Release);
        self.end.lock().requested_at.get_or_insert_with(Instant::now);
        notify::signal(&self.event);
    }

    /// Waits until the server has ended, but no longer than `limit` after that was requested first; whether it has.
    pub(super) fn wait_ended(&self, limit: Duration) -> bool {
        let mut end = self.end.lock();
        let deadline = end.requested_at.unwrap_or_else(Instant::now) + limit;
        self.changed.wait_while_until(&mut end, |end| !end.is_over, deadline);
        end.is_over
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
