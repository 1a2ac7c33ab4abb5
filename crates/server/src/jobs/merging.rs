//! Dropping layers of a served disk: what only they hold is pulled up, their files go.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_disk::Disk;
use vmstrata_disk::merge::{Action, Kept, Merge, MergeFault, MergeOptions, MergeRange, all_of, ranges_of};

use super::{Step, Work};
use crate::error::Error;

/// Bytes a second unless asked otherwise: little enough for guests not to feel it.
pub(crate) const DEFAULT_LIMIT: u64 = 64 << 20;

/// Drops snapshots. Neighbours go together, the newest first.
pub(crate) type SnapshotDelete = Merging<false>;
/// Drops everything below the active layer.
pub(crate) type Flatten = Merging<true>;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Merging<const FLATTEN: bool> {
    disk: Arc<Disk>,
    options: MergeOptions,
    waiting: VecDeque<MergeRange>,
    merge: Option<Merge>,
    total: u64,
}

impl Merging<false> {
    /// Finds the layers of these snapshots.
    ///
    /// # Errors
    /// No such snapshot; layers that cannot be dropped; another merge that ended at this moment.
    pub(crate) fn new(disk: Arc<Disk>, snapshots: &[String], options: MergeOptions) -> Result<Self, Error> {
        let ranges = ranges_of(disk.path(), snapshots, &options.open)?;
        let work = Self::of(disk, ranges.clone().into(), options)?;
        // From now on no one else drops layers. Ranges count from the base, so those that were meant are the same still.
        if ranges_of(work.disk.path(), snapshots, &work.options.open)? != ranges {
            return Err(vmstrata_disk::Error::from(MergeFault::LayersChanged).into());
        }
        Ok(work)
    }
}

impl Merging<true> {
    /// Finds the layers below the active one. A disk that is flat already makes a job of no steps.
    ///
    /// # Errors
    /// Layers that cannot be dropped; a snapshot that was taken at this moment.
    pub(crate) fn new(disk: Arc<Disk>, options: MergeOptions) -> Result<Self, Error> {
        let range = all_of(disk.layer_count());
        let work = Self::of(disk, range.into_iter().collect(), options)?;
        if all_of(work.disk.layer_count()) != range {
            return Err(vmstrata_disk::Error::from(MergeFault::LayersChanged).into());
        }
        Ok(work)
    }
}

impl<const FLATTEN: bool> Merging<FLATTEN> {
    fn of(disk: Arc<Disk>, mut waiting: VecDeque<MergeRange>, options: MergeOptions) -> Result<Self, Error> {
        let ranges = waiting.len() as u64;
        let merge = waiting.pop_front().map(|range| Merge::of_disk(&disk, range, &options)).transpose()?;
        let total = merge.as_ref().map_or(0, Merge::total) * ranges;
        Ok(Self { disk, options, waiting, merge, total })
    }
}

impl<const FLATTEN: bool> Work for Merging<FLATTEN> {
    type Action = Action;
    const KIND: &'static str = if FLATTEN { "flatten" } else { "snapshot_delete" };
    const UNIT: &'static str = "steps";

    fn total(&self) -> u64 {
        self.total
    }

    fn select(&mut self) -> Result<Option<Action>, Error> {
        while let Some(merge) = &self.merge {
            if let Some(action) = merge.select() {
                return Ok(Some(action));
            }
            let next = self.waiting.pop_front();
            // The one before lets go of the disk first.
            self.merge = None;
            self.merge = next.map(|range| Merge::of_disk(&self.disk, range, &self.options)).transpose()?;
        }
        Ok(None)
    }

    fn apply(&mut self, action: Action) -> Result<Step, Error> {
        let Some(merge) = &mut self.merge else { return Ok(Step::default()) };
        let bytes = merge.apply(action)?;
        let failure = if action == Action::Remove { stays(&merge.merged().kept) } else { None };
        Ok(Step { bytes, failure })
    }
}

/// What there is to say of files that stay though nobody asked for it.
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
