//! An NBD server: disks by name, over unix sockets and TCP, with or without TLS.
//!
//! ```text
//!   Listener ──► accept thread ──► a thread for each connection
//!                                    │ handshake   options ──► Export, Style, contexts
//!                                    │ connection  the loop around the socket
//!                                    │   session   requests ──► pieces ──► Engine (an IoQueue of its own)
//!                                    └   outgoing  pieces done ──► replies, without copying payloads
//! ```
//!
//! Speaks fixed newstyle with structured replies, extended headers, block status (`contexts`), FUA, trim,
//! write zeroes, cache, multi-conn and TLS. Everything a client can make the server hold is bounded by
//! [`Limits`] (memory by `memory`); a client that sends garbage, sends nothing, or does not read loses or blocks its own connection
//! only. Errors of a disk are told to clients as a number and logged here in full.
//!
//! Lock order: the table of exports and the registry of connections are never held together. A connection registers
//! its export and then looks whether the table still has it; [`Server::withdraw`] does the two the other way round, so
//! that one of them sees the other.

mod admission;
mod block_status;
mod buffers;
mod connection;
pub mod contexts;
mod diff_base;
mod error;
mod exports;
mod handshake;
mod limits;
mod listener;
mod memory;
mod outgoing;
mod receive;
mod registry;
mod session;
mod tls;
mod transport;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::Shutdown;
pub use vmstrata_nbd as protocol;

use self::error::End;
pub use self::error::{CredentialFault, Error, ExportFault};
pub use self::exports::{ClientRight, Export, Exports};
use self::handshake::Caller;
pub use self::limits::Limits;
pub use self::listener::{Address, DEFAULT_PORT, Listener};
use self::memory::Budget;
use self::protocol::MAX_PAYLOAD;
use self::registry::{Registry, Ticket};
pub use self::tls::{TlsConfig, TlsMode};
use self::transport::Transport;

/// How long to wait when no more connections can be accepted for want of descriptors.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A running NBD server. Dropping it stops it as [`Server::shutdown`] does.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptors: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    exports: Exports,
    tls: TlsMode,
    limits: Limits,
    connections: Arc<Registry>,
    budget: Arc<Budget>,
    /// The last connection was refused for want of room.
    is_full: AtomicBool,
    stop: AtomicBool,
    /// Readable once the server stops.
    stop_event: OwnedFd,
}

impl Server {
    /// A server that listens nowhere yet.
    ///
    /// # Errors
    /// [`Error::Start`] when the process has no descriptor left.
    pub fn new(exports: Exports, tls: TlsMode, limits: Limits) -> Result<Self, Error> {
        let stop_event =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| Error::Start { source: errno.into() })?;
        let connections = Arc::default();
        let (is_full, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        // A single client can have what the longest request needs.
        let budget = Budget::new(limits.budget_bytes.max(MAX_PAYLOAD as usize), limits.stall);
        let shared = Shared { exports, tls, limits, connections, budget, is_full, stop, stop_event };
        let shared = Arc::new(shared);
        Ok(Self { shared, acceptors: Mutex::default() })
    }

    /// Accepts connections from `listener` until the server stops.
    ///
    /// # Errors
    /// [`Error::Start`] when no thread can be started.
    pub fn listen(&self, listener: Listener) -> Result<(), Error> {
        let shared = self.shared.clone();
        let acceptor = std::thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || shared.accept_from(&listener))
            .map_err(|source| Error::Start { source })?;
        self.acceptors.lock().push(acceptor);
        Ok(())
    }

    /// The table of exports, which may be changed at any time.
    pub fn exports(&self) -> &Exports {
        &self.shared.exports
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.shared.connections.len()
    }

    /// Connections that use the export `name`. Once it is out of the table there are no more of them than this says.
    pub fn connections_of(&self, name: &str) -> usize {
        self.shared.connections.len_of(name)
    }

    /// Takes an export out of the table and ends the connections to it: what is under way is finished and answered.
    /// Clients that do not take their replies in time are cut off.
    ///
    /// No client of this server uses the disk when this returns, unless it says how many still wait for it.
    pub fn withdraw(&self, name: &str) -> usize {
        self.shared.exports.remove(name);
        self.shared.end_connections(Some(name))
    }

    /// Stops: no more connections and requests; what is under way is finished and answered; then every
    /// writable disk is flushed. Clients that do not take their replies in time are cut off.
    ///
    /// # Errors
    /// The first disk's error whose flush failed; the others were flushed all the same.
    pub fn shutdown(&self) -> Result<(), vmstrata_disk::Error> {
        self.stop();
        let mut result = Ok(());
        for export in self.shared.exports.list() {
            if !export.is_read_only() {
                result = result.and(export.disk().flush());
            }
        }
        result
    }

    /// As [`Server::shutdown`], without the flush, for disks that are closed next.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.shared.stop_event, &1u64.to_ne_bytes());
        for acceptor in self.acceptors.lock().drain(..) {
            let _ = acceptor.join();
        }
        self.shared.end_connections(None);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn accept_from(self: &Arc<Self>, listener: &Listener) {
        tracing::info!(address = %listener.address(), "NBD server listens");
        let export = Arc::new(listener.address().clone());
        loop {
            let mut ready =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.stop_event, PollFlags::IN)];
            let _ = poll(&mut ready, None);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            match listener.accept() {
                Ok(Some((socket, address))) => self.admit(socket, address, &export),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    let _ = poll(
                        &mut [PollFd::new(&self.stop_event.as_fd(), PollFlags::IN)],
                        Some(&ACCEPT_PAUSE),
                    );
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: OwnedFd, address: Option<IpAddr>, export: &Arc<Address>) {
        let socket = Arc::new(socket);
        let Some(ticket) = self.connections.admit(socket.clone(), address, &self.limits) else {
            // A crowd at the export must not fill the log: once is said for each time the house fills up.
            if !self.is_full.swap(true, Ordering::Relaxed) {
                tracing::warn!(limit = self.limits.connections, "too many connections: more are refused");
            }
            return;
        };
        self.is_full.store(false, Ordering::Relaxed);
        if let Err(error) = self.spawn(ticket, socket, Arc::clone(export)) {
            tracing::warn!(%error, "cannot start a thread for a connection");
        }
    }

    fn spawn(self: &Arc<Self>, ticket: Ticket, socket: Arc<OwnedFd>, export: Arc<Address>) -> io::Result<()> {
        let shared = self.clone();
        let thread = std::thread::Builder::new().name(format!("nbd-{}", ticket.id()));
        thread.spawn(move || {
            let connection = ticket.id();
            match shared.serve(Caller { ticket: &ticket, export: &export }, Transport::new(socket)) {
                Ok(()) | Err(End::Gone) => tracing::debug!(connection, "NBD connection closed"),
                Err(end @ End::Engine(_)) => tracing::error!(connection, %end, "NBD connection failed"),
                Err(end) => tracing::info!(connection, %end, "NBD connection ended"),
            }
            drop(ticket);
        })?;
        Ok(())
    }

    /// Ends the connections to one export, or all: first gently, then not; how many are left.
    fn end_connections(&self, name: Option<&str>) -> usize {
        let patience = self.limits.shutdown;
        let mut left = 0;
        for how in [Shutdown::Read, Shutdown::Both] {
            self.connections.shut_down(name, how);
            left = self.connections.wait_empty(name, patience);
            if left == 0 {
                return 0;
            }
        }
        tracing::warn!(left, "connections still wait for their disk");
        left
    }

    fn serve(&self, caller: Caller<'_>, mut transport: Transport) -> Result<(), End> {
        let (exports, tls) = (&self.exports, &self.tls);
        match handshake::negotiate(&mut transport, exports, tls, &self.limits, caller)? {
            None => Ok(()),
            Some(mut agreement) => {
                // Until nothing is in flight any more.
                let _writer = agreement.writer.take();
                let export = &agreement.visible.export;
                // Withdrawn while it was being chosen: the withdrawal may have missed this connection.
                if !self.exports.has(export) {
                    return Ok(());
                }
                tracing::debug!(export = export.name(), read_only = agreement.visible.read_only, style = ?agreement.style, "export chosen");
                let share = self.budget.join(transport.shared_socket())?;
                connection::serve(transport, agreement, share, &self.limits, &self.stop)
            }
        }
    }
}
