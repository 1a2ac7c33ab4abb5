//! A disk in use moves to another directory, or to a flat copy.

use std::fmt;
use std::time::{Duration, Instant};

use vmstrata_job::{Next, Step, Work};
use vmstrata_migrate::{Move, Phase, Report, Schedule};
use vmstrata_types::told;

use super::{Kind, Retry};
use crate::error::Error;

/// The kind of [`DiskMove`].
pub(crate) const MOVE: Kind = Kind { name: "move", unit: "MiB", removes_files: false, yields: true };

/// Bytes of a step.
const STEP: u64 = 1 << 20;
/// How long a move that is ahead of its schedule waits at a time, at most, and at least.
const WAIT_MAX: Duration = Duration::from_millis(500);
const WAIT_MIN: Duration = Duration::from_millis(10);
/// Takes what there is to say of a move after each of its steps.
type OnMove = Box<dyn Fn(Report) + Send>;

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
    schedule: Option<Schedule>,
    /// It was said that it will not be over in time.
    is_late: bool,
}

impl fmt::Debug for DiskMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskMove").field("moving", &self.moving).finish_non_exhaustive()
    }
}

impl DiskMove {
    /// With `time`, it is to be over by then.
    pub(crate) fn new(moving: Box<dyn Move>, time: Option<Duration>, tell: OnMove) -> Self {
        let report = moving.report();
        tell(report.clone());
        let schedule = time.map(|time| Schedule::new(time, Instant::now()));
        let retry = Retry::default();
        Self { moving, tell, report, written: 0, counted: 0, retry, schedule, is_late: false }
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
}

impl Work for DiskMove {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.counted + self.report.left_bytes.div_ceil(STEP) + 1
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        if let Some(time) = self.retry.not_before().or_else(|| self.may_wait_until()) {
            return Ok(Next::WaitUntil(time));
        }
        Ok(if self.moving.phase() == Phase::Whole { Next::End } else { Next::Step(()) })
    }

    fn apply(&mut self, (): (), most: u64) -> Result<Step, Error> {
        let done = self.moving.step(most.min(STEP));
        self.report = self.moving.report();
        (self.tell)(self.report.clone());
        match done {
            Ok(bytes) => {
                self.retry.worked();
                self.written += bytes;
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
