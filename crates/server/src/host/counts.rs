//! What happened since the server began, counted for whoever watches it.

use std::sync::atomic::{AtomicU64, Ordering};

use vmstrata_api::SnapshotTaken;

use super::Host;
use crate::error::Error;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Counts {
    snapshots: AtomicU64,
    snapshot_failures: AtomicU64,
    snapshot_pause_us: AtomicU64,
    prune_failures: AtomicU64,
}

/// The counts at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) snapshots: u64,
    pub(crate) snapshot_failures: u64,
    /// For how long they held writes, together.
    pub(crate) snapshot_pause_us: u64,
    pub(crate) prune_failures: u64,
    /// Jobs that were done, cancelled, and that failed.
    pub(crate) jobs_ended: [u64; 3],
}

impl Counts {
    /// Counts a snapshot that was asked for.
    pub(super) fn snapshot(&self, taken: &Result<SnapshotTaken, Error>) {
        match taken {
            Ok(taken) => {
                self.snapshots.fetch_add(1, Ordering::Relaxed);
                self.snapshot_pause_us.fetch_add(taken.pause_us, Ordering::Relaxed);
            }
            Err(_) => _ = self.snapshot_failures.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Counts snapshots of a disk that stay though no rule keeps them.
    pub(super) fn prune_failed(&self) {
        self.prune_failures.fetch_add(1, Ordering::Relaxed);
    }
}

impl Host {
    /// What was counted until now.
    pub(crate) fn counted(&self) -> Counted {
        let now = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counted {
            snapshots: now(&self.counts.snapshots),
            snapshot_failures: now(&self.counts.snapshot_failures),
            snapshot_pause_us: now(&self.counts.snapshot_pause_us),
            prune_failures: now(&self.counts.prune_failures),
            jobs_ended: self.jobs.ended(),
        }
    }
}
