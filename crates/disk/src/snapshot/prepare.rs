//! The change itself, in two halves: everything that can fail or take time, and one rename.

use std::path::{Path, PathBuf};

use vmstrata_qcow2::SnapshotInfo;
use vmstrata_store::{FileId, prealloc};

use super::fault::SnapshotFault;
use super::interrupted;
use super::overlay::{self, Below};
use super::second_name::{self, SecondName};
use crate::atomic_file::{Temporary, flush_directory};
use crate::error::{IoContext as _, Result};
use crate::layer::Format;
use crate::names;

/// How to prepare a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct PrepareOptions {
    /// As [`crate::OpenOptions::format`].
    pub format: Option<Format>,
    /// Whether the path of a raw disk may become qcow2: [`super::create`] refuses it otherwise.
    pub convert_raw: bool,
    /// Called before each change of the file system: where tests of crashes stop.
    pub on_step: fn(Step),
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self { format: None, convert_raw: false, on_step: |_| {} }
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
    second: Option<SecondName>,
    is_published: bool,
    on_step: fn(Step),
}

/// A snapshot that the disk's path leads to, but of which a power failure may still lose every trace.
#[derive(Debug)]
#[must_use = "until the names are flushed, nothing written to the overlay is safe"]
pub struct Published {
    active: PathBuf,
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
    let (mut prepared, frozen) = make_ready(active, info, &below, options.on_step)?;
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
    format: Format,
) -> Result<(Prepared, PathBuf)> {
    check_path(active)?;
    let below = Below::read(active, format)?;
    let (prepared, frozen) = make_ready(active, info, &below, PrepareOptions::default().on_step)?;
    // The guest will write about as much as since the last snapshot.
    prealloc::past_end(&prepared.overlay.file, below.identity.len);
    Ok((prepared, frozen))
}

fn make_ready(
    active: &Path,
    info: &SnapshotInfo,
    below: &Below,
    on_step: fn(Step),
) -> Result<(Prepared, PathBuf)> {
    info.check().map_err(vmstrata_qcow2::CreateError::from)?;
    let frozen = names::frozen_path(active, &info.name, below.format).ok_or(SnapshotFault::NotUtf8)?;
    let name = frozen.file_name().and_then(|name| name.to_str()).expect("made of UTF-8 above");
    let image = below.overlay(names::sibling(name), info)?;
    let prepared = Prepared::make(active, below.identity.file, &image, None, on_step)?;
    Ok((prepared, frozen))
}

/// Refuses what [`prepare_live`] and [`Prepared::link`] would refuse, and makes nothing.
///
/// # Errors
/// As [`prepare`], but for what the host reports only when it is tried.
pub(crate) fn check_ready(active: &Path, info: &SnapshotInfo, format: Format) -> Result<()> {
    check_path(active)?;
    info.check().map_err(vmstrata_qcow2::CreateError::from)?;
    let below = Below::read(active, format)?;
    let frozen = names::frozen_path(active, &info.name, below.format).ok_or(SnapshotFault::NotUtf8)?;
    let name = frozen.file_name().and_then(|name| name.to_str()).expect("made of UTF-8 above");
    below.overlay(names::sibling(name), info)?;
    match frozen.symlink_metadata() {
        // What a killed process left is removed when this is done in earnest.
        Ok(there) if second_name::is(&there, below.identity.file) => Ok(()),
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
    pub(super) fn make(
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
    pub(super) fn flush(&self) -> Result<()> {
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
        let second = SecondName::give(&self.active, path, self.on_step)?;
        if file_at(second.path())? != self.identity {
            return Err(SnapshotFault::Replaced.into());
        }
        self.second = Some(second);
        Ok(())
    }

    /// The overlay, under its temporary name: complete, empty, and standing on [`Prepared::frozen_path`].
    ///
    /// Nothing that a guest was promised may be in it alone before [`Published::flush`] is done.
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
        self.second.as_ref().expect("prepare() gives the file a second name").path()
    }

    /// Lets the disk's path lead to the overlay, and brings that to stable storage.
    ///
    /// # Errors
    /// As [`Prepared::rename`] and [`Published::flush`], which tell apart whether anything has changed.
    pub fn publish(self) -> Result<()> {
        self.rename()?.flush()
    }

    /// Lets the disk's path lead to the overlay: one system call.
    ///
    /// # Errors
    /// A path that leads to another file meanwhile; whatever the host reports. Nothing has then changed, and what was
    /// prepared is undone.
    pub fn rename(mut self) -> Result<Published> {
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
        if let Some(second) = &mut self.second {
            second.keep();
        }
        Ok(Published { active: self.active.clone(), on_step: self.on_step })
    }
}

impl Published {
    /// Brings the names to stable storage.
    ///
    /// # Errors
    /// Whatever the host reports: the snapshot is there, but a power failure may undo it and what was written since.
    pub fn flush(self) -> Result<()> {
        (self.on_step)(Step::FlushNames);
        flush_directory(&self.active).map_err(|error| error.in_file(&self.active))
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // In this order: a second name without the temporary one would not be recognised.
        self.second = None;
        if !self.is_published {
            (self.on_step)(Step::Remove);
        }
    }
}

/// Which file `path` names, itself and not what a link leads to.
pub(super) fn file_at(path: &Path) -> Result<FileId> {
    let found = path.symlink_metadata().while_trying("examine").map_err(|error| error.in_file(path))?;
    Ok(FileId::of(&found))
}
