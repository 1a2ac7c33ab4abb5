//! Bringing a disk to stable storage: flush, housekeeping, and a close that leaves a clean image.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use super::open::{FEATURES_SINCE, put_session, write_session};
use crate::active::Active;
use crate::epoch::thread_shard;
use crate::error::{IoContext as _, Result};
use crate::layers::{Layers, Top};
use crate::write::NotWhole;

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
        if let Err(NotWhole::Own(error)) = completed {
            return Err(self.fail_if_lost(error));
        }
        self.layers_now().commit().map_err(|error| self.fail(error))?;
        Ok(completed?)
    }

    /// Copies up all that was put off before the call, as far as what lies below can be read.
    pub(super) fn complete_all(&self) -> Result<(), NotWhole> {
        let layers = arc_swap::Guard::into_inner(self.layers_now());
        layers.complete_each(&|cluster| self.complete_one(&layers, cluster))
    }

    /// Makes a cluster of these layers' active one whole, by the layers that lie below it now.
    fn complete_one(&self, layers: &Layers, cluster: u64) -> Result<(), NotWhole> {
        // Layers that are dropped meanwhile wait for it.
        let _guard = self.epochs.guard(thread_shard());
        let now = self.layers_now();
        match (&layers.top, &now.top) {
            (Top::Qcow2(active), Top::Qcow2(top)) if Arc::ptr_eq(active, top) => now.complete_one(cluster),
            // Frozen meanwhile, and whole since then.
            _ => Ok(()),
        }
    }

    /// The clusters that are written in part, unless it is of no use now to copy up the rest.
    pub(crate) fn deferred(&self) -> Vec<u64> {
        match &self.layers_now().top {
            Top::Qcow2(active) => active.changes.partials_to_copy(),
            Top::Raw(_) | Top::Frozen => Vec::new(),
        }
    }

    /// Copies up what is missing of some of `clusters`, until a moment; returns those that are left.
    pub(crate) fn copy_up_some<'a>(&self, clusters: &'a [u64], until: Instant) -> &'a [u64] {
        let _tending = self.tending.lock();
        if self.closed.load(Ordering::Acquire) || self.failure.get().is_some() {
            return &[];
        }
        let layers = arc_swap::Guard::into_inner(self.layers_now());
        let Top::Qcow2(active) = &layers.top else { return &[] };
        let mut left = clusters;
        while let [cluster, rest @ ..] = left
            && Instant::now() < until
        {
            if let Err(why) = self.complete_one(&layers, *cluster) {
                // The next commit tries it again.
                active.partials_are_stuck(Some(&why));
                if let NotWhole::Own(error) = why {
                    self.fail_if_lost(error);
                    return &[];
                }
            }
            left = rest;
        }
        left
    }

    /// Has the host begin to write out what the active layer has grown by, once that has rested since the last call; false when it
    /// has not grown since.
    pub(crate) fn write_out(&self) -> bool {
        match &self.layers_now().top {
            Top::Qcow2(active) => active.write_out(),
            Top::Raw(_) | Top::Frozen => false,
        }
    }

    /// Commits changes that wait since `age` or longer, and gives back clusters that no one uses any more.
    pub(crate) fn tend(&self, age: Duration) {
        let _tending = self.tending.lock();
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return };
        if self.closed.load(Ordering::Acquire) || self.failure.get().is_some() {
            return;
        }
        if active.changes.waited(age) {
            // Said by whoever noticed first; what could be committed is.
            let _ = self.commit();
        }
        if self.failure.get().is_none() {
            self.reclaim(active);
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
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let _tending = self.tending.lock();
        self.epochs.synchronize();
        if self.failure.get().is_some() {
            return self.check_writable();
        }
        self.commit()?;
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return Ok(()) };
        let left = leave_clean(active, || self.epochs.synchronize());
        left.map_err(|error| self.fail(error))
    }
}

/// Ends the session on a file whose changes are all committed: stock tools find it as they leave theirs. `wait` returns once
/// no request can still see clusters that nothing leads to any more.
///
/// # Errors
/// What could not be flushed or written; the file is then as after a crash.
pub(crate) fn leave_clean(active: &Active, wait: impl FnOnce()) -> Result<()> {
    active.reclaim(wait)?;
    let leave = || -> Result<()> {
        active.alloc.release_claimed()?;
        give_back_room(active);
        // Refcounts first: whoever finds no session in the header takes them to be right.
        active.flusher.flush().while_trying("flush")?;
        if active.tables.version >= FEATURES_SINCE { write_session(active, 0) } else { Ok(()) }
    };
    leave().map_err(|error| error.in_file(&active.path))?;
    active.changes.remove_journal();
    Ok(())
}

/// As [`leave_clean`], as far as other processes see the file; [`session_ended`] brings it to stable storage. A power
/// failure in between may leak clusters that were let go of.
///
/// # Errors
/// What could not be written; the file is then as after a crash.
pub(super) fn end_session(active: &Active, wait: impl FnOnce()) -> Result<()> {
    active.reclaim(wait)?;
    let end = || -> Result<()> {
        active.alloc.release_claimed()?;
        give_back_room(active);
        if active.tables.version >= FEATURES_SINCE { put_session(active, 0) } else { Ok(()) }
    };
    end().map_err(|error| error.in_file(&active.path))
}

/// Gives back what was set aside for the file to grow into. It is right without that.
fn give_back_room(active: &Active) {
    if let Err(error) = active.store.give_back_room() {
        tracing::debug!(layer = %active.path.display(), %error, "room past the end of the file is kept");
    }
}

/// Brings the end of a session to stable storage; the journal goes.
///
/// # Errors
/// A host that cannot flush.
pub(super) fn session_ended(active: &Active) -> Result<()> {
    active.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&active.path))?;
    active.changes.remove_journal();
    Ok(())
}
