//! Threads that look after a host beside its requests.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::error::Error;

/// How long to wait for a thread's end: storage that does not answer must not keep a server from ending.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// A thread that works until this is dropped.
pub(crate) struct Background {
    end: Box<dyn Fn() + Send + Sync>,
    /// Closed when the thread ends.
    ended: Receiver<()>,
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
        let (running, ended) = channel();
        let work = move || {
            let _running = running;
            work();
        };
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        spawned.map_err(|source| Error::System { action, source })?;
        Ok(Self { end: Box::new(end), ended })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        (self.end)();
        // A panic is in the log; the end closes the channel.
        let _ = self.ended.recv_timeout(END_PATIENCE);
    }
}
