//! The change itself, in two halves: everything that can fail or take time, and one rename.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use vmstrata_qcow2::SnapshotInfo;
use vmstrata_store::{FileId, Place};

use super::fault::SnapshotFault;
use super::interrupted;
use super::overlay::{self, Below};
use crate::atomic_file::{Temporary, flush_directory};
use crate::error::{Error, IoContext as _, Result};
use crate::layer::Format;
use crate::names;

/// How to prepare a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct PrepareOptions {
    /// As [`crate::OpenOptions::format`].
    pub format: Option<Format>,
    /// Whether the path of a raw disk may become qcow2: [`super::create`] refuses it otherwise.
    pub convert_raw: bool,
    /// As [`crate::OpenOptions::subclusters`].
    pub subclusters: bool,
    /// Called before each change of the file system: where tests of crashes stop.
    pub on_step: fn(Step),
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self { format: None, convert_raw: false, subclusters: true, on_step: |_| {} }
    }
}

/// What is about to be done to the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Remove what a killed process left.
    Sweep,
    /// Make the overlay under its temporary name.
    Make,
    /// Bring the overlay to stable storage.
    Flush,
    /// Give the active file its second name.
    Link,
    /// Rename the overlay to the disk's path.
    Rename,
    /// Bring the names to stable storage.
    FlushNames,
    /// Take the active file's second name back.
    Unlink,
    /// Remove the temporary overlay.
    Remove,
}

/// A snapshot that is ready: only the disk's path does not lead to it yet.
///
/// Dropped unpublished it is undone.
#[derive(Debug)]
pub struct Prepared {
    overlay: Temporary,
    active: PathBuf,
    identity: FileId,
    /// The active file's second name.
    second: Option<(Place, PathBuf)>,
    is_published: bool,
    on_step: fn(Step),
}

/// Makes everything ready for the snapshot `info` of the disk whose active file is `active`.
///
/// The caller holds the writer's lock of that file, and has flushed to it what its headers say. The file may go on being
/// written until the caller moves its guest to [`Prepared::overlay`].
///
/// # Errors
/// A file that cannot get a second name; a snapshot of that name; names or labels that the header has no room for; an
/// image that cannot be read or is marked corrupt; whatever the host reports. Nothing has then changed.
pub fn prepare(active: &Path, info: &SnapshotInfo, options: &PrepareOptions) -> Result<Prepared> {
    prepare_below(active, info, options).map_err(|error| error.in_file(active))
}

fn prepare_below(active: &Path, info: &SnapshotInfo, options: &PrepareOptions) -> Result<Prepared> {
    check_path(active)?;
    let below = Below::read_disk(active, options.format)?;
    let (mut prepared, frozen) = make_ready(active, info, &below, options)?;
    prepared.flush()?;
    prepared.link(frozen)?;
    Ok(prepared)
}

/// As [`prepare`] for a disk in use, whose file is of this format, and without the second name, which is returned: to be given
/// ([`Prepared::link`]) when the overlay is on stable storage.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn prepare_live(
    active: &Path,
    info: &SnapshotInfo,
    (format, subclusters): (Format, bool),
) -> Result<(Prepared, PathBuf)> {
    check_path(active)?;
    let below = Below::read(active, format)?;
    make_ready(active, info, &below, &PrepareOptions { subclusters, ..PrepareOptions::default() })
}

fn make_ready(
    active: &Path,
    info: &SnapshotInfo,
    below: &Below,
    options: &PrepareOptions,
) -> Result<(Prepared, PathBuf)> {
    info.check().map_err(vmstrata_qcow2::CreateError::from)?;
    let frozen = names::frozen_path(active, &info.name, below.format).ok_or(SnapshotFault::NotAFile)?;
    let name = names::sibling(frozen.file_name().unwrap_or_default());
    let image = below.overlay(name, info, options.subclusters)?;
    let prepared = Prepared::make(active, below.identity.file, &image, None, options.on_step)?;
    Ok((prepared, frozen))
}

/// Refuses what [`prepare_live`] and [`Prepared::link`] would refuse, and makes nothing.
///
/// # Errors
/// As [`prepare`], but for what the host reports only when it is tried.
pub(crate) fn check_ready(
    active: &Path,
    info: &SnapshotInfo,
    (format, subclusters): (Format, bool),
) -> Result<()> {
    check_path(active)?;
    info.check().map_err(vmstrata_qcow2::CreateError::from)?;
    let below = Below::read(active, format)?;
    let frozen = names::frozen_path(active, &info.name, below.format).ok_or(SnapshotFault::NotAFile)?;
    let name = names::sibling(frozen.file_name().unwrap_or_default());
    below.overlay(name, info, subclusters)?;
    match frozen.symlink_metadata() {
        // What a killed process left is removed when this is done in earnest.
        Ok(there) if FileId::of(&there) == below.identity.file => Ok(()),
        Ok(_) => Err(SnapshotFault::Exists { path: frozen }.into()),
        Err(_) => Ok(()),
    }
}

/// Refuses a path that cannot stay while what it leads to changes.
///
/// # Errors
/// A symbolic link, or what is no regular file.
pub(super) fn check_path(active: &Path) -> Result<()> {
    let kind = active.symlink_metadata().while_trying("examine the disk")?.file_type();
    match (kind.is_symlink(), kind.is_file()) {
        (true, _) => Err(SnapshotFault::SymbolicLink.into()),
        (_, true) => Ok(()),
        _ => Err(SnapshotFault::NotAFile.into()),
    }
}

impl Prepared {
    /// An overlay ready to take the place of `active`, which is the file `identity`, but for being flushed; `keep` is the second
    /// name that the file is to get, unless that is the overlay's backing file.
    ///
    /// # Errors
    /// Whatever the host reports. Nothing has then changed.
    pub(crate) fn make(
        active: &Path,
        identity: FileId,
        image: &vmstrata_qcow2::NewImage,
        keep: Option<&Path>,
        on_step: fn(Step),
    ) -> Result<Self> {
        on_step(Step::Sweep);
        interrupted::sweep(active, identity, on_step)?;
        on_step(Step::Make);
        let overlay = overlay::make(active, &interrupted::purpose(keep), image)?;
        let active = active.to_owned();
        Ok(Self { overlay, active, identity, second: None, is_published: false, on_step })
    }

    /// Brings the overlay to stable storage.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn flush(&self) -> Result<()> {
        (self.on_step)(Step::Flush);
        self.overlay.file.sync_all().while_trying("flush the overlay")
    }

    /// Gives the active file the second name `path`. The overlay is on stable storage.
    ///
    /// The second name must not outlive the temporary one, by which it is recognised: names that are made one after the other
    /// in a directory get to stable storage in that order.
    ///
    /// # Errors
    /// A name that is taken, or a file system without second names.
    pub(crate) fn link(&mut self, path: PathBuf) -> Result<()> {
        (self.on_step)(Step::Link);
        let give = || -> io::Result<Place> {
            let place = Place::of(&path)?;
            Place::of(&self.active)?.link(&place)?;
            Ok(place)
        };
        let place = give().map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::EXIST) => SnapshotFault::Exists { path: path.clone() }.into(),
            Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK | Errno::XDEV) => {
                SnapshotFault::NoLinks { path: path.clone(), source: error }.into()
            }
            _ => Error::io("give the file its second name", error),
        })?;
        let (_, path) = self.second.insert((place, path));
        if file_at(path)? != self.identity {
            return Err(SnapshotFault::Replaced.into());
        }
        Ok(())
    }

    /// The overlay, under its temporary name: complete, empty, and standing on [`Prepared::frozen_path`].
    ///
    /// Nothing that a guest was promised may be in it alone before [`Prepared::publish`] has returned.
    pub fn overlay(&self) -> &Path {
        self.overlay.path()
    }

    /// The disk's path.
    pub(crate) fn active(&self) -> &Path {
        &self.active
    }

    /// The second name of the file that is active now.
    ///
    /// # Panics
    /// Never for what [`prepare`] returned.
    pub fn frozen_path(&self) -> &Path {
        &self.second.as_ref().expect("prepare() gives the file a second name").1
    }

    /// Lets the disk's path lead to the overlay, and brings that to stable storage.
    ///
    /// # Errors
    /// As [`Prepared::rename`] and [`Prepared::flush_names`], of which the first alone means that nothing has changed.
    pub fn publish(mut self) -> Result<()> {
        self.rename()?;
        self.flush_names()
    }

    /// Lets the disk's path lead to the overlay: one system call.
    ///
    /// # Errors
    /// A path that leads to another file meanwhile; whatever the host reports. Nothing has then changed.
    pub(crate) fn rename(&mut self) -> Result<()> {
        (self.on_step)(Step::Rename);
        let rename = || -> Result<()> {
            if file_at(&self.active)? != self.identity {
                return Err(SnapshotFault::Replaced.into());
            }
            let overlay = self.overlay.place();
            let active = overlay.directory().place(self.active.file_name().unwrap_or_default());
            overlay.rename(&active).while_trying("rename the overlay")
        };
        rename().map_err(|error| error.in_file(&self.active))?;
        self.is_published = true;
        Ok(())
    }

    /// Brings the names to stable storage.
    ///
    /// # Errors
    /// Whatever the host reports: the snapshot is there, but a power failure may undo it and what was written since.
    pub(crate) fn flush_names(&self) -> Result<()> {
        (self.on_step)(Step::FlushNames);
        flush_directory(&self.active).map_err(|error| error.in_file(&self.active))
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if self.is_published {
            return;
        }
        // In this order: a second name without the temporary one would not be recognised.
        if let Some((place, _)) = self.second.take() {
            (self.on_step)(Step::Unlink);
            let _ = place.remove();
        }
        (self.on_step)(Step::Remove);
    }
}

/// Which file `path` names, itself and not what a link leads to.
pub(crate) fn file_at(path: &Path) -> Result<FileId> {
    let found = path.symlink_metadata().while_trying("examine").map_err(|error| error.in_file(path))?;
    Ok(FileId::of(&found))
}
