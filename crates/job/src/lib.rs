//! Long work in steps: a loop of `select -> action -> apply` that can be watched, slowed, paused and ended.
//!
//! ```text
//!   Job::run ──► ┌─► paused? over the limit? ──► select ──► apply ─┐
//!                └──────────────── progress ◄──────────────────────┘
//!   other threads ──► Job::change, Job::progress
//! ```
//!
//! Each step must leave everything as sound as it was: between two steps a job may be paused for ever, and a cancelled job is not
//! undone.

#![forbid(unsafe_code)]

mod bucket;
mod shared_rate;

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

pub use self::bucket::{Bucket, wait_while};
pub use self::shared_rate::{RateShare, SharedRate};

/// Something to be done in steps.
pub trait Work {
    /// What `select` decides and `apply` carries out.
    type Action;
    /// What makes going on pointless.
    type Error;

    /// Steps there are, about: those that are done, and those that are left. Asked after each step.
    fn total(&self) -> u64;

    /// Decides what comes next.
    ///
    /// # Errors
    /// What makes going on pointless.
    fn select(&mut self) -> Result<Next<Self::Action>, Self::Error>;

    /// Carries it out, or a part of it that writes about `most` bytes: the limit holds as closely as steps keep to that.
    ///
    /// # Errors
    /// What makes going on pointless; for a step that can be passed over see [`Step::failure`].
    fn apply(&mut self, action: Self::Action, most: u64) -> Result<Step, Self::Error>;
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next<A> {
    /// This step.
    Step(A),
    /// Another look at this time.
    WaitUntil(Instant),
    /// Nothing: all is done.
    End,
}

/// What a step did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Bytes written, which the speed limit is about.
    pub bytes: u64,
    /// Bytes that count apart from those: which, the kind of work says.
    pub local_bytes: u64,
    /// Files removed.
    pub removed_files: u64,
    /// Bytes of storage that are free by that.
    pub freed_bytes: u64,
    /// Why the step was passed over, if it was.
    pub failure: Option<String>,
    /// Whether it was a part: the next step goes on with it, and counts.
    pub is_part: bool,
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Under way.
    Running,
    /// Waits to be resumed.
    Paused,
    /// Ends after the step that is under way.
    Cancelling,
    /// Ended: all is done.
    Done,
    /// Ended before all was done, by [`Change::Cancel`].
    Cancelled,
    /// Ended before all was done, by an error.
    Failed,
}

impl State {
    /// Whether nothing more will happen.
    pub fn is_ended(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }
}

/// What can be done to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Stop after the step that is under way, until resumed.
    Pause,
    /// Go on.
    Resume,
    /// End after the step that is under way. What is done stays done.
    Cancel,
    /// Write no more than so many bytes a second; `None` lifts the limit.
    Limit(Option<u64>),
}

/// How far a job has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Where it is.
    pub state: State,
    /// Steps done.
    pub done: u64,
    /// Steps there are, about.
    pub total: u64,
    /// The sum of what its steps did.
    pub did: Step,
    /// Steps that were passed over.
    pub failures: u64,
    /// Bytes a second that it may write.
    pub limit: Option<u64>,
    /// Time since it began, until it ended.
    pub took: Duration,
    /// Steps that were done of late, and in which time.
    pub lately: (u64, Duration),
}

impl Progress {
    /// The time until the end if the rest goes as it went of late; `None` before the first step, and at the end.
    pub fn left(&self) -> Option<Duration> {
        let (done, took) = self.lately;
        let rest = self.total.saturating_sub(self.done) as f64;
        let is_known = done > 0 && !self.state.is_ended();
        is_known.then(|| Duration::try_from_secs_f64(took.as_secs_f64() / done as f64 * rest).ok())?
    }
}

/// What a job did of late: its rate changes with limits, and with what else the host does.
#[derive(Debug)]
struct Lately {
    /// Steps that were done at two moments: it counts from the first, until the second is old enough to be that.
    marks: [(u64, Instant); 2],
}

impl Lately {
    /// So long, and up to twice that. Steps are uneven: copies are flushed together.
    const LONG: Duration = Duration::from_secs(15);

    fn new(now: Instant) -> Self {
        Self { marks: [(0, now); 2] }
    }

    /// Notes that so many steps are done, one more than before.
    fn stepped(&mut self, done: u64, now: Instant) {
        let [_, half] = self.marks;
        if now.saturating_duration_since(half.1) >= Self::LONG {
            self.marks = [half, (done, now)];
        }
    }

    fn get(&self, done: u64, now: Instant) -> (u64, Duration) {
        let [(before, since), _] = self.marks;
        (done - before, now.saturating_duration_since(since))
    }
}

/// One job, shared by the thread that runs it and those that control it.
#[derive(Debug)]
pub struct Job {
    began: Instant,
    inner: Mutex<Inner>,
    /// Signalled when another thread changes something.
    changed: Condvar,
}

#[derive(Debug)]
struct Inner {
    progress: Progress,
    bucket: Bucket,
    lately: Lately,
    ended: Option<Instant>,
}

impl Job {
    /// A job of about `total` steps that may write `limit` bytes a second.
    pub fn new(total: u64, limit: Option<u64>) -> Self {
        let began = Instant::now();
        let progress = Progress {
            state: State::Running,
            done: 0,
            total,
            did: Step::default(),
            failures: 0,
            limit,
            took: Duration::ZERO,
            lately: (0, Duration::ZERO),
        };
        let (bucket, lately) = (Bucket::new(limit, began), Lately::new(began));
        let inner = Inner { progress, bucket, lately, ended: None };
        Self { began, inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// How far it has come.
    pub fn progress(&self) -> Progress {
        let inner = self.inner.lock();
        let until = inner.ended.unwrap_or_else(Instant::now);
        let total = inner.progress.total.max(inner.progress.done);
        let lately = inner.lately.get(inner.progress.done, until);
        Progress { total, took: until.duration_since(self.began), lately, ..inner.progress.clone() }
    }

    /// Whether nothing more will happen.
    pub fn is_ended(&self) -> bool {
        self.inner.lock().progress.state.is_ended()
    }

    /// Makes a change, as far as the job's state allows it.
    pub fn change(&self, change: Change) {
        let mut inner = self.inner.lock();
        inner.progress.state = match (change, inner.progress.state) {
            (Change::Pause, State::Running) => State::Paused,
            (Change::Resume, State::Paused) => State::Running,
            (Change::Cancel, State::Running | State::Paused) => State::Cancelling,
            (Change::Limit(limit), state) => {
                inner.progress.limit = limit;
                inner.bucket.set_limit(limit, Instant::now());
                state
            }
            (_, state) => state,
        };
        self.changed.notify_all();
    }

    /// Does all steps on this thread, and calls `stepped` after each. Returns `false` if it was cancelled before the end.
    /// [`Job::end`] makes the end known.
    ///
    /// # Errors
    /// That of the work.
    pub fn run<W: Work>(&self, mut work: W, mut stepped: impl FnMut(&Self)) -> Result<bool, W::Error> {
        let mut not_before = None;
        while self.may_go_on(not_before.take()) {
            match work.select()? {
                Next::Step(action) => {
                    let most = self.inner.lock().bucket.step_bytes();
                    let step = work.apply(action, most)?;
                    self.stepped(step, work.total());
                }
                Next::WaitUntil(time) => not_before = Some(time),
                Next::End => return Ok(true),
            }
            stepped(self);
        }
        Ok(false)
    }

    /// Waits until the next step may begin; `false` if the job was cancelled.
    fn may_go_on(&self, not_before: Option<Instant>) -> bool {
        let mut inner = self.inner.lock();
        loop {
            match inner.progress.state {
                State::Running => {
                    let now = Instant::now();
                    let begins = (now + inner.bucket.wait(now)).max(not_before.unwrap_or(now));
                    if begins <= now {
                        return true;
                    }
                    self.changed.wait_until(&mut inner, begins);
                }
                State::Paused => self.changed.wait(&mut inner),
                _ => return false,
            }
        }
    }

    fn stepped(&self, step: Step, total: u64) {
        let mut inner = self.inner.lock();
        let (inner, now) = (&mut *inner, Instant::now());
        inner.bucket.take(step.bytes, now);
        let progress = &mut inner.progress;
        progress.total = total;
        if !step.is_part {
            progress.done += 1;
            inner.lately.stepped(progress.done, now);
        }
        progress.did.bytes += step.bytes;
        progress.did.local_bytes += step.local_bytes;
        progress.did.removed_files += step.removed_files;
        progress.did.freed_bytes += step.freed_bytes;
        if let Some(failure) = step.failure {
            progress.failures += 1;
            progress.did.failure.get_or_insert(failure);
        }
    }

    /// Notes the end: what [`Job::run`] returned, an error in words.
    pub fn end(&self, result: Result<bool, String>) {
        let mut inner = self.inner.lock();
        inner.ended = Some(Instant::now());
        let progress = &mut inner.progress;
        progress.state = match result {
            Err(error) => {
                progress.did.failure = Some(error);
                State::Failed
            }
            Ok(false) => State::Cancelled,
            Ok(true) => {
                // Until now it was an estimate.
                progress.total = progress.done;
                State::Done
            }
        };
    }
}

#[cfg(test)]
mod tests;
