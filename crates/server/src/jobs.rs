//! The jobs of a server: long work beside the guests, as the API shows it.
//!
//! ```text
//!   POST /v1/jobs ──► Slot::start ──► thread: vmstrata_job::Job::run ──► events
//!   GET, POST /v1/jobs/{id} ◄──► Jobs ◄────────────┘
//! ```
//!
//! **Adding a kind of job**: implement [`Work`], give it a [`Kind`] and a variant in `api::JobSpec`, and begin it in `host::jobs`.
//!
//! Invariant: a job's thread ends before its disk is closed.

mod attach;
mod index_build;
mod merging;
mod moving;
mod rebase;
mod replica;
mod tier_rebase;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, broadcast};
use vmstrata_api::{ChangedBy, Event, JobChange, JobState, JobStatus, Outcome, Removed};
use vmstrata_job::{Change, Job, State, Step, Work};

pub(crate) use self::attach::{Attached, TIER_ATTACH, TierAttach};
pub(crate) use self::index_build::{INDEX_BUILD, IndexBuild};
pub(crate) use self::merging::{DEFAULT_LIMIT, FLATTEN, MERGE, Merging, SNAPSHOT_DELETE};
pub(crate) use self::moving::{Care, DiskMove, MOVE};
pub(crate) use self::rebase::{DiskRebase, REBASE, Rebased, left_of, may_be_of_rebase};
pub(crate) use self::replica::{REPLICA_FILL, REPLICA_SCRUB, ReplicaWalk};
pub(crate) use self::tier_rebase::TierRebase;
use crate::audit::{Audit, What};
use crate::error::Error;
use vmstrata_types::told;

/// Jobs under way at one time.
const JOBS_MAX: usize = 64;
/// What a job that yields adds to its thread's niceness.
const NICE: i32 = 10;
/// Jobs that ended and are still listed.
const ENDED_KEPT: usize = 100;
/// The longest time until a job tries again what failed.
const RETRY_S_MAX: u64 = 30;
/// The least time between two events of progress.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// A kind of work.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Its name in the API.
    pub(crate) name: &'static str,
    /// What a step is, in the plural.
    unit: &'static str,
    removes_files: bool,
    /// Whether a guest's request never waits for what it holds: it may go slower then where processors are few.
    yields: bool,
}

/// When a job tries again what failed: after a second, and after twice as long each time, up to half a minute.
#[derive(Debug, Default)]
struct Retry {
    failures: u32,
    not_before: Option<Instant>,
}

impl Retry {
    /// When the next try begins; once after each failure.
    fn not_before(&mut self) -> Option<Instant> {
        self.not_before.take()
    }

    fn worked(&mut self) {
        self.failures = 0;
    }

    /// The step that failed, which does not count.
    fn failed(&mut self, why: String) -> Step {
        let seconds = 1u64.checked_shl(self.failures).unwrap_or(RETRY_S_MAX).min(RETRY_S_MAX);
        self.failures = (self.failures + 1).min(RETRY_S_MAX as u32);
        self.not_before = Some(Instant::now() + Duration::from_secs(seconds));
        Step { failure: Some(why), is_part: true, ..Step::default() }
    }
}

/// All jobs of a server.
#[derive(Debug)]
pub(crate) struct Jobs {
    table: Mutex<Table>,
    /// Signalled when a job ends.
    ended: Condvar,
    events: broadcast::Sender<Event>,
    audit: Audit,
    /// Notified when the end of a job may let another begin.
    room: Arc<Notify>,
    /// How many were done, were cancelled, and failed.
    ended_as: [AtomicU64; 3],
}

#[derive(Debug, Default)]
struct Table {
    jobs: Vec<Arc<Entry>>,
    /// Kinds and disks of the jobs that are about to begin.
    reserved: Vec<(&'static Kind, String)>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    by: ChangedBy,
    kind: &'static Kind,
    disk: String,
    job: Job,
}

impl Entry {
    fn status(&self) -> JobStatus {
        let progress = self.job.progress();
        JobStatus {
            id: self.id,
            kind: self.kind.name.to_owned(),
            disk: self.disk.clone(),
            state: match progress.state {
                State::Running => JobState::Running,
                State::Paused => JobState::Paused,
                State::Cancelling => JobState::Cancelling,
                State::Done => JobState::Done,
                State::Cancelled => JobState::Cancelled,
                State::Failed => JobState::Failed,
            },
            done: progress.done,
            total: progress.total,
            unit: self.kind.unit.to_owned(),
            bytes: progress.did.bytes,
            local_bytes: (*self.kind == REPLICA_FILL).then_some(progress.did.local_bytes),
            differing_bytes: (*self.kind == REBASE).then_some(progress.did.local_bytes),
            removed: self.kind.removes_files.then_some(Removed {
                files: progress.did.removed_files,
                freed_bytes: progress.did.freed_bytes,
            }),
            bytes_per_second: progress.limit,
            seconds: progress.took.as_secs(),
            seconds_left: progress.left().map(|left| left.as_secs()),
            failures: progress.failures,
            error: progress.did.failure,
        }
    }
}

impl Jobs {
    /// No jobs yet. Each end of a job notifies `room`, but for a retention job that was not done: that would begin it again at
    /// once.
    pub(crate) fn new(events: broadcast::Sender<Event>, audit: Audit, room: Arc<Notify>) -> Self {
        let (table, ended) = (Mutex::default(), Condvar::new());
        Self { table, ended, events, audit, room, ended_as: Default::default() }
    }

    /// How many jobs were done, were cancelled, and failed.
    pub(crate) fn ended(&self) -> [u64; 3] {
        self.ended_as.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Makes sure that work of this kind can begin on a disk. Making the work may be what changes the disk first, so room is
    /// found before.
    ///
    /// # Errors
    /// Too many jobs; the same work on the same disk under way already.
    pub(crate) fn reserve(self: &Arc<Self>, kind: &'static Kind, disk: &str) -> Result<Slot, Error> {
        let mut table = self.table.lock();
        let live = table.jobs.iter().filter(|entry| !entry.job.is_ended());
        let is_reserved = table.reserved.iter().any(|(other, of)| *other == kind && of == disk);
        if is_reserved || live.clone().any(|entry| entry.kind == kind && entry.disk == disk) {
            return Err(Error::JobExists { kind: kind.name, disk: disk.to_owned() });
        }
        if live.count() + table.reserved.len() >= JOBS_MAX {
            return Err(Error::TooManyJobs { max: JOBS_MAX });
        }
        table.reserved.push((kind, disk.to_owned()));
        Ok(Slot { jobs: Arc::clone(self), kind, disk: disk.to_owned() })
    }

    /// Refuses to begin while a job of the disk removes files.
    ///
    /// # Errors
    /// That job.
    pub(crate) fn refuse_beside_removal(&self, disk: &str) -> Result<(), Error> {
        let table = self.table.lock();
        let mut own = table.jobs.iter().filter(|entry| entry.disk == disk && !entry.job.is_ended());
        match own.find(|entry| entry.kind.removes_files) {
            Some(entry) => Err(Error::JobExists { kind: entry.kind.name, disk: disk.to_owned() }),
            None => Ok(()),
        }
    }

    /// Refuses to begin beside a job of one of these kinds on the same disk, or one that is about to begin.
    ///
    /// # Errors
    /// That job.
    pub(crate) fn refuse_beside(&self, kinds: &[&'static Kind], disk: &str) -> Result<(), Error> {
        let table = self.table.lock();
        let live = table.jobs.iter().filter(|entry| !entry.job.is_ended());
        let live = live.map(|entry| (entry.kind, &*entry.disk));
        let mut all = live.chain(table.reserved.iter().map(|(kind, disk)| (*kind, &**disk)));
        match all.find(|(kind, of)| *of == disk && kinds.contains(kind)) {
            Some((kind, _)) => Err(Error::JobExists { kind: kind.name, disk: disk.to_owned() }),
            None => Ok(()),
        }
    }

    /// Jobs under way, and the last ones that ended.
    pub(crate) fn list(&self) -> Vec<JobStatus> {
        self.table.lock().jobs.iter().map(|entry| entry.status()).collect()
    }

    fn find(&self, id: u64) -> Result<Arc<Entry>, Error> {
        let table = self.table.lock();
        let found = table.jobs.iter().find(|entry| entry.id == id);
        found.cloned().ok_or(Error::NoSuchJob { id })
    }

    /// A job by its number.
    ///
    /// # Errors
    /// No such job.
    pub(crate) fn status(&self, id: u64) -> Result<JobStatus, Error> {
        Ok(self.find(id)?.status())
    }

    /// Pauses, resumes, cancels or slows a job. A job that has ended stays as it is.
    ///
    /// # Errors
    /// No such job.
    pub(crate) fn change(&self, id: u64, change: JobChange) -> Result<JobStatus, Error> {
        let entry = self.find(id)?;
        entry.job.change(match change {
            JobChange::Pause {} => Change::Pause,
            JobChange::Resume {} => Change::Resume,
            JobChange::Cancel {} => Change::Cancel,
            JobChange::Limit { bytes_per_second } => Change::Limit(bytes_per_second),
        });
        let status = entry.status();
        let _ = self.events.send(Event::Job { job: status.clone() });
        Ok(status)
    }

    /// Cancels the jobs of a disk, or all, and waits until their threads have ended.
    pub(crate) fn end(&self, disk: Option<&str>) {
        self.end_until(disk, None);
    }

    /// As [`Jobs::end`] of all jobs, but waits until `deadline` only.
    pub(crate) fn end_all(&self, deadline: Instant) {
        self.end_until(None, Some(deadline));
    }

    fn end_until(&self, disk: Option<&str>, deadline: Option<Instant>) {
        let mut table = self.table.lock();
        loop {
            let own = table.jobs.iter().filter(|entry| disk.is_none_or(|disk| entry.disk == disk));
            let mut live = own.filter(|entry| !entry.job.is_ended()).peekable();
            if live.peek().is_none() {
                return;
            }
            live.for_each(|entry| entry.job.change(Change::Cancel));
            match deadline {
                None => self.ended.wait(&mut table),
                Some(deadline) if self.ended.wait_until(&mut table, deadline).timed_out() => {
                    return tracing::error!("jobs do not end in time");
                }
                Some(_) => {}
            }
        }
    }

    fn run<W: Work<Error = Error>>(&self, entry: &Entry, work: W) {
        let mut last = Instant::now();
        let tell = |_: &Job| {
            if last.elapsed() >= TELL_EVERY {
                last = Instant::now();
                let _ = self.events.send(Event::Job { job: entry.status() });
            }
        };
        // Closing the disk waits for the end of its jobs: a panic is one, too. By then the work has let go of what it holds open,
        // also while it unwinds.
        let result = catch_unwind(AssertUnwindSafe(|| entry.job.run(work, tell)));
        let result = result.unwrap_or(Err(Error::JobPanicked { kind: entry.kind.name }));
        let reached = entry.status();
        let (how, outcome, error) = match &result {
            Ok(true) => (0, Outcome::Done, reached.error),
            Ok(false) => (1, Outcome::Cancelled, reached.error),
            Err(error) => (2, Outcome::Failed, Some(told(error))),
        };
        let what = What::of(entry.kind.name, [reached.disk]).object(format!("job {}", reached.id));
        let bytes = reached.removed.map_or(reached.bytes, |removed| removed.freed_bytes);
        // Before the end can be seen, and without the lock: storage may not answer.
        let took = entry.job.progress().took;
        self.audit.record(entry.by.clone(), What { bytes: Some(bytes), ..what }, took, (outcome, error));
        let _table = self.table.lock();
        entry.job.end(result.map_err(|error| told(&error)));
        self.ended_as[how].fetch_add(1, Ordering::Relaxed);
        let _ = self.events.send(Event::Job { job: entry.status() });
        self.ended.notify_all();
        if how == 0 || entry.by != ChangedBy::Retention {
            self.room.notify_one();
        }
    }
}

/// Room for one job.
#[derive(Debug)]
pub(crate) struct Slot {
    jobs: Arc<Jobs>,
    kind: &'static Kind,
    disk: String,
}

impl Slot {
    /// Begins the work, on a thread of its own.
    ///
    /// # Errors
    /// A host that has no thread left.
    pub(crate) fn start<W>(self, limit: Option<u64>, by: ChangedBy, work: W) -> Result<JobStatus, Error>
    where
        W: Work<Error = Error> + Send + 'static,
    {
        let mut table = self.jobs.table.lock();
        table.next += 1;
        let (id, job) = (table.next, Job::new(work.total(), limit));
        let entry = Arc::new(Entry { id, by, kind: self.kind, disk: self.disk.clone(), job });
        let (jobs, shared) = (Arc::clone(&self.jobs), Arc::clone(&entry));
        let yields = self.kind.yields;
        let thread = std::thread::Builder::new().name(format!("job-{id}"));
        let spawned = thread.spawn(move || {
            if yields {
                // So are the threads that it starts.
                let _ = rustix::process::nice(NICE);
            }
            jobs.run(&shared, work);
        });
        spawned.map_err(|source| Error::System { action: "start a thread for a job", source })?;
        table.jobs.push(Arc::clone(&entry));
        table.forget_oldest();
        let _ = self.jobs.events.send(Event::Job { job: entry.status() });
        Ok(entry.status())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let reserved = &mut self.jobs.table.lock().reserved;
        let own = reserved.iter().position(|(kind, disk)| *kind == self.kind && *disk == self.disk);
        own.map(|own| reserved.swap_remove(own));
    }
}

impl Table {
    fn forget_oldest(&mut self) {
        let ended = self.jobs.iter().filter(|entry| entry.job.is_ended()).count();
        let mut surplus = ended.saturating_sub(ENDED_KEPT);
        self.jobs.retain(|entry| {
            let goes = surplus > 0 && entry.job.is_ended();
            surplus -= usize::from(goes);
            !goes
        });
    }
}

#[cfg(test)]
mod tests;
