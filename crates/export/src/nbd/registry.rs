//! The connections of a server: counted, and reachable for the one that stops it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::net::Shutdown;

use super::exports::Export;

/// All connections of one server.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    open: Mutex<Open>,
    closed: Condvar,
}

#[derive(Debug, Default)]
struct Open {
    places: HashMap<u64, Place>,
    next: u64,
}

#[derive(Debug)]
struct Place {
    socket: Arc<OwnedFd>,
    /// What the client has chosen, once it has.
    export: Option<Arc<Export>>,
}

impl Place {
    fn serves(&self, name: Option<&str>) -> bool {
        name.is_none_or(|name| self.export.as_ref().is_some_and(|export| export.name() == name))
    }
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
        if open.places.len() >= limit {
            return None;
        }
        let id = open.next;
        open.next += 1;
        open.places.insert(id, Place { socket, export: None });
        Some(Ticket { registry: self.clone(), id })
    }

    /// Connections open now.
    pub(crate) fn len(&self) -> usize {
        self.open.lock().places.len()
    }

    /// Connections that have chosen the export `name`.
    pub(crate) fn len_of(&self, name: &str) -> usize {
        self.open.lock().places.values().filter(|place| place.serves(Some(name))).count()
    }

    /// Shuts down one or both directions of the sockets of the export `name`, or of all, which wakes their threads.
    pub(crate) fn shut_down(&self, name: Option<&str>, how: Shutdown) {
        for place in self.open.lock().places.values().filter(|place| place.serves(name)) {
            // A socket that its client has closed already cannot be shut down, and need not be.
            let _ = rustix::net::shutdown(&*place.socket, how);
        }
    }

    /// Waits until no connection to the export `name`, or none at all, is left; how many were after `patience`.
    pub(crate) fn wait_empty(&self, name: Option<&str>, patience: Duration) -> usize {
        let deadline = Instant::now() + patience;
        let mut open = self.open.lock();
        loop {
            let left = open.places.values().filter(|place| place.serves(name)).count();
            if left == 0 || self.closed.wait_until(&mut open, deadline).timed_out() {
                return left;
            }
        }
    }
}

impl Ticket {
    /// Numbers connections for logs and thread names.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Says which export the connection is for.
    pub(crate) fn choose(&self, export: &Arc<Export>) {
        if let Some(place) = self.registry.open.lock().places.get_mut(&self.id) {
            place.export = Some(Arc::clone(export));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.registry.open.lock().places.remove(&self.id);
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
        assert_eq!(registry.wait_empty(None, Duration::from_millis(1)), 1);
        assert_eq!(registry.wait_empty(Some("web"), Duration::ZERO), 0, "it has not chosen an export");
        drop(first);
        assert_eq!(registry.wait_empty(None, Duration::ZERO), 0);
        assert_eq!(registry.admit(socket(), 1).unwrap().id(), 1);
    }
}
