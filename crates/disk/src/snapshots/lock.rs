//! The writer's lock of a disk's file, which keeps machines and servers out.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmstrata_store::{Access, FileError, FileOptions, FileStore, LockError, Place};

use super::SnapshotFault;
use super::prepare::{check_path, file_at};
use crate::error::{Error, IoContext as _, Result};
use crate::names;
use crate::opener::directory_of;
use crate::refs::{Holder, holders};

/// For how long to try again while someone has the disk: a moment, as killed processes keep theirs.
const PATIENCE: Duration = Duration::from_millis(500);

/// How often to look again at a disk whose file is another one by then.
pub(crate) const TRIES: usize = 100;

/// Locks the file that `disk` leads to against all others.
pub(crate) fn lock(disk: &Path) -> Result<FileStore> {
    let place = Place::of(disk).while_trying("find the disk's directory")?;
    for _ in 0..TRIES {
        check_path(disk)?;
        let file = place.open(Access::ReadWrite).while_trying("open the disk")?;
        let options = FileOptions { lock_patience: PATIENCE, ..FileOptions::ACTIVE };
        let store = match FileStore::new(file, disk, &options) {
            Ok(store) => store,
            Err(FileError::Lock(LockError::Conflict { .. })) => return Err(in_use(disk)),
            Err(error) => return Err(error.into()),
        };
        // A snapshot that was taken while we waited has put another file here.
        if store.identity().while_trying("examine the disk")?.file == file_at(disk)? {
            return Ok(store);
        }
    }
    Err(SnapshotFault::Replaced.into())
}

/// The writer's lock of a disk that nobody else has.
pub(crate) fn lock_if_free(disk: &Path) -> Option<FileStore> {
    lock(disk).ok()
}

fn in_use(disk: &Path) -> Error {
    let holder = holders(disk).into_iter().next().unwrap_or_else(Holder::unseen);
    SnapshotFault::InUse { holder }.into()
}

/// How the image at `image` names the layer at `layer`: by a relative name where one is below the other, so that a tree
/// can be moved; by an absolute one elsewhere.
pub(crate) fn name_from(image: &Path, layer: &Path) -> Result<OsString> {
    let resolve =
        |path: &Path| directory_of(path).canonicalize().while_trying("find the directory of an image");
    let (from, to) = (resolve(image)?, resolve(layer)?);
    let file = layer.file_name().ok_or(SnapshotFault::NotAFile)?;
    let path = if let Ok(below) = to.strip_prefix(&from) {
        below.join(file)
    } else if let Ok(above) = from.strip_prefix(&to) {
        above.components().map(|_| "..").collect::<PathBuf>().join(file)
    } else {
        to.join(file)
    };
    Ok(if path.is_absolute() { path.into() } else { names::sibling(path.as_os_str()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_named_relative_within_a_tree_and_absolute_outside() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        for sub in ["a/b", "c"] {
            std::fs::create_dir_all(dir.join(sub)).unwrap();
        }
        let name = |image: &str, layer: &str| name_from(&dir.join(image), &dir.join(layer)).unwrap();
        assert_eq!(name("a/clone", "a/web.mon.qcow2"), "web.mon.qcow2");
        assert_eq!(name("clone", "a/b/web.mon.qcow2"), "a/b/web.mon.qcow2");
        assert_eq!(name("a/b/clone", "web.mon.qcow2"), "../../web.mon.qcow2");
        assert_eq!(name("a/clone", "a/nbd:x"), "./nbd:x");
        assert_eq!(name("a/clone", "c/x"), dir.join("c/x"));
    }
}
