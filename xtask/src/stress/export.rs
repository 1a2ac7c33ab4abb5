//! What a worker needs of a connection, whichever kind it is.

use std::io;
use std::time::Duration;

use super::view::Sectors;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Read,
    Write,
    Trim,
    /// `unmap`: the space may be given back.
    Zero {
        unmap: bool,
    },
    Flush,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) ask: Ask,
    /// No sectors for a flush.
    pub(super) range: Sectors,
    /// Answered when it is on stable storage.
    pub(super) fua: bool,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) slot: usize,
    /// What a read found, or the error number.
    pub(super) result: Result<Vec<u8>, u32>,
}

/// A connection with requests in flight.
pub(super) trait Export: Send {
    /// Sends a request, with its data if it writes. `slot` is free, and below the depth asked for at the start.
    ///
    /// # Errors
    /// When the connection is lost.
    fn submit(&mut self, slot: usize, request: &Request, data: &[u8]) -> io::Result<()>;

    /// Waits for the next answers, for `wait` at most.
    ///
    /// # Errors
    /// When the connection is lost.
    fn replies(&mut self, wait: Duration) -> io::Result<Vec<Reply>>;

    /// Sectors of the disk, as it was when the connection was made.
    fn sectors(&self) -> u64;

    /// Whether requests may ask for FUA.
    fn has_fua(&self) -> bool;
}
