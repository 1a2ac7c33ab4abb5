//! A disk's layers in repositories come to this host, or are proved once more.

use std::io;
use std::time::{Duration, Instant};

use vmstrata_job::{Next, Step, Work};
use vmstrata_tier::{Passed, Walk};

use super::{Kind, Retry};
use crate::error::Error;
use crate::hours::Hours;

/// The kind that fills.
pub(crate) const REPLICA_FILL: Kind =
    Kind { name: "replica_fill", unit: "MiB", removes_files: false, yields: true };
/// The kind that proves.
pub(crate) const REPLICA_SCRUB: Kind =
    Kind { name: "replica_scrub", unit: "MiB", removes_files: false, yields: true };

/// How often to look whether the hours have come: clocks are set.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct ReplicaWalk {
    walk: Walk,
    hours: Option<Hours>,
    is_done: bool,
    retry: Retry,
}

impl ReplicaWalk {
    pub(crate) fn new(walk: Walk, hours: Option<Hours>) -> Self {
        Self { walk, hours, is_done: false, retry: Retry::default() }
    }
}

impl Work for ReplicaWalk {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.walk.steps()
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        if self.is_done {
            return Ok(Next::End);
        }
        if self.hours.is_some_and(|hours| !hours.is_now()) {
            return Ok(Next::WaitUntil(Instant::now() + LOOK_EVERY));
        }
        Ok(self.retry.not_before().map_or(Next::Step(()), Next::WaitUntil))
    }

    fn apply(&mut self, (): (), _: u64) -> Result<Step, Error> {
        match self.walk.step() {
            Ok(Some(Passed { read_bytes, image_bytes, is_part })) => {
                self.retry.worked();
                Ok(Step { bytes: read_bytes, local_bytes: image_bytes, is_part, ..Step::default() })
            }
            Ok(None) => {
                self.is_done = true;
                // The end is no step.
                Ok(Step { is_part: true, ..Step::default() })
            }
            Err(source) if source.kind() == io::ErrorKind::InvalidData => Err(Error::Replica { source }),
            Err(error) => Ok(self.retry.failed(error.to_string())),
        }
    }
}
