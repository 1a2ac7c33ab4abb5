//! One job as its thread and those who control it share it.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmstrata_api::{ChangedBy, JobChange, JobState, JobStatus, Removed};

use super::bucket::Bucket;
use super::{Step, Work};
use crate::error::Error;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Control {
    id: u64,
    /// Who began it.
    by: ChangedBy,
    kind: &'static str,
    disk: String,
    unit: &'static str,
    began: Instant,
    progress: Mutex<Progress>,
    /// Signalled when someone changes something.
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    state: JobState,
    done: u64,
    total: u64,
    bytes: u64,
    removed: Option<Removed>,
    failures: u64,
    error: Option<String>,
    bucket: Bucket,
    ended: Option<Instant>,
}

impl Control {
    pub(super) fn new<W: Work>(
        (id, by): (u64, ChangedBy),
        disk: &str,
        total: u64,
        limit: Option<u64>,
    ) -> Self {
        let began = Instant::now();
        let progress = Progress {
            state: JobState::Running,
            done: 0,
            total,
            bytes: 0,
            removed: W::REMOVES_FILES.then(Removed::default),
            failures: 0,
            error: None,
            bucket: Bucket::new(limit, began),
            ended: None,
        };
        Self {
            id,
            by,
            kind: W::KIND,
            disk: disk.to_owned(),
            unit: W::UNIT,
            began,
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Who began it.
    pub(super) fn by(&self) -> ChangedBy {
        self.by.clone()
    }

    /// How long it has been under way.
    pub(super) fn took(&self) -> Duration {
        self.progress.lock().ended.unwrap_or_else(Instant::now).duration_since(self.began)
    }

    pub(super) fn disk(&self) -> &str {
        &self.disk
    }

    pub(super) fn is_about(&self, kind: &str, disk: &str) -> bool {
        self.kind == kind && self.disk == disk
    }

    pub(super) fn is_ended(&self) -> bool {
        self.progress.lock().state.is_ended()
    }

    pub(super) fn status(&self) -> JobStatus {
        let progress = self.progress.lock();
        let until = progress.ended.unwrap_or_else(Instant::now);
        JobStatus {
            id: self.id,
            kind: self.kind.to_owned(),
            disk: self.disk.clone(),
            state: progress.state,
            done: progress.done,
            total: progress.total.max(progress.done),
            unit: self.unit.to_owned(),
            bytes: progress.bytes,
            removed: progress.removed,
            bytes_per_second: progress.bucket.limit(),
            seconds: until.duration_since(self.began).as_secs(),
            failures: progress.failures,
            error: progress.error.clone(),
        }
    }

    /// Does what someone asked for, as far as the job's state allows it.
    pub(super) fn change(&self, change: JobChange) {
        let mut progress = self.progress.lock();
        progress.state = match (change, progress.state) {
            (JobChange::Pause {}, JobState::Running) => JobState::Paused,
            (JobChange::Resume {}, JobState::Paused) => JobState::Running,
            (JobChange::Cancel {}, JobState::Running | JobState::Paused) => JobState::Cancelling,
            (JobChange::Limit { bytes_per_second }, state) => {
                progress.bucket.set_limit(bytes_per_second, Instant::now());
                state
            }
            (_, state) => state,
        };
        self.changed.notify_all();
    }

    /// Waits until the next step may begin; `false` when there is to be none.
    pub(super) fn may_go_on(&self) -> bool {
        let mut progress = self.progress.lock();
        loop {
            match progress.state {
                JobState::Running => {
                    let now = Instant::now();
                    let wait = progress.bucket.wait(now);
                    if wait.is_zero() {
                        return true;
                    }
                    self.changed.wait_until(&mut progress, now + wait);
                }
                JobState::Paused => self.changed.wait(&mut progress),
                _ => return false,
            }
        }
    }

    /// Notes what a step did.
    pub(super) fn stepped(&self, step: Step) {
        let mut progress = self.progress.lock();
        progress.done += 1;
        progress.bytes += step.bytes;
        if let Some(removed) = &mut progress.removed {
            removed.files += step.removed.files;
            removed.freed_bytes += step.removed.freed_bytes;
        }
        progress.bucket.take(step.bytes, Instant::now());
        if let Some(failure) = step.failure {
            progress.failures += 1;
            progress.error.get_or_insert(failure);
        }
    }

    /// Notes the end, and whether all was done by then.
    pub(super) fn end(&self, result: Result<bool, Error>) {
        let mut progress = self.progress.lock();
        progress.ended = Some(Instant::now());
        progress.state = match result {
            Err(error) => {
                progress.error = Some(error.to_string());
                JobState::Failed
            }
            Ok(false) => JobState::Cancelled,
            Ok(true) => {
                // Until now it was an estimate.
                progress.total = progress.done;
                JobState::Done
            }
        };
    }
}
