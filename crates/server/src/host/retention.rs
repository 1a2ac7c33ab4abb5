//! Snapshots that no rule of their disk keeps, deleted without anybody asking.
//!
//! ```text
//!   disk added, snapshot taken, job ended, some time passed ──► Due ──► retain: list ──► rules ──► job snapshot_delete
//! ```
//!
//! What is deleted is decided when it is looked at, from what the images say: nothing is remembered that a restart may not
//! lose. What the file system had no room for is not tried again before there is room. A disk with a merge under way has its turn
//! when that ends. A failed delete causes no look of its own, so failures do not loop.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use vmstrata_api::{ChangedBy, JobSpec, MergeDirection};
use vmstrata_disk::merge::{MergeFault, available_bytes};
use vmstrata_disk::snapshot::{Keep, Pruning, list, now_ns};

use super::{Entry, Host};
use crate::error::Error;

/// Looked at this often, whatever happens.
const PERIOD: Duration = Duration::from_secs(600);

/// Whether there may be something to delete, or to make anew.
#[derive(Debug, Default)]
pub(super) struct Due {
    wake: Arc<Notify>,
    /// By disk: what there was no room to delete.
    no_room: Mutex<HashMap<String, NoRoom>>,
}

/// What there was no room to delete, which is not worth another look before there is.
#[derive(Debug)]
struct NoRoom {
    snapshots: Vec<String>,
    /// Bytes that must be free.
    wanted: u64,
}

impl Due {
    /// Has all disks looked at.
    pub(super) fn now(&self) {
        self.wake.notify_one();
    }

    /// Notify this to have all disks looked at.
    pub(super) fn waker(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Notes why these snapshots of a disk are not deleted, if that is for want of room.
    fn remember(&self, disk: &str, snapshots: Vec<String>, error: Option<&Error>) {
        let mut no_room = self.no_room.lock();
        match error.and_then(room_wanted) {
            Some(wanted) => no_room.insert(disk.to_owned(), NoRoom { snapshots, wanted }),
            None => no_room.remove(disk),
        };
    }
}

/// How many bytes would have to be free for what was refused, if it was for want of them.
fn room_wanted(error: &Error) -> Option<u64> {
    let Error::Disk(cause) = error else { return None };
    match cause.fault() {
        Some(MergeFault::NoSpace { demand, reserve, .. }) => Some(demand.saturating_add(*reserve)),
        _ => None,
    }
}

impl Host {
    /// Looks after the disks for as long as the server runs.
    pub(crate) async fn retain(self: Arc<Self>) {
        let mut next = PERIOD;
        loop {
            let _ = tokio::time::timeout(next, self.due.wake.notified()).await;
            let host = Arc::clone(&self);
            let look = move || {
                host.let_go_of_rebases();
                host.prune_all();
                host.let_go_of_sources()
            };
            let looked = tokio::task::spawn_blocking(look).await;
            next = looked.as_ref().map_or(PERIOD, |next| next.map_or(PERIOD, |next| next.min(PERIOD)));
            if let Err(error) = looked {
                tracing::error!(%error, "cannot look after the disks");
            }
        }
    }

    fn prune_all(&self) {
        let with_rules: Vec<(String, Keep)> = {
            let table = self.table.lock();
            let keep = |entry: &Entry| Some((entry.spec.name.clone(), entry.spec.keep.clone()?));
            table.disks.iter().filter_map(keep).collect()
        };
        for (name, keep) in with_rules {
            match self.prune(&name, &keep) {
                Ok(()) => {}
                Err(
                    error @ (Error::JobExists { .. }
                    | Error::Busy { .. }
                    | Error::NotOpen { .. }
                    | Error::NoSuchDisk { .. }
                    | Error::Ending),
                ) => {
                    tracing::debug!(disk = name, %error, "is pruned later");
                }
                Err(error) => {
                    self.counts.prune_failed();
                    tracing::warn!(disk = name, %error, "snapshots that no rule keeps stay for now");
                }
            }
        }
    }

    /// Begins to delete what no rule keeps.
    fn prune(&self, name: &str, keep: &Keep) -> Result<(), Error> {
        let (path, options) = {
            let table = self.table.lock();
            let (spec, disk) = table.serving(name)?;
            if disk.is_read_only() {
                return Ok(());
            }
            (disk.path().to_owned(), self.open_options(spec))
        };
        self.jobs.refuse_beside_removal(name)?;
        let snapshots = list(&path, &options)?;
        let Pruning { delete, held, misdated, .. } = Pruning::of(&snapshots, keep, &[], now_ns());
        if !held.is_empty() {
            tracing::debug!(disk = name, "no rule keeps {}, but holds do", held.join(", "));
        }
        if delete.is_empty() {
            return Ok(());
        }
        if !misdated.is_empty() {
            tracing::warn!(
                disk = name,
                "the clock was wrong when {} was taken, or is now: rules go by the order",
                misdated.join(", ")
            );
        }
        let snapshots: Vec<String> = delete.iter().map(|&snapshot| snapshot.to_owned()).collect();
        let is_known =
            |known: &NoRoom| known.snapshots == snapshots && available_bytes(&path) < Some(known.wanted);
        if self.due.no_room.lock().get(name).is_some_and(is_known) {
            return Ok(());
        }
        let job = JobSpec::SnapshotDelete {
            disk: name.to_owned(),
            snapshots: snapshots.clone(),
            keep_files: false,
            direction: MergeDirection::Auto,
            forget_missing: false,
            bytes_per_second: None,
        };
        let job = self.start_job(job, ChangedBy::Retention);
        self.due.remember(name, snapshots, job.as_ref().err());
        let job = job?;
        tracing::info!(disk = name, job = job.id, %keep, "deleting {}, which no rule keeps", delete.join(", "));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_no_room_for_is_remembered_until_it_is_deleted() {
        let due = Due::default();
        let names = || vec!["mon".to_owned()];
        let of = |fault: MergeFault| Error::from(vmstrata_disk::Error::from(fault));
        let no_space = of(MergeFault::NoSpace { demand: 20, reserve: 2, available: 10 });
        due.remember("web", names(), Some(&no_space));
        let known = due.no_room.lock().get("web").map(|known| (known.snapshots.clone(), known.wanted));
        assert_eq!(known, Some((names(), 22)));
        due.remember("web", names(), Some(&of(MergeFault::Busy)));
        assert!(due.no_room.lock().is_empty());
    }
}
