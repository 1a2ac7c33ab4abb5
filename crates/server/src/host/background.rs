//! Threads that look after a host beside its requests.

use std::thread::JoinHandle;

use crate::error::Error;

/// A thread that works until this is dropped.
pub(crate) struct Background {
    end: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Begins with `work`, which returns soon after `end` was called.
    ///
    /// # Errors
    /// No thread, for which `action` says what it was to do.
    pub(super) fn start(
        name: &str,
        action: &'static str,
        work: impl FnOnce() + Send + 'static,
        end: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        let thread = spawned.map_err(|source| Error::System { action, source })?;
        Ok(Self { end: Box::new(end), thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        (self.end)();
        if let Some(thread) = self.thread.take() {
            // A panic is in the log.
            let _ = thread.join();
        }
    }
}
