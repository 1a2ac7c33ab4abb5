//! Who waits for a chunk of a layer, and why it cannot be had.

use std::fmt;
use std::io;
use std::time::Instant;

use vmstrata_store::Fetched;

/// Who waits for a chunk.
pub(crate) struct Waiter {
    /// When it waits no more, and why it then had to wait so long.
    pub(crate) until: Option<Instant>,
    pub(crate) late: Failure,
    pub(crate) then: Box<dyn FnOnce(io::Result<Fetched>) + Send>,
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("until", &self.until).finish_non_exhaustive()
    }
}

/// Why a chunk could not be had, for all who wait for it.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: io::ErrorKind,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(kind: io::ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    pub(crate) fn closed() -> Self {
        Self::new(io::ErrorKind::NotConnected, "the cache was closed before it came")
    }

    pub(crate) fn error(&self) -> io::Error {
        io::Error::new(self.kind, self.text.clone())
    }
}
