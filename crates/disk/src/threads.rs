//! Starting threads, of which the host may have no more.

use crate::error::{Error, Result};

/// Starts a thread that ends by itself.
///
/// # Errors
/// A host that has no more threads for this process.
pub(crate) fn start(name: impl Into<String>, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop).map_err(Error::no_thread)
}
