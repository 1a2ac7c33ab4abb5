//! A disk in use moves to another directory.

use std::fmt;
use std::time::{Duration, Instant};

use vmstrata_job::{Next, Step, Work};
use vmstrata_migrate::{Moving, Phase, Report};
use vmstrata_types::told;

use super::Kind;
use crate::error::Error;

/// The kind of [`DiskMove`].
pub(crate) const MOVE: Kind = Kind { name: "move", unit: "MiB", removes_files: false };

/// Bytes of a step.
const STEP: u64 = 1 << 20;
/// How long to wait before what failed is tried again; twice as long each time.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

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
    retry: Duration,
    not_before: Option<Instant>,
}

impl fmt::Debug for DiskMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskMove").field("moving", &self.moving).finish_non_exhaustive()
    }
}

impl DiskMove {
    pub(crate) fn new(moving: Moving, tell: OnMove) -> Self {
        tell(moving.report());
        Self { moving, tell, written: 0, counted: 0, retry: RETRY[0], not_before: None }
    }
}

impl Work for DiskMove {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.counted + self.moving.report().left_bytes.div_ceil(STEP) + 1
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        if let Some(time) = self.not_before.take() {
            return Ok(Next::WaitUntil(time));
        }
        Ok(if self.moving.phase() == Phase::Whole { Next::End } else { Next::Step(()) })
    }

    fn apply(&mut self, (): (), most: u64) -> Result<Step, Error> {
        let done = self.moving.step(most.min(STEP));
        (self.tell)(self.moving.report());
        match done {
            Ok(did) => {
                self.retry = RETRY[0];
                self.written += did.bytes;
                // Steps are of about a MiB, and those that only look write nothing.
                let is_part = self.written / STEP <= self.counted;
                self.counted += u64::from(!is_part);
                Ok(Step { bytes: did.bytes, is_part, ..Step::default() })
            }
            Err(error) if self.moving.phase() == Phase::Copying => Err(error.into()),
            Err(error) => {
                tracing::error!(%error, "a move is tried again: the disk needs the directory that it came from");
                self.not_before = Some(Instant::now() + self.retry);
                self.retry = (2 * self.retry).min(RETRY[1]);
                Ok(Step { failure: Some(told(&error)), is_part: true, ..Step::default() })
            }
        }
    }
}
