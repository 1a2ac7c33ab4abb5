//! The image of a disk that is written on this host already is read, and becomes the first epoch of a tiered disk.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_job::{Next, Step, Work};
use vmstrata_tier::{Attaching, Tiered};
use vmstrata_types::told;

use super::{Kind, Retry};
use crate::error::Error;

/// The kind of [`TierAttach`].
pub(crate) const TIER_ATTACH: Kind =
    Kind { name: "tier_attach", unit: "MiB", removes_files: false, yields: true };

/// Bytes of a step.
const STEP: u64 = 1 << 20;

/// A disk that is being attached, for as long as it is: a job that ends before that leaves it to the next one.
pub(crate) type Attached = Arc<Mutex<Option<Attaching>>>;

/// See the module documentation.
pub(crate) struct TierAttach {
    attached: Attached,
    total: u64,
    /// Takes what publishes the disk from then on.
    then: Box<dyn Fn(Tiered) + Send>,
    retry: Retry,
}

impl fmt::Debug for TierAttach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TierAttach").field("attached", &self.attached).finish_non_exhaustive()
    }
}

impl TierAttach {
    pub(crate) fn new(attached: Attached, then: Box<dyn Fn(Tiered) + Send>) -> Self {
        let left = attached.lock().as_ref().map_or(0, |attaching| attaching.bytes().1);
        let total = left.div_ceil(STEP) + 1;
        Self { attached, total, then, retry: Retry::default() }
    }
}

impl Work for TierAttach {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.total
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        if let Some(time) = self.retry.not_before() {
            return Ok(Next::WaitUntil(time));
        }
        Ok(if self.attached.lock().is_some() { Next::Step(()) } else { Next::End })
    }

    fn apply(&mut self, (): (), most: u64) -> Result<Step, Error> {
        let mut attached = self.attached.lock();
        let Some(attaching) = attached.as_mut() else { return Ok(Step::default()) };
        let left = attaching.bytes().1;
        let done = if left > 0 { attaching.read(most.min(STEP)) } else { attaching.publish().map(|()| 0) };
        match done {
            Ok(bytes) if left > 0 => {
                self.retry.worked();
                Ok(Step { bytes, is_part: !(left - bytes).is_multiple_of(STEP), ..Step::default() })
            }
            Ok(_) => {
                let attaching = attached.take().expect("seen above");
                drop(attached);
                (self.then)(attaching.finish()?);
                Ok(Step::default())
            }
            Err(error @ vmstrata_tier::Error::Fenced { .. }) => Err(error.into()),
            Err(error) => Ok(self.retry.failed(told(&error))),
        }
    }
}
