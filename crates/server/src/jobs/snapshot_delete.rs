//! Dropping snapshots from a served disk: what only they hold is pulled up, their files go.

use std::collections::VecDeque;
use std::sync::Arc;

use vmstrata_disk::merge::{Action, Merge, MergeOptions, MergeRange, ranges_of};
use vmstrata_disk::{Disk, OpenOptions};

use super::{Step, Work};
use crate::error::Error;

/// Bytes a second unless asked otherwise: little enough for guests not to feel it.
pub(crate) const DEFAULT_LIMIT: u64 = 64 << 20;

/// See the module documentation. Neighbouring snapshots go together, the newest first.
#[derive(Debug)]
pub(crate) struct SnapshotDelete {
    disk: Arc<Disk>,
    options: MergeOptions,
    waiting: VecDeque<MergeRange>,
    merge: Option<Merge>,
    /// Files that stay, and why, not told yet.
    kept: VecDeque<String>,
    total: u64,
}

impl SnapshotDelete {
    /// Finds the layers of these snapshots.
    ///
    /// # Errors
    /// No such snapshot; layers that cannot be dropped.
    pub(crate) fn new(disk: Arc<Disk>, snapshots: &[String], open: OpenOptions) -> Result<Self, Error> {
        let mut waiting: VecDeque<_> = ranges_of(disk.path(), snapshots, &open)?.into();
        let options = MergeOptions { open, ..MergeOptions::default() };
        let ranges = waiting.len() as u64;
        let merge = waiting.pop_front().map(|range| Merge::of_disk(&disk, range, &options)).transpose()?;
        let total = merge.as_ref().map_or(0, Merge::total) * ranges;
        Ok(Self { disk, options, waiting, merge, kept: VecDeque::new(), total })
    }
}

impl Work for SnapshotDelete {
    type Action = Action;
    const KIND: &'static str = "snapshot_delete";
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
        if action == Action::Remove {
            let kept = merge.merged().kept.iter();
            self.kept.extend(kept.map(|(path, why)| format!("{} stays: {why}", path.display())));
        }
        Ok(Step { bytes, failure: self.kept.pop_front() })
    }
}
