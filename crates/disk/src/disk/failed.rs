//! Disks that take no more writes, because nothing is known any more of what is on stable storage.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Disk;
use crate::error::{Error, ErrorKind, Result};

/// Called once with why a disk takes no more writes.
pub(super) struct WhenFailed {
    tell: Box<dyn Fn(&str) + Send + Sync>,
    is_told: AtomicBool,
}

impl WhenFailed {
    fn tell(&self, cause: &str) {
        if !self.is_told.swap(true, Ordering::AcqRel) {
            (self.tell)(cause);
        }
    }
}

impl std::fmt::Debug for WhenFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WhenFailed").field("is_told", &self.is_told).finish_non_exhaustive()
    }
}

impl Disk {
    /// Refuses writes to a disk that takes none.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::from(ErrorKind::ReadOnly).in_file(&self.path));
        }
        match self.failure.get() {
            Some(cause) => Err(Error::from(ErrorKind::Failed { cause: cause.clone() }).in_file(&self.path)),
            None => Ok(()),
        }
    }

    /// Remembers that nothing more is known of what is on stable storage: the disk takes no more writes.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let first = self.failure.set(error.to_string()).is_ok();
        if first {
            tracing::error!(disk = %self.path.display(), %error, "disk takes no more writes");
            self.tell_failed();
        }
        // What their journals lead to may never have reached the disk, copied-up bytes among it.
        self.layers_now().remove_lost_journals();
        error
    }

    /// Why the disk takes no more writes, if it does not: nothing is known any more of what is on stable storage.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Has `tell` called when the disk takes no more writes ([`Disk::failure`]); at once, if that is so already. On whatever
    /// thread finds out, and once. Only the first who asks is told.
    pub fn when_failed(&self, tell: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.on_failure.set(WhenFailed { tell: Box::new(tell), is_told: AtomicBool::new(false) });
        self.tell_failed();
    }

    fn tell_failed(&self) {
        if let (Some(cause), Some(when)) = (self.failure.get(), self.on_failure.get()) {
            when.tell(cause);
        }
    }

    /// Fails the disk after an error that it cannot go on from: what is on stable storage is unknown, or another program changed
    /// a frozen layer.
    pub(crate) fn fail_if_fatal(&self, error: Error) -> Error {
        if let Some(layer) = error.path().filter(|_| error.is_change()) {
            self.resources.doubt(layer);
        }
        let is_fatal = error.is_change() || self.layers_now().is_lost();
        if is_fatal && self.failure.get().is_none() { self.fail(error) } else { error }
    }
}
