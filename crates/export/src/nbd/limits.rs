//! Every bound on what a client may take, in one place.

use std::time::Duration;

/// Longest run of bytes one piece of a large request covers: pieces keep memory small and caches warm.
pub(crate) const PIECE: u64 = 512 << 10;
/// Longest run that a trim or a zeroing hands to the engine at once.
pub(crate) const SPAN: u64 = 1 << 30;
/// Longest run that is read ahead at once.
pub(crate) const PREFETCH: u64 = 4 << 20;
/// Payload taken up in one round of the loop before replies are sent: what is done then reuses warm buffers.
pub(crate) const ROUND_BYTES: usize = 1 << 20;
/// Requests shorter than this are read as they are; longer ones first ask which parts are zeros.
pub(crate) const SPARSE_READ_MIN: u64 = 64 << 10;
/// Runs of zeros shorter than this are sent as data.
pub(crate) const HOLE_MIN: u64 = 4 << 10;
/// Messages waiting to be sent before no more requests are taken up.
pub(crate) const MAX_OUTGOING: usize = 1024;
/// Payload waiting to be sent before no more requests are taken up, in bytes: reading further ahead of a client
/// would only push what it gets next out of the caches.
pub(crate) const MAX_OUTGOING_BYTES: usize = 1 << 20;
/// Bytes that a unix socket holds for a client. The system's default makes both sides sleep after each 150 KiB.
pub(crate) const SOCKET_BUFFER: usize = 2 << 20;
/// Runs of one layer looked at for one block status request.
pub(crate) const MAX_EXTENTS: usize = 8192;
/// Clusters looked at for one block status request.
pub(crate) const MAX_STATUS_CLUSTERS: u64 = 1 << 18;

/// What one server grants its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at one time. One more takes the place of one that has not chosen an export yet; without such a one it is
    /// closed as soon as it is accepted.
    pub connections: usize,
    /// Connections from one address of another host, or of this one over TCP.
    pub connections_per_address: usize,
    /// Pieces of requests one connection has in the engine at a time.
    pub requests: u32,
    /// Payload memory of one connection, in bytes; a single larger request is still served, alone.
    pub payload_bytes: usize,
    /// Payload memory of all connections, beside 2 MiB for each. Requests wait for it before their payload is read. Not less than
    /// the longest payload.
    pub budget_bytes: usize,
    /// Time in which a client must take a MiB of its replies, or all, while other clients wait for memory.
    pub stall: Duration,
    /// Time from connecting until an export is chosen.
    pub handshake: Duration,
    /// Options in one handshake.
    pub options: u32,
    /// Time that clients get to take their replies when the server stops.
    pub shutdown: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            connections_per_address: 128,
            requests: 128,
            payload_bytes: 32 << 20,
            budget_bytes: 256 << 20,
            stall: Duration::from_secs(10),
            handshake: Duration::from_secs(10),
            options: 128,
            shutdown: Duration::from_secs(5),
        }
    }
}
