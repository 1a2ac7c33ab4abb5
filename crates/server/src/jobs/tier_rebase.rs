//! Moves a tiered disk in use to another version of its base: see [`Rebasing`].

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_backup::{Rebase, RebaseOptions};
use vmstrata_disk::Resources;
use vmstrata_job::{Next, Step, Work};
use vmstrata_tier::{Rebasing, Tiered};

use crate::error::Error;

/// Bytes of a step.
const STEP: u64 = 1 << 20;
/// How often to look whether the engine has published it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// See the module documentation. A dry run counts the bytes that would be written.
pub(crate) struct TierRebase {
    tiered: Arc<Tiered>,
    /// The newest layer of the version, in the repository of the base.
    onto: PathBuf,
    options: RebaseOptions,
    resources: Arc<Resources>,
    is_dry_run: bool,
    stage: Stage,
    /// Steps that were taken, and those that there are at first.
    done: u64,
    steps: u64,
}

enum Stage {
    Cut,
    /// Dropped in this order: the draft is closed before it goes.
    Copy((Box<Rebase>, Rebasing)),
    Ship(Rebasing),
    Publish(Rebasing),
    Done,
}

impl fmt::Debug for TierRebase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TierRebase").field("onto", &self.onto).finish_non_exhaustive()
    }
}

impl TierRebase {
    /// Of a disk of so many bytes.
    pub(crate) fn new(
        (tiered, size): (Arc<Tiered>, u64),
        onto: &Path,
        options: RebaseOptions,
        resources: Arc<Resources>,
        is_dry_run: bool,
    ) -> Self {
        let (onto, steps) = (onto.to_owned(), 2 * size.div_ceil(STEP));
        Self { tiered, onto, options, resources, is_dry_run, stage: Stage::Cut, done: 0, steps }
    }

    fn begin(&self) -> Result<Stage, Error> {
        let rebasing = self.tiered.begin_rebase(&self.onto)?;
        let draft = rebasing.draft();
        let (states, mut options) = ((draft.disk, draft.onto), self.options.clone());
        options.allow_backing.extend(draft.layers.map(Path::to_owned));
        let rebase = match self.is_dry_run {
            true => Rebase::foresee(states, &options, &self.resources)?,
            false => Rebase::begin(states, draft.path, &options, &self.resources)?,
        };
        Ok(Stage::Copy((Box::new(rebase), rebasing)))
    }
}

impl Work for TierRebase {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        let left = match &self.stage {
            Stage::Cut => self.steps,
            Stage::Copy((rebase, _)) => rebase.left().div_ceil(STEP),
            Stage::Ship(_) | Stage::Publish(_) | Stage::Done => 0,
        };
        self.done + left + 1
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        Ok(match &self.stage {
            Stage::Cut | Stage::Copy(..) | Stage::Ship(_) => Next::Step(()),
            Stage::Publish(rebasing) if rebasing.is_published()? => Next::End,
            Stage::Publish(_) => Next::WaitUntil(Instant::now() + LOOK_EVERY),
            Stage::Done => Next::End,
        })
    }

    fn apply(&mut self, (): (), most: u64) -> Result<Step, Error> {
        self.done += 1;
        let mut differing = 0;
        self.stage = match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Cut => self.begin()?,
            Stage::Copy(mut copying) => {
                differing = copying.0.step(most.min(STEP))?;
                match copying.0.is_done() {
                    false => Stage::Copy(copying),
                    true if self.is_dry_run => Stage::Done,
                    true => Stage::Ship(copying.1),
                }
            }
            Stage::Ship(mut rebasing) => {
                rebasing.ship()?;
                Stage::Publish(rebasing)
            }
            other => other,
        };
        let bytes = if self.is_dry_run { 0 } else { differing };
        Ok(Step { bytes, local_bytes: differing, ..Step::default() })
    }
}
