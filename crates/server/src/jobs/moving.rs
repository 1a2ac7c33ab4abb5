//! A disk in use moves to another directory, or to a flat copy.

use std::fmt;
use std::time::{Duration, Instant};

use vmstrata_job::{Next, RateShare, Step, Work};
use vmstrata_migrate::follow::{Allowed, Control};
use vmstrata_migrate::{Move, Phase, Report, Schedule, Timed};
use vmstrata_types::told;

use super::{Kind, Retry};
use crate::error::Error;

/// The kind of [`DiskMove`].
pub(crate) const MOVE: Kind = Kind { name: "move", unit: "MiB", removes_files: false, yields: true };

/// Bytes of a step.
const STEP: u64 = 1 << 20;
/// How long a move waits at a time, at most, for its turn or as it is ahead of its schedule; in that case, at least.
const WAIT_MAX: Duration = Duration::from_millis(500);
const WAIT_MIN: Duration = Duration::from_millis(10);
/// How long a move waits for a guest's requests at a time.
const LOOK: Duration = Duration::from_millis(2);
/// Takes what there is to say of a move after each of its steps.
type OnMove = Box<dyn Fn(Report) + Send>;

/// What a move minds beside its limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Care {
    /// It is to be over by then, and no sooner than it must for that.
    pub(crate) time: Option<Duration>,
    /// The guest's latency may be so many times what it is without the move.
    pub(crate) latency: Option<f64>,
}

/// See the module documentation. Before the disk's writes go to the target, an error ends the job, and nothing has happened to the disk. After
/// that the disk needs both directories: what fails is tried again.
pub(crate) struct DiskMove {
    moving: Box<dyn Move>,
    tell: OnMove,
    /// The last report.
    report: Report,
    /// Bytes written, of which `counted` whole steps are.
    written: u64,
    counted: u64,
    retry: Retry,
    share: RateShare,
    /// Bytes that the last step might write.
    most: u64,
    /// Bytes that the guest's latency allows for the next one.
    allowed: u64,
    schedule: Option<Schedule>,
    control: Option<Control>,
    /// It was said that it will not be over in time.
    is_late: bool,
}

impl fmt::Debug for DiskMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskMove").field("moving", &self.moving).finish_non_exhaustive()
    }
}

impl DiskMove {
    /// It writes when it has its turn of the host's rate.
    pub(crate) fn new(moving: Box<dyn Move>, care: Care, share: RateShare, tell: OnMove) -> Self {
        let report = moving.report();
        tell(report.clone());
        let schedule = care.time.map(|time| Schedule::new(time, Instant::now()));
        let control = care.latency.map(|factor| Control::new(factor, STEP, moving.requests().now()));
        let retry = Retry::default();
        Self {
            moving,
            tell,
            report,
            written: 0,
            counted: 0,
            retry,
            share,
            most: STEP,
            allowed: STEP,
            schedule,
            control,
            is_late: false,
        }
    }

    /// Until when the next step may wait for the sake of the guest.
    fn may_wait_until(&mut self) -> Option<Instant> {
        let (schedule, now) = (self.schedule?, Instant::now());
        // From the switch on it needs both directories: the sooner it is over the better.
        let report = (self.report.phase == Phase::Copying).then_some(&self.report)?;
        if let Some(late) = schedule.late_by(self.written, report.left_bytes, now).filter(|_| !self.is_late) {
            tracing::warn!(disk = %report.from.display(), seconds = late.as_secs(), "its move will be over so much later than asked for, at this rate");
            self.is_late = true;
        }
        let wait = schedule.may_wait(self.written, report.left_bytes, now).min(WAIT_MAX);
        (wait >= WAIT_MIN).then(|| now + wait)
    }

    /// When to look again, unless the guest's latency allows a step; else how many bytes.
    fn control(&mut self) -> Result<u64, Instant> {
        let Some(control) = &mut self.control else { return Ok(STEP) };
        let requests = self.moving.requests();
        for Timed { kind, began, ended } in requests.take_timed() {
            control.guest(kind, began, ended);
        }
        let now = requests.now();
        match control.allowed(now) {
            Allowed::Bytes(bytes) => Ok(bytes),
            Allowed::NotBefore(time) => Err(Instant::now() + time.saturating_sub(now).min(LOOK)),
        }
    }

    /// When to look again, unless it is its turn.
    fn turn_at(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let wait = self.share.wait(self.most, now).min(WAIT_MAX);
        (!wait.is_zero()).then(|| now + wait)
    }
}

impl Work for DiskMove {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.counted + self.report.left_bytes.div_ceil(STEP) + 1
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        if self.moving.phase() == Phase::Whole {
            return Ok(Next::End);
        }
        let until = self.retry.not_before().or_else(|| self.may_wait_until());
        if let Some(until) = until.or_else(|| self.turn_at()) {
            return Ok(Next::WaitUntil(until));
        }
        match self.control() {
            Ok(bytes) => {
                self.allowed = bytes;
                Ok(Next::Step(()))
            }
            Err(until) => Ok(Next::WaitUntil(until)),
        }
    }

    fn apply(&mut self, (): (), most: u64) -> Result<Step, Error> {
        self.most = most.min(STEP);
        let most = self.most.min(self.share.step_bytes()).min(self.allowed);
        let began = self.moving.requests().now();
        let done = self.moving.step(most);
        if let Some(control) = &mut self.control {
            control.began(most);
            control.ended(most, began, self.moving.requests().now());
        }
        self.report = self.moving.report();
        (self.tell)(self.report.clone());
        match done {
            Ok(bytes) => {
                self.retry.worked();
                self.written += bytes;
                self.share.wrote(bytes, Instant::now());
                // Steps are of about a MiB, and those that only look write nothing.
                let is_part = self.written / STEP <= self.counted;
                self.counted += u64::from(!is_part);
                Ok(Step { bytes, is_part, ..Step::default() })
            }
            Err(error) if self.moving.phase() == Phase::Copying => Err(error.into()),
            Err(error) => {
                tracing::error!(%error, "a move is tried again: the disk needs the directory that it came from");
                Ok(self.retry.failed(told(&error)))
            }
        }
    }
}
