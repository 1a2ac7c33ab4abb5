//! A disk in use moves to another directory.

use std::fmt;

use vmstrata_job::{Next, Step, Work};
use vmstrata_migrate::{Moving, Phase, Report};
use vmstrata_types::told;

use super::{Kind, Retry};
use crate::error::Error;

/// The kind of [`DiskMove`].
pub(crate) const MOVE: Kind = Kind { name: "move", unit: "MiB", removes_files: false };

/// Bytes of a step.
const STEP: u64 = 1 << 20;
/// Takes what there is to say of a move after each of its steps.
type OnMove = Box<dyn Fn(Report) + Send>;

/// See the module documentation. Before the disk's writes go to the target, an error ends the job, and nothing has happened to the disk. After
/// that the disk needs both directories: what fails is tried again.
pub(crate) struct DiskMove {
    moving: Moving,
    tell: OnMove,
    /// Bytes written, of which `counted` whole steps are.
    written: u64,
    counted: u64,
    retry: Retry,
}

impl fmt::Debug for DiskMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskMove").field("moving", &self.moving).finish_non_exhaustive()
    }
}

impl DiskMove {
    pub(crate) fn new(moving: Moving, tell: OnMove) -> Self {
        tell(moving.report());
        Self { moving, tell, written: 0, counted: 0, retry: Retry::default() }
    }
}

impl Work for DiskMove {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.counted + self.moving.report().left_bytes.div_ceil(STEP) + 1
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        if let Some(time) = self.retry.not_before() {
            return Ok(Next::WaitUntil(time));
        }
        Ok(if self.moving.phase() == Phase::Whole { Next::End } else { Next::Step(()) })
    }

    fn apply(&mut self, (): (), most: u64) -> Result<Step, Error> {
        let done = self.moving.step(most.min(STEP));
        (self.tell)(self.moving.report());
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
