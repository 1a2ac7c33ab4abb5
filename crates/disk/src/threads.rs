//! Starting threads, of which the host may have no more.

use std::io;

use crate::error::{Error, Result};

/// Starts a thread that ends by itself.
///
/// # Errors
/// A host that has no more threads for this process.
pub(crate) fn start(name: impl Into<String>, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop).map_err(no_thread)
}

/// What the host said instead of starting a thread.
pub(crate) fn no_thread(source: io::Error) -> Error {
    Error::io(
        "start a thread (limits on processes or memory may be reached: ulimit -u, ulimit -v, TasksMax=, pids.max)",
        source,
    )
}
