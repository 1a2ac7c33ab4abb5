//! Bringing a disk to stable storage: flush, housekeeping, and a close that leaves a clean image.

use std::sync::Arc;

use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use super::state::Service;
use crate::active::Active;
use crate::active::session::leave_clean;
use crate::error::{Error, ErrorKind, Result};
use crate::layers::{Layers, Top};
use crate::write::Incomplete;

impl Disk {
    /// Brings everything written before the call to stable storage, with the tables that lead to it.
    ///
    /// # Errors
    /// A host that cannot flush or write: the disk then takes no more writes. A layer that cannot be read below a cluster that
    /// was written in part: all else is on stable storage, and it can be tried again.
    pub fn flush(&self) -> Result<()> {
        self.check_range(GuestRange::new(GuestOffset::ZERO, 0))?;
        if self.is_read_only() {
            return Ok(());
        }
        self.check_writable()?;
        self.commit()
    }

    /// As [`Disk::flush`], checked. What cannot be copied up, because what lies below it cannot be read, stays in memory and in
    /// the journal; all else is on stable storage even then.
    pub(super) fn commit(&self) -> Result<()> {
        let completed = self.complete_all();
        if let Err(Incomplete::Own(error)) = completed {
            return Err(self.fail_if_fatal(error));
        }
        self.layers_now().commit().map_err(|error| self.fail(error))?;
        completed.map_err(|why| self.fail_if_fatal(why.into()))
    }

    /// Copies up all that was put off before the call, as far as what lies below can be read.
    pub(super) fn complete_all(&self) -> Result<(), Incomplete> {
        let layers = arc_swap::Guard::into_inner(self.layers_now());
        layers.complete_each(&|cluster| self.complete_one(&layers, cluster))
    }

    /// Makes a cluster of these layers' active one whole, by the layers that lie below it now.
    pub(super) fn complete_one(&self, layers: &Layers, cluster: u64) -> Result<(), Incomplete> {
        // Layers that are dropped meanwhile wait for it.
        let _guard = self.epochs.guard();
        let now = self.layers_now();
        match (&layers.top, &now.top) {
            (Top::Qcow2(active), Top::Qcow2(top)) if Arc::ptr_eq(active, top) => now.complete_one(cluster),
            // Frozen meanwhile, and whole since then.
            _ => Ok(()),
        }
    }

    /// Gives back clusters that nothing leads to any more, once no request can still see them.
    pub(super) fn reclaim(&self, active: &Active) {
        if let Err(error) = active.reclaim(|| self.epochs.synchronize()) {
            tracing::warn!(disk = %self.path.display(), %error, "cannot free clusters: they are leaked until `vmstrata check --repair=leaks`");
        }
    }

    /// Ends the disk: waits for requests under way, flushes, and leaves an image that stock tools find clean.
    ///
    /// Later requests fail; a second call does nothing.
    ///
    /// # Errors
    /// What could not be flushed, copied up or written; the image is then as after a killed process, and whoever opens it next
    /// finds everything.
    pub fn close(&self) -> Result<()> {
        let _changing = self.change();
        let before = self.state.close();
        // Requests that wait for a resume are refused.
        self.resume();
        let _tending = self.tending.lock();
        self.epochs.synchronize();
        match (before, self.failure()) {
            (Service::Closed, _) => return Ok(()),
            (Service::Failed, Some(cause)) if !self.is_read_only() => {
                return Err(Error::from(ErrorKind::Failed { cause }).in_file(&self.path));
            }
            _ => {}
        }
        self.commit()?;
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return Ok(()) };
        let left = leave_clean(active, || self.epochs.synchronize());
        left.map_err(|error| self.fail(error))
    }
}
