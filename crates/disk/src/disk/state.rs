//! What a disk is doing: whether it serves requests, and what changes its layers.
//!
//! ```text
//!   open ──► failed: reads alone ──► closed: nothing
//!
//!   idle ──► held, by a snapshot ──► pending ──► finalizing ──► idle
//!    └─────► held, by a resize, a step of a merge, or a close ──► idle
//! ```
//!
//! A merge goes on while snapshots are taken, and holds the layers only for its steps.
//!
//! Lock order: a [`Changing`] is taken before [`Disk::tending`]; the lock in here is held for moments only.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::{Condvar, Mutex};

use super::Disk;
use super::finalize::PendingFinalize;
use crate::error::{Error, ErrorKind, Result};

/// Whether a disk serves requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Service {
    Open,
    /// It takes no more writes.
    Failed,
    Closed,
}

/// What changes the layers.
#[derive(Debug, Default)]
enum Change {
    #[default]
    Nothing,
    Held,
    /// The last snapshot is to be finalized first.
    Pending(PendingFinalize),
    Finalizing,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct State {
    /// A [`Service`]; every request looks at it.
    service: AtomicU8,
    doing: Mutex<Doing>,
    /// Signalled when nothing holds the layers any more.
    released: Condvar,
}

/// Told once why the disk has failed.
type WhenFailed = Box<dyn FnOnce(&str) + Send>;

#[derive(Default)]
struct Doing {
    /// Why the disk has failed.
    failure: Option<String>,
    when_failed: Option<WhenFailed>,
    change: Change,
    is_merging: bool,
}

impl std::fmt::Debug for Doing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { failure, change, is_merging, .. } = self;
        f.debug_struct("Doing")
            .field("failure", failure)
            .field("change", change)
            .field("is_merging", is_merging)
            .finish_non_exhaustive()
    }
}

/// Keeps others from changing the layers until it is dropped.
#[derive(Debug)]
pub(super) struct Changing<'a> {
    state: &'a State,
    /// A snapshot that was taken meanwhile.
    pub(super) pending: Option<PendingFinalize>,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.state.doing.lock().change = self.pending.take().map_or(Change::Nothing, Change::Pending);
        self.state.released.notify_all();
    }
}

impl State {
    #[inline]
    pub(super) fn service(&self) -> Service {
        match self.service.load(Ordering::Acquire) {
            0 => Service::Open,
            1 => Service::Failed,
            _ => Service::Closed,
        }
    }

    /// Refuses requests from now on; returns what was so far.
    pub(super) fn close(&self) -> Service {
        let before = self.service();
        self.service.store(Service::Closed as u8, Ordering::Release);
        before
    }

    /// Waits for the layers; with them comes the snapshot that is to be finalized first.
    fn hold(&self) -> (Changing<'_>, Option<PendingFinalize>) {
        let mut doing = self.doing.lock();
        while matches!(doing.change, Change::Held | Change::Finalizing) {
            self.released.wait(&mut doing);
        }
        let pending = match std::mem::replace(&mut doing.change, Change::Held) {
            Change::Pending(pending) => {
                doing.change = Change::Finalizing;
                Some(pending)
            }
            _ => None,
        };
        (Changing { state: self, pending: None }, pending)
    }

    pub(super) fn is_finalizing(&self) -> bool {
        matches!(self.doing.lock().change, Change::Pending(_) | Change::Finalizing)
    }

    pub(super) fn is_merging(&self) -> bool {
        self.doing.lock().is_merging
    }

    /// Begins a merge, or ends it; returns whether there was one.
    pub(super) fn set_merging(&self, is_merging: bool) -> bool {
        std::mem::replace(&mut self.doing.lock().is_merging, is_merging)
    }
}

impl Disk {
    /// Finalizes the last snapshot, if it is not ([`crate::snapshot_together`]). What changes the disk's layers next does so
    /// otherwise, first of all.
    ///
    /// # Errors
    /// A host that cannot flush: the disk takes no more writes. A layer that was replaced: it goes without an index. What
    /// failed is counted and not tried again.
    pub fn finalize(&self) -> Result<()> {
        let (_changing, pending) = self.state.hold();
        pending.map_or(Ok(()), |pending| self.finalize_pending(&pending))
    }

    /// Keeps others from changing the layers. The last snapshot is finalized by then; if that failed, it was counted.
    pub(super) fn change(&self) -> Changing<'_> {
        let (changing, pending) = self.state.hold();
        if let Some(pending) = pending {
            let _ = self.finalize_pending(&pending);
            self.state.doing.lock().change = Change::Held;
        }
        changing
    }

    /// Whether the last snapshot is not finalized yet.
    pub fn is_finalizing(&self) -> bool {
        self.state.is_finalizing()
    }

    /// Refuses writes to a disk that takes none.
    pub(crate) fn check_writable(&self) -> Result<()> {
        let refusal = match self.state.service() {
            _ if self.is_read_only() => ErrorKind::ReadOnly,
            Service::Open | Service::Closed => return Ok(()),
            Service::Failed => ErrorKind::Failed { cause: self.failure().unwrap_or_default() },
        };
        Err(Error::from(refusal).in_file(self.path()))
    }

    /// Fails the disk: it takes no more writes. Returns the error.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.refuse_writes(&error.to_string());
        // What their journals lead to may never have reached the disk, copied-up bytes among it.
        self.layers_now().remove_lost_journals();
        error
    }

    /// Has the disk take no more writes, for `cause`. The first cause counts.
    pub fn refuse_writes(&self, cause: &str) {
        let mut doing = self.state.doing.lock();
        if doing.failure.is_some() {
            return;
        }
        doing.failure = Some(cause.to_owned());
        let (open, failed) = (Service::Open as u8, Service::Failed as u8);
        let _ = self.state.service.compare_exchange(open, failed, Ordering::AcqRel, Ordering::Acquire);
        let tell = doing.when_failed.take();
        drop(doing);
        tracing::error!(disk = %self.path().display(), error = cause, "the disk has failed: it takes no more writes");
        tell.into_iter().for_each(|tell| tell(cause));
    }

    /// Fails the disk after an error that it cannot go on from: what is on stable storage is unknown, or another program changed
    /// a frozen layer.
    pub(crate) fn fail_if_fatal(&self, error: Error) -> Error {
        if let Some(layer) = error.path().filter(|_| error.is_change()) {
            self.resources.doubt(layer);
        }
        let is_fatal = error.is_change() || self.layers_now().is_lost();
        if is_fatal && self.state.service() == Service::Open { self.fail(error) } else { error }
    }

    /// Why the disk has failed, if it has, and takes no more writes.
    pub fn failure(&self) -> Option<String> {
        self.state.doing.lock().failure.clone()
    }

    /// Has `tell` called once, when the disk has failed ([`Disk::failure`]), on the thread that finds out; at once if it has.
    pub fn when_failed(&self, tell: impl FnOnce(&str) + Send + 'static) {
        let mut doing = self.state.doing.lock();
        match doing.failure.clone() {
            None => doing.when_failed = Some(Box::new(tell)),
            Some(cause) => {
                drop(doing);
                tell(&cause);
            }
        }
    }
}
