//! Snapshots, and ways back to them, of disks that no server serves.
//!
//! Each operation takes the writer's lock of the disk's file first, so that a running machine or server is met with a
//! refusal, and holds it until the path leads to the new overlay.

pub use crate::snapshots::{
    DEFAULT_TAG, Held, Holder, HolderKind, Keep, KeepError, MEMORY_LABEL, MOVE_LABEL, PrepareOptions,
    Prepared, Pruning, REBASE_LABEL, Snapshot, SnapshotFault, SnapshotInfo, SnapshotInfoError, State, Step,
    find, frozen_path, hold, holders, is_snapshot_name, list, move_holds, now_ns, prepare, recorded_in,
    release, resolve, split_state, state_of,
};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_store::{FileId, FileStore, Gate, Store as _};

use crate::access;
use crate::atomic_file::AtomicFile;
use crate::chain::{OpenOptions, read_head};
use crate::create::{fill, refuse_existing};
use crate::disk::Disk;
use crate::error::{Error, IoContext as _, Result};
use crate::layer::Format;
use crate::merging::relink::{self, Relink};
use crate::merging::{cleanup, orphans};
use crate::names;
use crate::opener::{LocalFiles, Opened, Opener as _, Role, directory_of};
use crate::refs::back_refs;
use crate::resources::Resources;
use crate::snapshots::list::{layers_up_to, pick};
use crate::snapshots::lock::{TRIES, lock, name_from};
use crate::snapshots::overlay::Below;
use crate::snapshots::prepare::file_at;
use crate::snapshots::stood_on::StoodOn;
use crate::snapshots::{extend, group_broken};

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
        let file = FileId::at(disk);
        if file.is_some() && disks[..number].iter().any(|other| FileId::at(other) == file) {
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
    crate::snapshots::interrupted::sweep(disk, identity, options.on_step)?;
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
    let image = below.overlay(name_from(disk, &found.layer)?, &info, options.prepare.subclusters)?;
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
        let image = below.overlay(name_from(output, &found.layer)?, &info, options.subclusters)?;
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

/// Changes the name of the backing file in the header of an image that is not in use. `below` must hold the same bytes in that format. Returns
/// whether the header had another name.
///
/// # Errors
/// An image in use, one without a backing file, a header without room for the name; whatever the host reports. It has the old name then,
/// or the new one.
pub fn rename_backing(path: &Path, below: &Path, format: Format) -> Result<bool> {
    let rename = || -> Result<bool> {
        let store = lock(path)?;
        let head = read_head(&store, store.len().while_trying("read the file's length")?)?;
        let name = name_from(path, below)?;
        if head.backing_name.as_ref() == Some(&name) {
            return Ok(false);
        }
        let below = relink::Below { name, format, record: head.snapshot };
        let relink = Relink::plan(&store, &head.header, Some(&below))?;
        if relink.write_body(&store)? {
            store.flush().while_trying("flush the header")?;
        }
        relink.write_sector(&store)?;
        store.flush().while_trying("flush the header").map(|()| true)
    };
    rename().map_err(|error| error.in_file(path))
}

/// Notes beside the disk at `disk`, which is gone from there, that the files `layers` beside it were its layers, newest first: from then on
/// [`crate::merge::collect`] removes those that no image needs.
pub fn note_left(disk: &Path, layers: &[PathBuf]) {
    orphans::note_left(disk, layers.iter().map(PathBuf::as_path), false);
}
