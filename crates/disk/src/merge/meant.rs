//! Which layers are meant, whatever happens to names and numbers meanwhile.
//!
//! A disk in use gets layers while others are dropped, and a name that has become free may be given again: what was asked for is
//! known by its files.

use std::path::Path;

use vmstrata_store::FileId;

use super::{MergeFault, MergeRange};
use crate::chain::OpenOptions;
use crate::error::{Error, Result};
use crate::layers::index_of;
use crate::snapshot::{self, Snapshot};

/// Layers of a disk that are to be dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meant {
    files: Vec<FileId>,
}

impl Meant {
    /// These snapshots of the disk. `A..B` is the snapshots A and B, in either order, and all layers between them; a snapshot
    /// that is called so goes first.
    ///
    /// # Errors
    /// No such snapshot; otherwise as [`snapshot::list`].
    pub fn named(disk: &Path, names: &[String], options: &OpenOptions) -> Result<Self> {
        Self::named_in(disk, names, &snapshot::list(disk, options)?)
    }

    pub(super) fn named_in(disk: &Path, names: &[String], snapshots: &[Snapshot]) -> Result<Self> {
        // The newest of that name is the one people mean.
        let depth_of = |name: &str| {
            let found = snapshot::pick(snapshots, name).map_err(|error| error.in_file(disk))?;
            Ok::<_, Error>(found.depth - 1)
        };
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let (from, to) = match (depth_of(name), name.split_once("..")) {
                (Ok(depth), _) => (depth, depth),
                (Err(_), Some((from, to))) => (depth_of(from)?, depth_of(to)?),
                (Err(error), None) => return Err(error),
            };
            files.extend(snapshots[from.min(to)..=from.max(to)].iter().map(|snapshot| snapshot.file));
        }
        Ok(Self { files })
    }

    /// All layers below the disk's active one.
    ///
    /// # Errors
    /// As [`snapshot::list`].
    pub fn below(disk: &Path, options: &OpenOptions) -> Result<Self> {
        let files = snapshot::list(disk, options)?.iter().map(|snapshot| snapshot.file).collect();
        Ok(Self { files })
    }

    /// Where those are that the disk still stands on, in as few ranges as possible, the newest first: in that order no range
    /// moves another.
    ///
    /// # Errors
    /// What would be copied into a layer of another disk; otherwise as [`snapshot::list`].
    pub fn ranges(&self, disk: &Path, options: &OpenOptions) -> Result<Vec<MergeRange>> {
        self.ranges_in(disk, &snapshot::list(disk, options)?)
    }

    pub(super) fn ranges_in(&self, disk: &Path, snapshots: &[Snapshot]) -> Result<Vec<MergeRange>> {
        let mut ranges: Vec<MergeRange> = Vec::new();
        for snapshot in snapshots.iter().filter(|snapshot| self.files.contains(&snapshot.file)) {
            let layer = snapshots.len() - snapshot.depth;
            match ranges.last_mut() {
                Some(range) if range.first.index() == layer + 1 => range.first = index_of(layer),
                _ => ranges.push(MergeRange { first: index_of(layer), last: index_of(layer) }),
            }
        }
        // All are looked at before the first is merged.
        let target = |range: &MergeRange| snapshots.iter().rev().nth(range.target().index());
        match ranges.iter().find_map(|range| target(range)?.owner.clone()) {
            Some(owner) => Err(Error::from(MergeFault::OfAnotherDisk { disk: owner }).in_file(disk)),
            None => Ok(ranges),
        }
    }
}
