//! Holds: snapshots that nothing may drop until the hold is released.
//!
//! A hold is a link in the directory of back-references beside the snapshot's file ([`crate::refs::back_refs`]), as a disk elsewhere that
//! stands on the file leaves one. Its name is the tag; it leads to the very state that is held, so a snapshot that gets the name
//! of a lost one is not held by what is left of that. The frozen file itself is not written.
//!
//! A merge looks for holds before it begins, and a stream again before it relinks. [`hold`] looks for the snapshot again after
//! the hold is there. So one of the two sees the other.

use std::io;
use std::path::Path;

use vmstrata_qcow2::SnapshotInfo;
use vmstrata_qcow2::snapshot_info::is_snapshot_name;

use super::fault::SnapshotFault;
use super::list::{Snapshot, State, find};
use crate::chain::OpenOptions;
use crate::error::Result;
use crate::refs::back_refs;

/// The tag of a hold that somebody places by hand and gives none.
pub const DEFAULT_TAG: &str = "manual";

/// Why a snapshot may not be dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "snapshot {name} is held ({}): release it with `vmstrata snapshot release {disk} {name} --tag {}`",
    tags.join(", "),
    tags[0]
)]
pub struct Held {
    /// The disk, for the command that releases it.
    pub disk: String,
    /// The snapshot.
    pub name: String,
    /// The tags of its holds; at least one.
    pub tags: Vec<String>,
}

impl Held {
    /// The holds of the snapshot `info` of `disk`, whose file is `layer`, if it has any.
    pub(crate) fn find(disk: &Path, layer: &Path, info: &SnapshotInfo) -> Option<Self> {
        // A directory of back-references that cannot be read keeps the file: see `back_refs::of_layer`.
        let tags = back_refs::holds(layer, info).unwrap_or_default();
        let (disk, name) = (disk.display().to_string(), info.name.clone());
        (!tags.is_empty()).then_some(Self { disk, name, tags })
    }
}

impl Snapshot {
    /// The tags of its holds, in order.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn holds(&self) -> io::Result<Vec<String>> {
        self.info.as_ref().map_or_else(|| Ok(Vec::new()), |info| back_refs::holds(&self.layer, info))
    }
}

impl State {
    /// Holds the snapshot that this state is. Returns whether there was no such hold. What is no snapshot cannot be held:
    /// then there is nothing to do.
    ///
    /// # Errors
    /// As [`hold`].
    pub fn hold(&self, tag: &str) -> Result<bool> {
        check_tag(tag)?;
        self.info.as_ref().map_or(Ok(false), |info| back_refs::hold(&self.path, tag, info))
    }

    /// Releases that hold. Returns whether there was one.
    ///
    /// # Errors
    /// As [`release`].
    pub fn release(&self, tag: &str) -> Result<bool> {
        check_tag(tag)?;
        back_refs::release(&self.path, tag)
    }
}

/// Has the file `copy` held as `layer` is, which it takes the place of: that is not held any more then.
///
/// # Errors
/// Whatever the host reports.
pub fn move_holds(layer: &Path, copy: &Path) -> Result<()> {
    back_refs::move_holds(layer, copy)
}

/// Holds the snapshot `name` of `disk` under `tag`. Returns whether there was no such hold.
///
/// # Errors
/// No such snapshot, one that is being deleted, a tag that is none; a directory that may not be written.
pub fn hold(disk: &Path, name: &str, tag: &str, options: &OpenOptions) -> Result<bool> {
    check_tag(tag)?;
    let look = || {
        let found = find(disk, name, options)?;
        if found.is_being_deleted {
            return Err(
                crate::Error::from(SnapshotFault::BeingDeleted { name: name.to_owned() }).in_file(disk)
            );
        }
        Ok(found)
    };
    let found = look()?;
    let info = found.info.as_ref().expect("found by its name");
    let is_new = back_refs::hold(&found.layer, tag, info)?;
    // It may have been dropped in between.
    match look() {
        Ok(again) if again.info == found.info => Ok(is_new),
        gone => {
            if is_new {
                back_refs::release(&found.layer, tag)?;
            }
            gone.and(Err(crate::Error::from(SnapshotFault::Replaced).in_file(disk)))
        }
    }
}

/// Releases the hold `tag` of the snapshot `name` of `disk`.
///
/// # Errors
/// No such snapshot or hold; whatever the host reports.
pub fn release(disk: &Path, name: &str, tag: &str, options: &OpenOptions) -> Result<()> {
    check_tag(tag)?;
    let found = find(disk, name, options)?;
    if back_refs::release(&found.layer, tag)? {
        return Ok(());
    }
    let have = found.holds().unwrap_or_default();
    Err(crate::Error::from(SnapshotFault::NoSuchHold { tag: tag.to_owned(), have }).in_file(disk))
}

fn check_tag(tag: &str) -> Result<()> {
    if is_snapshot_name(tag) { Ok(()) } else { Err(SnapshotFault::Tag { tag: tag.to_owned() }.into()) }
}
