//! The connections of a server: counted, and reachable for the one that stops it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::net::Shutdown;

/// All connections of one server.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    open: Mutex<Open>,
    closed: Condvar,
}

#[derive(Debug, Default)]
struct Open {
    sockets: HashMap<u64, Arc<OwnedFd>>,
    next: u64,
}

/// A connection's place; dropping it says that the connection is over.
#[derive(Debug)]
pub(crate) struct Ticket {
    registry: Arc<Registry>,
    id: u64,
}

impl Registry {
    /// A place for a connection, or `None` when `limit` of them are open.
    pub(crate) fn admit(self: &Arc<Self>, socket: Arc<OwnedFd>, limit: usize) -> Option<Ticket> {
        let mut open = self.open.lock();
        if open.sockets.len() >= limit {
            return None;
        }
        let id = open.next;
        open.next += 1;
        open.sockets.insert(id, socket);
        Some(Ticket { registry: self.clone(), id })
    }

    /// Connections open now.
    pub(crate) fn len(&self) -> usize {
        self.open.lock().sockets.len()
    }

    /// Shuts down one or both directions of every socket, which wakes its thread.
    pub(crate) fn shut_down(&self, how: Shutdown) {
        for socket in self.open.lock().sockets.values() {
            // A socket that its client has closed already cannot be shut down, and need not be.
            let _ = rustix::net::shutdown(&**socket, how);
        }
    }

    /// Waits until no connection is left; `false` when some were after `patience`.
    pub(crate) fn wait_empty(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut open = self.open.lock();
        while !open.sockets.is_empty() {
            if self.closed.wait_until(&mut open, deadline).timed_out() {
                return open.sockets.is_empty();
            }
        }
        true
    }
}

impl Ticket {
    /// Numbers connections for logs and thread names.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.registry.open.lock().sockets.remove(&self.id);
        self.registry.closed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn places_are_limited_and_given_back() {
        let registry = Arc::new(Registry::default());
        let socket = || Arc::new(OwnedFd::from(UnixStream::pair().unwrap().0));
        let first = registry.admit(socket(), 1).unwrap();
        assert!(registry.admit(socket(), 1).is_none());
        assert!(!registry.wait_empty(Duration::from_millis(1)));
        drop(first);
        assert!(registry.wait_empty(Duration::ZERO));
        assert_eq!(registry.admit(socket(), 1).unwrap().id(), 1);
    }
}
