//! Layers that may be disks of their own: held open as long as a disk stands on them.
//!
//! ```text
//!   golden.qcow2 ◄── ci.s1.qcow2 ◄── ci.s2.qcow2 ◄── ci.qcow2
//!        └ held          └──────────────┴ files of snapshots: nobody's disk
//! ```
//!
//! A chain that is opened by its index leaves most of its files closed, and so without a lock. For the files of a disk's own
//! snapshots that does no harm, as nobody takes them for a disk. But the golden image that a disk was made on may be one: whoever
//! writes it, or takes a snapshot of it and so puts another file at its path, must find it locked. Which layers those are is
//! read off the names, as headers are not read either: a chain changes from one disk's files to another's where they do not
//! begin alike.
//!
//! It is a guard, not a proof: a golden image that is named like a snapshot of the disk on it is not held.

use std::path::Path;
use std::sync::Arc;

use crate::error::Result;
use crate::files::FileTable;
use crate::layer::Layer;
use crate::opener::directory_of;
use crate::snapshot::stem;

/// Most layers held of a chain, from the base up. Chains of other tools may have borders everywhere.
const HELD_MAX: usize = 16;

/// Opens those layers `below` the disk at `path` (base first) at which another disk's files may begin, and keeps them open.
///
/// # Errors
/// A file that cannot be opened, that someone writes, or that is another one now.
pub(super) fn hold(path: &Path, below: &[Arc<Layer>], files: &FileTable) -> Result<()> {
    let borders: Vec<usize> = borders(path, below.iter().map(|layer| &*layer.path).rev()).collect();
    // Counted from the top; the lowest are those that most disks share.
    for depth in borders.into_iter().rev().take(HELD_MAX) {
        let layer = &below[below.len() - 1 - depth];
        files.store(layer)?;
        layer.hold();
    }
    Ok(())
}

/// Which of `layers`, newest first, are not files of a snapshot of what stands on them.
fn borders<'a>(disk: &'a Path, layers: impl Iterator<Item = &'a Path>) -> impl Iterator<Item = usize> {
    let mut family = Family { above: disk, stem: stem_of(disk), is_sure: true };
    layers.enumerate().filter_map(move |(depth, layer)| (!family.takes_in(layer)).then_some(depth))
}

/// The files of a disk: itself and its snapshots, `STEM.NAME.FORMAT`.
struct Family<'a> {
    /// The lowest met so far.
    above: &'a Path,
    stem: Option<&'a str>,
    /// Whether the disk's own name is known. Otherwise the stem may be a snapshot's, with its name at the end.
    is_sure: bool,
}

impl<'a> Family<'a> {
    /// Takes in the next file down; false where another family begins with it.
    fn takes_in(&mut self, layer: &'a Path) -> bool {
        let name = stem_of(layer);
        let above = std::mem::replace(&mut self.above, layer);
        let same = name.zip(self.stem).and_then(|(name, stem)| self.common(name, stem));
        let is_own = same.is_some() && directory_of(above) == directory_of(layer);
        (self.stem, self.is_sure) = if is_own { (same, true) } else { (name, false) };
        is_own
    }

    /// The disk's stem, if `name` may be that of one of its snapshots.
    fn common(&self, name: &str, stem: &'a str) -> Option<&'a str> {
        let shorter = stem.match_indices('.').map(|(at, _)| &stem[..at]).rev();
        let known = if self.is_sure { 0 } else { usize::MAX };
        let mut stems = std::iter::once(stem).chain(shorter.take(known));
        stems.find(|stem| name.strip_prefix(*stem).is_some_and(|rest| rest.starts_with('.')))
    }
}

fn stem_of(path: &Path) -> Option<&str> {
    Some(stem(path.file_name()?.to_str()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(disk: &str, layers: &[&str]) -> Vec<usize> {
        borders(Path::new(disk), layers.iter().map(Path::new)).collect()
    }

    #[test]
    fn a_disks_own_snapshots_are_none() {
        assert_eq!(of("/v/web.qcow2", &["/v/web.tue.qcow2", "/v/web.mon.1.qcow2", "/v/web.sun.raw"]), [0; 0]);
        assert_eq!(of("/v/web.qcow2", &[]), [0; 0]);
    }

    #[test]
    fn what_a_disk_was_made_on_is_one_whatever_its_name_looks_like() {
        assert_eq!(of("ci.qcow2", &["ci.s2.qcow2", "ci.s1.qcow2", "golden.qcow2"]), [2]);
        assert_eq!(of("ci.qcow2", &["ubuntu-22.04.qcow2"]), [0]);
        assert_eq!(of("ubuntu-22.04-ci.qcow2", &["ubuntu-22.04-ci.a.qcow2", "ubuntu-22.04.qcow2"]), [1]);
        assert_eq!(
            of("ci.qcow2", &["golden.qcow2", "golden.v2.qcow2", "golden.v1.qcow2", "iso.raw"]),
            [0, 3]
        );
    }

    #[test]
    fn of_the_snapshot_that_a_disk_was_cloned_from_the_older_ones_are_none() {
        assert_eq!(of("ci.qcow2", &["web.v7.qcow2", "web.v6.qcow2", "web.v5.1.qcow2"]), [0]);
        assert_eq!(of("/a/web.qcow2", &["/a/web.x.qcow2", "/b/web.v7.qcow2", "/b/web.v6.qcow2"]), [1]);
        assert_eq!(of("db.qcow2", &["web.mon.qcow2", "web.sun.qcow2"]), [0]);
    }

    #[test]
    fn a_chain_of_files_that_have_nothing_in_common_is_all_borders() {
        assert_eq!(of("3.qcow2", &["2.qcow2", "1.qcow2", "0.qcow2"]), [0, 1, 2]);
    }
}
