//! The name that a disk's file keeps when its own goes to the overlay.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use vmstrata_store::{FileId, Place};

use super::fault::SnapshotFault;
use super::prepare::Step;
use crate::error::{Error, Result};

/// A name that a file got from us, taken back unless it is to stay.
#[derive(Debug)]
pub(super) struct SecondName {
    place: Place,
    path: PathBuf,
    on_step: fn(Step),
    is_ours: bool,
}

impl SecondName {
    /// Gives the file at `active` the name `path`, too.
    ///
    /// # Errors
    /// A name that is taken, or a file system without second names.
    pub(super) fn give(active: &Path, path: PathBuf, on_step: fn(Step)) -> Result<Self> {
        let give = || -> io::Result<Place> {
            let place = Place::of(&path)?;
            Place::of(active)?.link(&place)?;
            Ok(place)
        };
        match give() {
            Ok(place) => Ok(Self { place, path, on_step, is_ours: true }),
            Err(error) => Err(match Errno::from_io_error(&error) {
                Some(Errno::EXIST) => SnapshotFault::Exists { path }.into(),
                Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK | Errno::XDEV) => {
                    SnapshotFault::NoLinks { path, source: error }.into()
                }
                _ => Error::io("give the file its second name", error),
            }),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// From now on the name stays.
    pub(super) fn keep(&mut self) {
        self.is_ours = false;
    }
}

impl Drop for SecondName {
    fn drop(&mut self) {
        if self.is_ours {
            (self.on_step)(Step::Unlink);
            let _ = self.place.remove();
        }
    }
}

/// Whether what is there is a name of this file.
pub(super) fn is(there: &Metadata, file: FileId) -> bool {
    FileId::of(there) == file
}
