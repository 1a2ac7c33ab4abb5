//! Snapshots of disks that no server serves.
//!
//! Each operation takes the writer's lock of the disk's file first, so that a running machine or server is met with a
//! refusal, and holds it until the path leads to the new overlay.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vmstrata_qcow2::SnapshotInfo;
use vmstrata_store::{Access, FileError, FileId, FileOptions, FileStore, Gate, LockError, Place};

use super::extend;
use super::fault::{SnapshotFault, group_broken};
use super::hold::Held;
use super::list::{Snapshot, layers_up_to, list, pick};
use super::overlay::Below;
use super::prepare::{PrepareOptions, Prepared, check_path, file_at, prepare};
use super::stood_on::StoodOn;
use crate::access;
use crate::atomic_file::AtomicFile;
use crate::chain::OpenOptions;
use crate::create::{fill, refuse_existing};
use crate::disk::Disk;
use crate::error::{Error, IoContext as _, Result};
use crate::layer::Format;
use crate::merge::{cleanup, orphans};
use crate::names;
use crate::opener::{LocalFiles, Opened, Opener as _, Role, directory_of};
use crate::refs::{Holder, back_refs, holders};
use crate::resources::Resources;

/// For how long to try again while someone has the disk: a moment, as killed processes keep theirs.
const PATIENCE: Duration = Duration::from_millis(500);

/// How often to look again at a disk whose file is another one by then.
const TRIES: usize = 100;

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Created {
    /// The disk.
    pub disk: PathBuf,
    /// The file that holds its state of now.
    pub layer: PathBuf,
    /// Whether the disk was a raw file: its path is qcow2 from now on.
    pub was_raw: bool,
}

/// Takes the snapshot `info` of every one of `disks`: all are made ready before the first is changed.
///
/// A disk that was not closed is opened and closed first, with `resources`, so that the journal of a killed server is
/// taken up before its file is frozen.
///
/// # Errors
/// A disk that is in use, or one that stands on it; a raw one, unless it may become qcow2; a disk that has a snapshot of that
/// name, or as [`prepare`]: nothing has then changed. If the host fails in the middle of several disks, [`SnapshotFault::GroupBroken`] names those that have the snapshot.
pub fn create(
    disks: &[PathBuf],
    info: &SnapshotInfo,
    open: &OpenOptions,
    options: &PrepareOptions,
    resources: &Arc<Resources>,
) -> Result<Vec<Created>> {
    let mut ready = Vec::with_capacity(disks.len());
    for (number, disk) in disks.iter().enumerate() {
        let file = |disk: &PathBuf| disk.metadata().map(|there| FileId::of(&there)).ok();
        if file(disk).is_some() && disks[..number].iter().any(|other| file(other) == file(disk)) {
            return Err(Error::from(SnapshotFault::Twice).in_file(disk));
        }
        let info = info.for_disk(number);
        let held = ready_one(disk, &info, open, options, resources).map_err(|error| error.in_file(disk))?;
        ready.push(held);
    }
    let mut created: Vec<Created> = Vec::with_capacity(disks.len());
    for (disk, (lock, prepared, was_raw)) in disks.iter().zip(ready) {
        let layer = prepared.frozen_path().to_owned();
        prepared.publish().map_err(|error| {
            group_broken(created.iter().map(|created| created.disk.display().to_string()).collect(), error)
        })?;
        drop(lock);
        created.push(Created { disk: disk.clone(), layer, was_raw });
    }
    let open = OpenOptions { format: Some(Format::Qcow2), ..open.clone() };
    for created in &created {
        extend::index_newest(&created.disk, &open);
    }
    Ok(created)
}

fn ready_one(
    disk: &Path,
    info: &SnapshotInfo,
    open: &OpenOptions,
    options: &PrepareOptions,
    resources: &Arc<Resources>,
) -> Result<(FileStore, Prepared, bool)> {
    let lock = lock_finalized(disk, open, resources)?;
    let was_raw = Below::read_disk(disk, options.format)?.format == Format::Raw;
    if was_raw && !options.convert_raw {
        return Err(SnapshotFault::StaysRaw.into());
    }
    cleanup::sweep_files(disk, open);
    if let Some(taken) = list(disk, open)?.into_iter().find(|other| other.name() == Some(&info.name)) {
        return Err(SnapshotFault::NameTaken { name: info.name.clone(), layer: taken.layer }.into());
    }
    // The overlay of an interrupted snapshot stands on the disk, too.
    let identity = lock.identity().while_trying("examine the disk")?.file;
    super::interrupted::sweep(disk, identity, options.on_step)?;
    let stood_on = StoodOn::find(disk, open)?;
    stood_on.refuse_if_in_use()?;
    stood_on.refuse_unless(open.force)?;
    Ok((lock, prepare(disk, info, options)?, was_raw))
}

/// Locks a disk that was closed, closing it if its last writer did not.
pub(crate) fn lock_finalized(
    disk: &Path,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<FileStore> {
    for _ in 0..TRIES {
        let lock = lock(disk)?;
        if !Below::read_disk(disk, open.format)?.is_open {
            return Ok(lock);
        }
        // Opening takes the lock itself.
        drop(lock);
        close(disk, open, resources)?;
    }
    Err(SnapshotFault::Replaced.into())
}

/// Takes up what a killed process left of a disk, and of a snapshot of it that it was about to take.
fn close(disk: &Path, open: &OpenOptions, resources: &Arc<Resources>) -> Result<()> {
    Disk::open(disk, &OpenOptions { read_only: false, ..open.clone() }, resources)?.close()
}

/// The layer of a snapshot, which nobody may be writing while the file that comes with it is held.
fn finished(found: &Snapshot) -> Result<(Opened, Below)> {
    let file = LocalFiles.open(&found.layer, Role::Frozen, &Gate::unrestricted())?;
    let below = Below::read(&found.layer, found.format)?;
    if below.is_open {
        return Err(SnapshotFault::Unfinished { layer: found.layer.clone() }.into());
    }
    Ok((file, below))
}

/// Locks the file that `disk` leads to against all others.
fn lock(disk: &Path) -> Result<FileStore> {
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

/// How to go back to a snapshot.
#[derive(Clone, Debug, Default)]
pub struct RevertOptions {
    /// Another name for what is active now; `None` lets it go.
    pub keep: Option<PathBuf>,
    /// How the disk is to be looked at.
    pub open: OpenOptions,
    /// As for [`prepare`].
    pub prepare: PrepareOptions,
}

/// What going back has done.
#[derive(Clone, Debug)]
pub struct Reverted {
    /// The file the disk stands on now.
    pub layer: PathBuf,
    /// The layers above it, newest first, that the disk does not stand on any more. Their files are still there.
    pub dropped: Vec<Snapshot>,
}

/// Makes the disk what it was at its snapshot `name`: a new, empty overlay takes the place of the active file.
///
/// # Errors
/// A disk in use, or one that stands on it; images that stand on it, unless forced; no such snapshot, a file to be kept that
/// exists or lies elsewhere; whatever the host reports. Nothing has then changed.
pub fn revert(
    disk: &Path,
    name: &str,
    options: &RevertOptions,
    resources: &Arc<Resources>,
) -> Result<Reverted> {
    let reverted = match back(disk, name, options) {
        // What is active is closed first only where it must be: going back is the way out of a damaged one.
        Err(error) if matches!(error.fault(), Some(SnapshotFault::Unfinished { .. })) => {
            close(disk, &options.open, resources).and_then(|()| back(disk, name, options))
        }
        reverted => reverted,
    };
    reverted.map_err(|error| error.in_file(disk))
}

fn back(disk: &Path, name: &str, options: &RevertOptions) -> Result<Reverted> {
    let lock = lock(disk)?;
    let identity = lock.identity().while_trying("examine the disk")?.file;
    let mut snapshots = list(disk, &options.open)?;
    let found = pick(&snapshots, name).cloned().map_err(|error| error.in_file(disk))?;
    let info = SnapshotInfo { origin: found.owner.clone(), ..found.info.clone().expect("found by its name") };
    for newer in snapshots[..found.depth - 1].iter().filter(|newer| newer.is_own()) {
        let held = newer.info.as_ref().and_then(|info| Held::find(disk, &newer.layer, info));
        held.map_or(Ok(()), |held| Err(SnapshotFault::Held(held)))?;
    }
    if let Some(keep) = &options.keep {
        check_keep(disk, keep, identity)?;
    }
    let (held, below) = finished(&found)?;
    let image = below.overlay(name_from(disk, &found.layer)?, &info)?;
    let keep = options.keep.as_deref();
    let mut prepared = Prepared::make(disk, identity, &image, keep, options.prepare.on_step)?;
    // What a killed process left stands on the disk, too, and is gone by now.
    let stood_on = StoodOn::find(disk, &options.open)?;
    stood_on.refuse_if_in_use()?;
    stood_on.refuse_unless(options.open.force)?;
    prepared.flush()?;
    if let Some(keep) = keep.filter(|keep| file_at(keep).ok() != Some(identity)) {
        prepared.link(keep.to_owned())?;
    }
    back_refs::record_chain(disk, layers_up_to(&found, &snapshots).chain([disk]));
    let left = snapshots[..found.depth - 1].iter().rev().map(|snapshot| snapshot.layer.as_path());
    back_refs::record_left([found.layer.as_path()].into_iter().chain(left).chain(options.keep.as_deref()));
    let own = snapshots[..found.depth - 1].iter().filter(|snapshot| snapshot.is_own());
    orphans::note_left(disk, own.map(|snapshot| snapshot.layer.as_path()), false);
    prepared.publish()?;
    drop((lock, held));
    snapshots.truncate(found.depth - 1);
    Ok(Reverted { layer: found.layer, dropped: snapshots })
}

fn check_keep(disk: &Path, keep: &Path, identity: FileId) -> Result<()> {
    let directory =
        |path: &Path| directory_of(path).canonicalize().while_trying("find the directory to keep it in");
    let is_name = keep.file_name().is_some_and(|name| Some(name) != disk.file_name());
    if !is_name || directory(disk)? != directory(keep)? {
        return Err(SnapshotFault::KeptElsewhere.into());
    }
    match file_at(keep) {
        Ok(there) if there != identity => Err(SnapshotFault::KeepExists { path: keep.to_owned() }.into()),
        _ => Ok(()),
    }
}

/// Makes `output`, a disk of its own that starts as the disk at `disk` was at its snapshot `name`; returns the layer it
/// stands on.
///
/// # Errors
/// No such snapshot, a file at `output`, a layer that someone writes; whatever the host reports. Nothing is then left.
pub fn clone(disk: &Path, name: &str, output: &Path, options: &OpenOptions) -> Result<PathBuf> {
    let snapshots = list(disk, options)?;
    let found = pick(&snapshots, name).cloned().map_err(|error| error.in_file(disk))?;
    let make = || -> Result<()> {
        refuse_existing(output)?;
        let (stood_on, below) = finished(&found)?;
        let info =
            SnapshotInfo { origin: names::disk_name(disk), ..found.info.clone().expect("found by its name") };
        let image = below.overlay(name_from(output, &found.layer)?, &info)?;
        let draft = AtomicFile::beside(output)?;
        access::copy(disk, &draft.file)?;
        access::let_owner_write(&draft.file)?;
        fill(&draft.file, &image)?;
        // Before it is there: whoever looks finds a link without a disk, not a disk without a link.
        back_refs::record_chain(output, layers_up_to(&found, &snapshots).chain([output]));
        if file_at(&found.layer)? != stood_on.identity.file {
            return Err(SnapshotFault::Replaced.into());
        }
        draft.publish(output, false)
    };
    make().map_err(|error| error.in_file(output))?;
    Ok(found.layer)
}

/// How the image at `image` names the layer at `layer`: by a relative name where one is below the other, so that a tree
/// can be moved; by an absolute one elsewhere.
pub(crate) fn name_from(image: &Path, layer: &Path) -> Result<String> {
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
    let name = path.to_str().ok_or(SnapshotFault::NotUtf8)?;
    Ok(if path.is_absolute() { name.to_owned() } else { names::sibling(name) })
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
        assert_eq!(name("a/clone", "c/x"), dir.join("c/x").to_str().unwrap());
    }
}
