//! The connections of a server: counted, and reachable for the one that stops it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::net::Shutdown;

use super::exports::Export;
use super::limits::Limits;

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
    /// Of a client that came over TCP.
    address: Option<IpAddr>,
    /// What the client has chosen, once it has.
    export: Option<Arc<Export>>,
    /// It was cut off, and its thread is about to end.
    is_leaving: bool,
}

impl Open {
    /// Connections from `address`.
    fn count(&self, address: Option<IpAddr>) -> usize {
        self.places.values().filter(|place| !place.is_leaving && place.address == address).count()
    }

    /// Cuts off a client that has not chosen an export, of `address` if there is one: of the address with most such clients
    /// that which came first. `None` when all have chosen.
    fn cut_off_one(&mut self, address: Option<IpAddr>) -> Option<()> {
        let mut silent: HashMap<Option<IpAddr>, usize> = HashMap::new();
        let is_silent = |place: &Place| {
            place.export.is_none() && !place.is_leaving && (address.is_none() || place.address == address)
        };
        for place in self.places.values().filter(|place| is_silent(place)) {
            *silent.entry(place.address).or_default() += 1;
        }
        let candidates = self.places.iter_mut().filter(|(_, place)| is_silent(place));
        let (_, place) = candidates.max_by_key(|(id, place)| (silent[&place.address], Reverse(**id)))?;
        place.is_leaving = true;
        // One that its client has closed already cannot be shut down, and need not be.
        let _ = rustix::net::shutdown(&*place.socket, Shutdown::Both);
        Some(())
    }
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
    /// A place for a connection, or `None` when as many are open as `limits` allow, all by clients that have chosen their
    /// exports. One that has not is cut off: silence must not keep others out.
    pub(crate) fn admit(
        self: &Arc<Self>,
        socket: Arc<OwnedFd>,
        address: Option<IpAddr>,
        limits: &Limits,
    ) -> Option<Ticket> {
        let mut open = self.open.lock();
        if address.is_some() && open.count(address) >= limits.connections_per_address {
            open.cut_off_one(address)?;
        } else if open.places.values().filter(|place| !place.is_leaving).count() >= limits.connections {
            open.cut_off_one(None)?;
        }
        let id = open.next;
        open.next += 1;
        open.places.insert(id, Place { socket, address, export: None, is_leaving: false });
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
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn limits(connections: usize, connections_per_address: usize) -> Limits {
        Limits { connections, connections_per_address, ..Limits::default() }
    }

    /// A client's end, and the ticket for the other one.
    fn come(registry: &Arc<Registry>, address: u8, limits: &Limits) -> (UnixStream, Option<Ticket>) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let address = (address > 0).then(|| IpAddr::from([192, 0, 2, address]));
        (theirs, registry.admit(Arc::new(ours.into()), address, limits))
    }

    fn is_cut_off((theirs, _): &(UnixStream, Option<Ticket>)) -> bool {
        (&*theirs).read(&mut [0]).is_ok()
    }

    #[test]
    fn places_are_given_back() {
        let registry = Arc::new(Registry::default());
        let first = come(&registry, 0, &limits(1, 1)).1.unwrap();
        assert_eq!(registry.wait_empty(None, Duration::from_millis(1)), 1);
        assert_eq!(registry.wait_empty(Some("web"), Duration::ZERO), 0, "it has not chosen an export");
        drop(first);
        assert_eq!(registry.wait_empty(None, Duration::ZERO), 0);
        assert_eq!(come(&registry, 0, &limits(1, 1)).1.unwrap().id(), 1);
    }

    #[test]
    fn of_silent_clients_the_oldest_of_the_address_with_most_makes_room() {
        let registry = Arc::new(Registry::default());
        let few = limits(4, 3);
        let all: Vec<_> = [1, 2, 2, 1, 2, 3].map(|address| come(&registry, address, &few)).into();
        assert!(all.iter().all(|(_, ticket)| ticket.is_some()));
        let cut: Vec<_> = all.iter().map(is_cut_off).collect();
        assert_eq!(cut, [true, true, false, false, false, false]);
        assert_eq!(registry.len(), 6, "two of them are about to end");
    }

    #[test]
    fn an_address_has_so_many_places() {
        let registry = Arc::new(Registry::default());
        let few = limits(100, 2);
        let all: Vec<_> = [1, 1, 1, 2, 0, 0, 0].map(|address| come(&registry, address, &few)).into();
        let cut: Vec<_> = all.iter().map(is_cut_off).collect();
        assert_eq!(cut, [true, false, false, false, false, false, false]);
    }
}
