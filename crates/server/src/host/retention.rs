//! Snapshots that no rule of their disk keeps, deleted without anybody asking.
//!
//! ```text
//!   disk added, snapshot taken, some time passed ──► Due ──► thread: list ──► rules ──► job snapshot_delete
//! ```
//!
//! What is deleted is decided when it is looked at, from what the images say: nothing is remembered that a restart could
//! lose. A disk with another merge under way has its turn at the next look.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use vmstrata_api::JobSpec;
use vmstrata_disk::snapshot::{Keep, Pruning, list};

use super::{Host, Phase};
use crate::error::Error;

/// Looked at this often, whatever happens.
const PERIOD: Duration = Duration::from_secs(600);

/// Whether there may be something to delete.
#[derive(Debug, Default)]
pub(super) struct Due {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_due: bool,
    is_ending: bool,
}

impl Due {
    /// Has all disks with rules looked at.
    pub(super) fn now(&self) {
        self.state.lock().is_due = true;
        self.changed.notify_all();
    }

    fn end(&self) {
        self.state.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits for the next look; `false` when there is none.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_due && !state.is_ending {
            self.changed.wait_for(&mut state, PERIOD);
        }
        state.is_due = false;
        !state.is_ending
    }
}

/// The thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct Retention {
    due: Arc<Due>,
    thread: Option<JoinHandle<()>>,
}

impl Retention {
    /// Begins to look after the disks of `host`.
    ///
    /// # Errors
    /// No thread.
    pub(crate) fn start(host: &Arc<Host>) -> Result<Self, Error> {
        let (due, shared) = (Arc::clone(&host.due), Arc::clone(host));
        let look = move || {
            while shared.due.wait() {
                shared.prune_all();
            }
        };
        let spawned = std::thread::Builder::new().name("retention".into()).spawn(look);
        let failed = |source| Error::System { action: "start the thread that prunes snapshots", source };
        Ok(Self { due, thread: Some(spawned.map_err(failed)?) })
    }
}

impl Drop for Retention {
    fn drop(&mut self) {
        self.due.end();
        if let Some(thread) = self.thread.take() {
            // A panic is in the log.
            let _ = thread.join();
        }
    }
}

/// Since 1970, as far as the clock is right.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl Host {
    fn prune_all(&self) {
        let with_rules: Vec<(String, Keep)> = {
            let table = self.table.lock();
            let serving = table.disks.iter().filter(|entry| matches!(entry.phase, Phase::Serving(_)));
            serving.filter_map(|entry| Some((entry.spec.name.clone(), entry.spec.keep.clone()?))).collect()
        };
        for (name, keep) in with_rules {
            match self.prune(&name, &keep) {
                Ok(()) => {}
                Err(error @ (Error::JobExists { .. } | Error::Busy { .. } | Error::NoSuchDisk { .. })) => {
                    tracing::debug!(disk = name, %error, "is pruned later");
                }
                Err(error) => {
                    tracing::warn!(disk = name, %error, "snapshots that no rule keeps stay for now")
                }
            }
        }
    }

    /// Begins to delete what no rule keeps.
    fn prune(&self, name: &str, keep: &Keep) -> Result<(), Error> {
        let (path, options) = {
            let table = self.table.lock();
            let (spec, disk) = table.serving(name)?;
            if spec.read_only {
                return Ok(());
            }
            (disk.path().to_owned(), self.open_options(spec))
        };
        let snapshots = list(&path, &options)?;
        let Pruning { delete, misdated, .. } = Pruning::of(&snapshots, keep, &[], now_ns());
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
        let job = self.start_job(JobSpec::SnapshotDelete {
            disk: name.to_owned(),
            snapshots: delete.iter().map(|&snapshot| snapshot.to_owned()).collect(),
            keep_files: false,
            forget_missing: false,
            bytes_per_second: None,
        })?;
        tracing::info!(disk = name, job = job.id, %keep, "deleting {}, which no rule keeps", delete.join(", "));
        Ok(())
    }
}
