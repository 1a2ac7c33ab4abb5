//! What a disk was made on: held open as long as the disk is.
//!
//! ```text
//!   golden.qcow2 ◄── ci.s1.qcow2 ◄── ci.s2.qcow2 ◄── ci.qcow2
//!        └ held          └──────────────┴ files of snapshots: nobody's disk
//! ```
//!
//! A chain that is opened by its index leaves most of its files closed, and so without a lock. For the files of a disk's own
//! snapshots that does no harm, as nobody takes them for a disk. But the golden image that a disk was made on may be one: whoever
//! writes it, or takes a snapshot of it and so puts another file at its path, must find it locked. Which layer that is is read
//! off the names, as headers are not read either: the first one whose name does not begin as the disk's does. It is not held if it
//! is called as a snapshot of a disk that is there.
//!
//! It is a guard, not a proof: below the first such layer there may be others, and names may mislead. Those are found by looking
//! ([`crate::merge`]).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Result;
use crate::files::FileTable;
use crate::layer::Layer;
use crate::names::{ENDINGS, stem};
use crate::opener::directory_of;

/// Opens that one of the layers `below` the disk at `path` (base first) on which it was made, and keeps it open.
///
/// # Errors
/// A file that cannot be opened, that someone writes, or that is another one now.
pub(super) fn hold(path: &Path, below: &[Arc<Layer>], files: &FileTable) -> Result<()> {
    let Some(depth) = border(path, below.iter().map(|layer| &*layer.path).rev()) else { return Ok(()) };
    let layer = &below[below.len() - 1 - depth];
    if !is_snapshot_of_another(&layer.path) {
        files.store(layer)?;
        layer.hold();
    }
    Ok(())
}

/// The first of `layers`, newest first, that is no file of a snapshot of the disk: those are `STEM.NAME.FORMAT` beside it.
fn border<'a>(disk: &Path, mut layers: impl Iterator<Item = &'a Path>) -> Option<usize> {
    let is_own = |layer: &Path| {
        let rest = stem_of(layer).zip(stem_of(disk)).and_then(|(name, stem)| name.strip_prefix(stem));
        rest.is_some_and(|rest| rest.starts_with(b".")) && directory_of(layer) == directory_of(disk)
    };
    layers.position(|layer| !is_own(layer))
}

/// Whether the file is called `DISK.NAME.FORMAT` and the disk is beside it.
fn is_snapshot_of_another(layer: &Path) -> bool {
    let Some(stem) = stem_of(layer) else { return false };
    let Some(dot) = stem.iter().rposition(|byte| *byte == b'.') else { return false };
    let beside = |ending: &&str| -> PathBuf {
        layer.with_file_name(OsStr::from_bytes(&[&stem[..dot], ending.as_bytes()].concat()))
    };
    ENDINGS.iter().chain(&[""]).any(|ending| beside(ending).is_file())
}

fn stem_of(path: &Path) -> Option<&[u8]> {
    Some(stem(path.file_name()?).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(disk: &str, layers: &[&str]) -> Option<usize> {
        border(Path::new(disk), layers.iter().map(Path::new))
    }

    #[test]
    fn a_disks_own_snapshots_are_none() {
        assert_eq!(of("/v/web.qcow2", &["/v/web.tue.qcow2", "/v/web.mon.1.qcow2", "/v/web.sun.raw"]), None);
        assert_eq!(of("/v/web.qcow2", &[]), None);
    }

    #[test]
    fn what_a_disk_was_made_on_is_one_whatever_its_name_looks_like() {
        assert_eq!(of("ci.qcow2", &["ci.s2.qcow2", "ci.s1.qcow2", "golden.qcow2"]), Some(2));
        assert_eq!(of("ci.qcow2", &["ubuntu-22.04.qcow2"]), Some(0));
        assert_eq!(of("ubuntu-22.04-ci.qcow2", &["ubuntu-22.04-ci.a.qcow2", "ubuntu-22.04.qcow2"]), Some(1));
        assert_eq!(of("ci.qcow2", &["golden.qcow2", "golden.v2.qcow2", "iso.raw"]), Some(0));
        assert_eq!(of("/a/web.qcow2", &["/a/web.x.qcow2", "/b/web.v7.qcow2", "/b/web.v6.qcow2"]), Some(1));
    }

    #[test]
    fn what_a_disk_beside_it_was_at_a_snapshot_is_nobodys_disk() {
        let dir = tempfile::tempdir().unwrap();
        let is_one = |name: &str| is_snapshot_of_another(&dir.path().join(name));
        std::fs::write(dir.path().join("web.img"), "").unwrap();
        assert!(is_one("web.mon.qcow2") && is_one("web.mon.raw"));
        assert!(!is_one("web.img") && !is_one("ubuntu-22.04.qcow2") && !is_one("mon.qcow2"));
    }
}
