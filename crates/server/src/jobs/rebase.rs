//! A disk in use comes to stand on another version of its base.
//!
//! ```text
//!   freeze   v1 ◄── state ◄── active          the guest goes on
//!   copy     v2 ◄── draft                     what differs between the state and v2, then compared
//!   stand    v2 ◄── draft ◄── active          one sector of the active layer's header written
//!   merge    v2 ◄──────────── active          the draft is dropped as a snapshot is
//! ```
//!
//! The state's label says that it is there for the sake of a rebase, and which pin is made for that. So whoever finds the state, this job or
//! the next server, knows what is left to do ([`left_of`]): the state's layer is the frozen one until the disk stands on the other version.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_backup::{Rebase, RebaseOptions};
use vmstrata_disk::merge::{Action, MergeOptions};
use vmstrata_disk::snapshot::{REBASE_LABEL, Snapshot, SnapshotInfo, frozen_path, list, now_ns};
use vmstrata_disk::{Disk, Format, OpenOptions, Resources, copy_access, published_below, unfinished_copy};
use vmstrata_job::{Next, Step, Work};
use vmstrata_tier::{BaseState, PinId, RepositoryAddress, release_clone};

use super::{Kind, Merging};
use crate::error::Error;

/// The kind of [`DiskRebase`], and of [`TierRebase`](super::TierRebase).
pub(crate) const REBASE: Kind = Kind { name: "rebase", unit: "MiB", removes_files: false, yields: true };

/// Bytes of a step.
const STEP: u64 = 1 << 20;
/// How the names of states begin that are there for the sake of a rebase.
const PREFIX: &str = "rebase-";

/// What is rebased, and how its files are opened.
pub(crate) struct Rebased {
    pub(crate) disk: Arc<Disk>,
    pub(crate) open: OpenOptions,
    /// Where the base's layers are, unless in their directory.
    pub(crate) address: Option<RepositoryAddress>,
}

/// See the module documentation.
pub(crate) struct DiskRebase {
    rebased: Rebased,
    base: BaseState,
    options: RebaseOptions,
    resources: Arc<Resources>,
    is_dry_run: bool,
    stage: Stage,
    /// Steps that were taken.
    done: u64,
}

enum Stage {
    Freeze,
    Copy { frozen: PathBuf, name: String, rebase: Box<Rebase> },
    Merge(Box<Merging>),
    Done,
}

impl fmt::Debug for DiskRebase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskRebase").field("base", &self.base).finish_non_exhaustive()
    }
}

impl DiskRebase {
    /// Onto that version. A dry run counts the bytes that would be written, of a state that it takes for that.
    pub(crate) fn new(
        rebased: Rebased,
        base: BaseState,
        options: RebaseOptions,
        resources: Arc<Resources>,
        is_dry_run: bool,
    ) -> Self {
        Self { rebased, base, options, resources, is_dry_run, stage: Stage::Freeze, done: 0 }
    }

    fn freeze(&self) -> Result<Stage, Error> {
        let disk = &self.rebased.disk;
        let (taken_ns, id) = (now_ns(), PinId::draw());
        let name = format!("{PREFIX}{taken_ns}");
        let pin = if self.is_dry_run { String::new() } else { id.to_string() };
        let labels = vec![(REBASE_LABEL.to_owned(), pin)];
        let info = SnapshotInfo { name: name.clone(), taken_ns, labels, ..SnapshotInfo::default() };
        let frozen = disk.snapshot(&info)?.layer;
        if !self.is_dry_run {
            self.base.keep_for(disk.path(), id)?;
        }
        let states = (&*frozen, self.base.layer());
        let rebase = match self.is_dry_run {
            true => Rebase::foresee(states, &self.options, &self.resources)?,
            false => {
                let draft = unfinished_copy(disk.path());
                remove_if_there(&draft)?;
                Rebase::begin(states, &draft, &self.options, &self.resources)?
            }
        };
        Ok(Stage::Copy { frozen, name, rebase: Box::new(rebase) })
    }

    /// Has the disk stand on the draft, which is whole; and goes on with what is left to do.
    fn stand(&self, frozen: &Path, name: &str) -> Result<Stage, Error> {
        let disk = &self.rebased.disk;
        if !self.is_dry_run {
            let draft = unfinished_copy(disk.path());
            let file = File::options().write(true).open(&draft);
            let failed = |source| Error::System { action: "open the new layer", source };
            copy_access(frozen, &file.map_err(failed)?)?;
            let new = frozen_path(disk.path(), &format!("{name}-onto"), Format::Qcow2);
            disk.replace_layer(frozen, &draft, &new.expect("it names a file"))?;
        }
        let states = left_of(&self.rebased)?;
        let options = MergeOptions { open: self.rebased.open.clone(), ..MergeOptions::default() };
        Ok(Stage::Merge(Box::new(Merging::snapshots(Arc::clone(disk), &states, options)?)))
    }
}

impl Work for DiskRebase {
    type Action = Option<Action>;
    type Error = Error;

    fn total(&self) -> u64 {
        let left = match &self.stage {
            Stage::Freeze => 2 * self.rebased.disk.size().div_ceil(STEP),
            Stage::Copy { rebase, .. } => rebase.left().div_ceil(STEP),
            Stage::Merge(_) | Stage::Done => 0,
        };
        self.done + left + 1
    }

    fn select(&mut self) -> Result<Next<Option<Action>>, Error> {
        Ok(match &mut self.stage {
            Stage::Freeze | Stage::Copy { .. } => Next::Step(None),
            Stage::Merge(merging) => match merging.select()? {
                Next::Step(action) => Next::Step(Some(action)),
                Next::WaitUntil(time) => Next::WaitUntil(time),
                Next::End => Next::End,
            },
            Stage::Done => Next::End,
        })
    }

    fn apply(&mut self, action: Option<Action>, most: u64) -> Result<Step, Error> {
        self.done += 1;
        if let (Stage::Merge(merging), Some(action)) = (&mut self.stage, action) {
            return merging.apply(action, most);
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        let mut differing = 0;
        self.stage = match stage {
            Stage::Freeze => self.freeze()?,
            Stage::Copy { frozen, name, mut rebase } => {
                differing = rebase.step(most.min(STEP))?;
                if rebase.is_done() {
                    // Its files are closed before the layers change.
                    drop(rebase);
                    self.stand(&frozen, &name)?
                } else {
                    Stage::Copy { frozen, name, rebase }
                }
            }
            other => other,
        };
        let bytes = if self.is_dry_run { 0 } else { differing };
        Ok(Step { bytes, local_bytes: differing, ..Step::default() })
    }
}

/// Does what is left to do of a disk's rebases but for dropping their states, which are returned: removes an unfinished draft, and releases
/// the pin that nothing needs.
///
/// # Errors
/// A chain or a repository that cannot be read, a pin that cannot be released: it can be tried again.
pub(crate) fn left_of(rebased: &Rebased) -> Result<Vec<String>, Error> {
    let disk = rebased.disk.path();
    let states = list(disk, &rebased.open)?;
    let states: Vec<(&Snapshot, &SnapshotInfo, &str)> = states.iter().filter_map(rebase_of).collect();
    if states.is_empty() {
        return Ok(Vec::new());
    }
    remove_if_there(&unfinished_copy(disk))?;
    let below = published_below(disk, &rebased.open)?;
    for (state, info, pin) in states.iter().filter(|(.., pin)| !pin.is_empty()) {
        let Some(below) = &below else { continue };
        let frozen = frozen_path(disk, &info.name, Format::Qcow2).expect("it names a file");
        let is_undone = state.layer.file_name() == frozen.file_name();
        if !is_undone && frozen.symlink_metadata().is_ok() {
            tracing::warn!(layer = %frozen.display(), "stays, as something needs it, and so does the pin of the version below it");
            continue;
        }
        release_clone(disk, (below, rebased.address.as_ref()), |other| {
            (other.id.to_string() == **pin) == is_undone
        })?;
    }
    Ok(states.iter().map(|(_, info, _)| info.name.clone()).collect())
}

/// What a state says of the rebase that it is there for, with the id of its pin.
fn rebase_of(state: &Snapshot) -> Option<(&Snapshot, &SnapshotInfo, &str)> {
    let info = state.info.as_ref().filter(|_| state.is_own())?;
    let (_, pin) = info.labels.iter().find(|(label, _)| label == REBASE_LABEL)?;
    Some((state, info, pin))
}

/// Whether a layer may be there for the sake of a rebase, by its name.
pub(crate) fn may_be_of_rebase(layer: &Path) -> bool {
    layer.file_name().is_some_and(|name| name.to_string_lossy().contains(&format!(".{PREFIX}")))
}

fn remove_if_there(draft: &Path) -> Result<(), Error> {
    match fs::remove_file(draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::System { action: "remove an unfinished layer", source: error })
        }
        _ => Ok(()),
    }
}
