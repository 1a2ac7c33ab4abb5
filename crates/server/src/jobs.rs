//! Long work beside the guests: a loop of `select -> Action -> apply` that can be watched, slowed, paused and ended.
//!
//! ```text
//!   POST /v1/jobs ──► Slot::start ──► thread: ┌─► wait: paused? over the limit? ──► select ──► apply ─┐
//!   GET, POST /v1/jobs/{id} ◄──► Control ◄────┘◄──────────── progress, events ◄────────────────────────┘
//! ```
//!
//! **Adding a kind of job**: implement [`Work`], give it a variant in `api::JobSpec`, and begin it in
//! `host::jobs`. Each step must leave everything as sound as it was: between two steps a job may be paused for ever,
//! and a job that was cancelled is not undone.
//!
//! Invariant: a job's thread ends before its disk is closed.

mod bucket;
mod control;
mod index_build;
mod merging;

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::broadcast;
use vmstrata_api::{ChangedBy, Event, JobChange, JobStatus, Outcome, Removed};

pub use self::bucket::Bucket;
use self::control::Control;
pub(crate) use self::index_build::IndexBuild;
pub(crate) use self::merging::{DEFAULT_LIMIT, Flatten, MergeLayers, SnapshotDelete};
use crate::audit::{Audit, What};
use crate::error::{Error, told};

/// Jobs under way at one time.
const JOBS_MAX: usize = 64;
/// Jobs that ended and are still listed.
const ENDED_KEPT: usize = 100;
/// Progress is told no more often than this.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// Something to be done in steps.
pub(crate) trait Work: Send + 'static {
    /// What `select` decides and `apply` carries out.
    type Action;
    /// The kind's name in the API.
    const KIND: &'static str;
    /// What a step is, in the plural.
    const UNIT: &'static str;
    /// Whether it removes files.
    const REMOVES_FILES: bool = false;

    /// Steps there are, about.
    fn total(&self) -> u64;

    /// Decides what comes next; `None` when all is done.
    ///
    /// # Errors
    /// What makes going on pointless.
    fn select(&mut self) -> Result<Option<Self::Action>, Error>;

    /// Carries it out.
    ///
    /// # Errors
    /// What makes going on pointless; for a step that can be passed over see [`Step::failure`].
    fn apply(&mut self, action: Self::Action) -> Result<Step, Error>;
}

/// What a step did.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// Bytes written, which the speed limit is about.
    pub(crate) bytes: u64,
    /// Files removed.
    pub(crate) removed: Removed,
    /// Why the step was passed over, if it was.
    pub(crate) failure: Option<String>,
}

/// All jobs of a server.
#[derive(Debug)]
pub(crate) struct Jobs {
    table: Mutex<Table>,
    /// Signalled when a job ends.
    ended: Condvar,
    events: broadcast::Sender<Event>,
    audit: Audit,
    /// How many were done, were cancelled, and failed.
    ended_as: [AtomicU64; 3],
}

#[derive(Debug, Default)]
struct Table {
    jobs: Vec<Arc<Control>>,
    /// Kinds and disks of the jobs that are about to begin.
    reserved: Vec<(&'static str, String)>,
    next: u64,
}

impl Jobs {
    pub(crate) fn new(events: broadcast::Sender<Event>, audit: Audit) -> Self {
        Self { table: Mutex::default(), ended: Condvar::new(), events, audit, ended_as: Default::default() }
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
    pub(crate) fn reserve<W: Work>(self: &Arc<Self>, disk: &str) -> Result<Slot<W>, Error> {
        let mut table = self.table.lock();
        let live = table.jobs.iter().filter(|job| !job.is_ended());
        let is_reserved = table.reserved.iter().any(|(kind, of)| *kind == W::KIND && of == disk);
        if is_reserved || live.clone().any(|job| job.is_about(W::KIND, disk)) {
            return Err(Error::JobExists { kind: W::KIND, disk: disk.to_owned() });
        }
        if live.count() + table.reserved.len() >= JOBS_MAX {
            return Err(Error::TooManyJobs { max: JOBS_MAX });
        }
        table.reserved.push((W::KIND, disk.to_owned()));
        Ok(Slot { jobs: Arc::clone(self), disk: disk.to_owned(), kind: PhantomData })
    }

    /// Jobs under way, and the last ones that ended.
    pub(crate) fn list(&self) -> Vec<JobStatus> {
        self.table.lock().jobs.iter().map(|job| job.status()).collect()
    }

    fn find(&self, id: u64) -> Result<Arc<Control>, Error> {
        let table = self.table.lock();
        let found = table.jobs.iter().find(|job| job.id() == id);
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
        let job = self.find(id)?;
        job.change(change);
        let status = job.status();
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
            let meant = |job: &&Arc<Control>| disk.is_none_or(|disk| job.disk() == disk) && !job.is_ended();
            let live: Vec<_> = table.jobs.iter().filter(meant).cloned().collect();
            if live.is_empty() {
                return;
            }
            live.iter().for_each(|job| job.change(JobChange::Cancel {}));
            match deadline {
                None => self.ended.wait(&mut table),
                Some(deadline) if self.ended.wait_until(&mut table, deadline).timed_out() => {
                    return tracing::error!("jobs do not end in time");
                }
                Some(_) => {}
            }
        }
    }

    fn run<W: Work>(&self, job: &Control, work: W) {
        // Whoever closes the disk waits for the end of its jobs: a panic is one, too. What the work holds open is let go by
        // then, also while it unwinds.
        let result = catch_unwind(AssertUnwindSafe(|| self.work(job, work)));
        let result = result.unwrap_or(Err(Error::JobPanicked { kind: W::KIND }));
        let reached = job.status();
        let (how, outcome, error) = match &result {
            Ok(true) => (0, Outcome::Done, reached.error),
            Ok(false) => (1, Outcome::Cancelled, reached.error),
            Err(error) => (2, Outcome::Failed, Some(told(error))),
        };
        let what = What::of(W::KIND, [reached.disk]).object(format!("job {}", reached.id));
        let bytes = reached.removed.map_or(reached.bytes, |removed| removed.freed_bytes);
        // Before anybody can see that the job has ended, and without the lock: storage may not answer.
        self.audit.record(job.by(), What { bytes: Some(bytes), ..what }, job.took(), (outcome, error));
        let _table = self.table.lock();
        job.end(result);
        let status = job.status();
        self.ended_as[how].fetch_add(1, Ordering::Relaxed);
        let _ = self.events.send(Event::Job { job: status });
        self.ended.notify_all();
    }

    /// Does all steps, unless it is to end before: then `false`.
    fn work<W: Work>(&self, job: &Control, mut work: W) -> Result<bool, Error> {
        let mut told = Instant::now();
        while job.may_go_on() {
            let Some(action) = work.select()? else { return Ok(true) };
            job.stepped(work.apply(action)?);
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                let _ = self.events.send(Event::Job { job: job.status() });
            }
        }
        Ok(false)
    }
}

/// Room for one job.
#[derive(Debug)]
pub(crate) struct Slot<W: Work> {
    jobs: Arc<Jobs>,
    disk: String,
    kind: PhantomData<fn(W)>,
}

impl<W: Work> Slot<W> {
    /// Begins the work, on a thread of its own.
    ///
    /// # Errors
    /// A host that has no thread left.
    pub(crate) fn start(self, limit: Option<u64>, by: ChangedBy, work: W) -> Result<JobStatus, Error> {
        let mut table = self.jobs.table.lock();
        table.next += 1;
        let control = Arc::new(Control::new::<W>((table.next, by), &self.disk, work.total(), limit));
        let (jobs, shared) = (Arc::clone(&self.jobs), Arc::clone(&control));
        let thread = std::thread::Builder::new().name(format!("job-{}", table.next));
        let spawned = thread.spawn(move || jobs.run(&shared, work));
        spawned.map_err(|source| Error::System { action: "start a thread for a job", source })?;
        table.jobs.push(Arc::clone(&control));
        table.forget_oldest();
        let _ = self.jobs.events.send(Event::Job { job: control.status() });
        Ok(control.status())
    }
}

impl<W: Work> Drop for Slot<W> {
    fn drop(&mut self) {
        let reserved = &mut self.jobs.table.lock().reserved;
        let own = reserved.iter().position(|(kind, disk)| *kind == W::KIND && *disk == self.disk);
        own.map(|own| reserved.swap_remove(own));
    }
}

impl Table {
    fn forget_oldest(&mut self) {
        let ended = self.jobs.iter().filter(|job| job.is_ended()).count();
        let mut surplus = ended.saturating_sub(ENDED_KEPT);
        self.jobs.retain(|job| {
            let goes = surplus > 0 && job.is_ended();
            surplus -= usize::from(goes);
            !goes
        });
    }
}

#[cfg(test)]
mod tests;
