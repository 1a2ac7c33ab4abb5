//! Dropping layers of a served disk: what only they hold is pulled up, their files go.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_disk::Disk;
use vmstrata_disk::merge::{Action, Kept, LayerRef, Merge, MergeFault, MergeOptions, MergeRange, Selection};
use vmstrata_job::{Next, Step, Work};

use super::Kind;
use crate::error::Error;

/// Bytes a second unless asked otherwise: little enough for guests not to feel it.
pub(crate) const DEFAULT_LIMIT: u64 = 64 << 20;

/// Drops snapshots. Neighbours go together, the newest first.
pub(crate) const SNAPSHOT_DELETE: Kind = kind("snapshot_delete");
/// Drops a range of layers, with or without names.
pub(crate) const MERGE: Kind = kind("merge");
/// Drops everything below the active layer, or down to a layer that stays.
pub(crate) const FLATTEN: Kind = kind("flatten");

const fn kind(name: &'static str) -> Kind {
    Kind { name, unit: "steps", removes_files: true, yields: false }
}

/// How often to begin again, without having come any further, when a snapshot is taken at a moment at which the layers must not
/// change.
const AGAIN_MAX: u32 = 20;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Merging {
    disk: Arc<Disk>,
    options: MergeOptions,
    selection: Selection,
    waiting: VecDeque<MergeRange>,
    merge: Option<Merge>,
    total: u64,
    again: u32,
}

impl Merging {
    /// Finds the layers of these snapshots.
    ///
    /// # Errors
    /// No such snapshot; layers that cannot be dropped; another merge that ended at this moment.
    pub(crate) fn snapshots(
        disk: Arc<Disk>,
        snapshots: &[String],
        options: MergeOptions,
    ) -> Result<Self, Error> {
        let selection = Selection::named(disk.path(), snapshots, &options.open)?;
        Self::of(disk, selection, options)
    }

    /// Finds the layers from one to the other.
    ///
    /// # Errors
    /// Named snapshots among them, unless `drop_snapshots`; no such layers; named ones of another disk; layers that cannot be dropped; another merge that ended at this moment.
    pub(crate) fn layers(
        disk: Arc<Disk>,
        ends: [&LayerRef; 2],
        drop_snapshots: bool,
        options: MergeOptions,
    ) -> Result<Self, Error> {
        let selection = Selection::between(disk.path(), ends[0], ends[1], &options.open)?;
        if !drop_snapshots {
            selection.refuse_loss(disk.path(), &options.open)?;
        }
        Self::of(disk, selection, MergeOptions { beyond_own: true, ..options })
    }

    /// Finds the layers below the active one, down to the one that it is to stand on. A disk that is flat already makes a job of no
    /// steps. A snapshot that is taken meanwhile stays: the layer that was active then is what gets flat.
    ///
    /// # Errors
    /// Named snapshots that would go, unless `drop_snapshots`; no such layer to stand on; layers that cannot be dropped; a snapshot that was taken at this moment.
    pub(crate) fn flatten(
        disk: Arc<Disk>,
        onto: Option<&LayerRef>,
        drop_snapshots: bool,
        options: MergeOptions,
    ) -> Result<Self, Error> {
        let selection = match onto {
            Some(base) => Selection::above(disk.path(), base, &options.open)?,
            None => Selection::below(disk.path(), &options.open)?,
        };
        if !drop_snapshots {
            selection.refuse_loss(disk.path(), &options.open)?;
        }
        Self::of(disk, selection, options)
    }

    fn of(disk: Arc<Disk>, selection: Selection, options: MergeOptions) -> Result<Self, Error> {
        let mut work =
            Self { disk, options, selection, waiting: VecDeque::new(), merge: None, total: 0, again: 0 };
        if let Err(error) = work.begin() {
            work.or_again(error)?;
        }
        work.total = work.merge.as_ref().map_or(0, Merge::total) * (work.waiting.len() as u64 + 1);
        Ok(work)
    }

    /// Begins with the newest of what is left to drop.
    fn begin(&mut self) -> Result<(), Error> {
        let ranges = self.selection.ranges(self.disk.path(), &self.options.open)?;
        self.waiting = ranges.clone().into();
        self.merge_next()?;
        // From now on no other merge drops layers. Ranges count from the base, so the selected ones still name the same layers.
        if self.selection.ranges(self.disk.path(), &self.options.open)? != ranges {
            return Err(vmstrata_disk::Error::from(MergeFault::LayersChanged).into());
        }
        Ok(())
    }

    /// Begins again if the error says that a snapshot was taken at a moment at which the layers must not change: what was
    /// copied is found, and what was dropped is not there any more.
    fn or_again(&mut self, mut error: Error) -> Result<(), Error> {
        loop {
            let Error::Disk(cause) = &error else { return Err(error) };
            let is_changed = matches!(cause.fault(), Some(MergeFault::LayersChanged));
            if !is_changed || self.again == AGAIN_MAX {
                return Err(error);
            }
            self.again += 1;
            self.merge = None;
            match self.begin() {
                Ok(()) => return Ok(()),
                Err(again) => error = again,
            }
        }
    }

    /// Begins with the next range; the one before lets go of the disk first.
    fn merge_next(&mut self) -> Result<(), Error> {
        let next = self.waiting.pop_front();
        self.merge = None;
        self.merge = next.map(|range| Merge::of_disk(&self.disk, range, &self.options)).transpose()?;
        Ok(())
    }
}

impl Work for Merging {
    type Action = Action;
    type Error = Error;

    fn total(&self) -> u64 {
        self.total
    }

    fn select(&mut self) -> Result<Next<Action>, Error> {
        while let Some(merge) = &self.merge {
            if let Some(action) = merge.select() {
                return Ok(Next::Step(action));
            }
            if let Err(error) = self.merge_next() {
                self.or_again(error)?;
            }
        }
        Ok(Next::End)
    }

    fn apply(&mut self, action: Action, most: u64) -> Result<Step, Error> {
        let Some(merge) = &mut self.merge else { return Ok(Step::default()) };
        merge.copy_at_most(most);
        let bytes = match merge.apply(action) {
            Ok(bytes) => bytes,
            Err(error) => return self.or_again(error.into()).map(|()| Step::default()),
        };
        self.again = 0;
        if action != Action::Remove {
            return Ok(Step { bytes, is_part: merge.is_within_action(), ..Step::default() });
        }
        let merged = merge.merged();
        Ok(Step {
            bytes,
            removed_files: merged.removed.len() as u64,
            freed_bytes: merged.freed_bytes,
            failure: stays(&merged.kept),
            ..Step::default()
        })
    }
}

/// What there is to say of files that stay without having been asked to.
fn stays(kept: &[(PathBuf, Kept)]) -> Option<String> {
    let mut kept = kept.iter().filter(|(_, why)| *why != Kept::Asked);
    let (path, why) = kept.next()?;
    let more = match kept.count() {
        0 => String::new(),
        1 => "; and another file".to_owned(),
        more => format!("; and {more} other files"),
    };
    Some(format!("{} stays: {why}{more}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_stay_are_told_unless_that_was_asked_for() {
        let kept = |count: usize, why: Kept| vec![(PathBuf::from("a.qcow2"), why); count];
        assert_eq!(stays(&kept(3, Kept::Asked)), None);
        assert_eq!(stays(&kept(1, Kept::InUse)).unwrap(), "a.qcow2 stays: it is in use");
        let many = [kept(1, Kept::Asked), kept(3, Kept::InUse)].concat();
        assert_eq!(stays(&many).unwrap(), "a.qcow2 stays: it is in use; and 2 other files");
    }
}
