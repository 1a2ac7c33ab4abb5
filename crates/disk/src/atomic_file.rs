//! Files that get their name once they are whole.
//!
//! Invariant: under a draft's final name there is either what was there before or all of it, also after a crash or when the
//! file system is full. It is written without a name, flushed, and then named; the directory is flushed last. A process that
//! is killed so leaves nothing behind. On file systems that know no files without a name (NFS), and while it replaces
//! another file, a draft has a temporary name.
//!
//! A new draft has mode 0600; [`crate::access`] widens it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use vmstrata_store::{Directory, Place, open_named};

use crate::error::{IoContext as _, Result};
use crate::names::beside_name;

/// What a file is made with that is its owner's alone.
pub(crate) const PRIVATE: u32 = 0o600;

/// A file on its way to its name.
#[derive(Debug)]
pub struct AtomicFile {
    /// What is to be written.
    pub file: File,
    directory: Directory,
    name: Option<Name>,
}

/// A file under a temporary name, `.NAME.PID-NUMBER.purpose`, removed unless it is given another.
#[derive(Debug)]
pub(crate) struct Temporary {
    pub(crate) file: File,
    path: PathBuf,
    name: Name,
}

/// A name that goes with its owner.
#[derive(Debug)]
struct Name(Place);

impl AtomicFile {
    /// A new, empty file in the directory of `path`.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn beside(path: &Path) -> Result<Self> {
        Self::with_mode(path, PRIVATE)
    }

    /// As [`AtomicFile::beside`], for those whom `mode` names.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn with_mode(path: &Path, mode: u32) -> Result<Self> {
        let make = || -> io::Result<Self> {
            let place = Place::of(path)?;
            let directory = place.directory().clone();
            if let Some(file) = directory.unnamed(mode)? {
                return Ok(Self { file, directory, name: None });
            }
            let (file, name) = free_name(&place, "new", |name| name.create(mode))?;
            Ok(Self { file, directory, name: Some(name) })
        };
        make().while_trying("create the image")
    }

    /// Brings the file to stable storage and gives it its final name, that of `path`, in the directory that it was made in.
    ///
    /// # Errors
    /// A file of that name, unless it may be replaced; whatever the host reports.
    pub fn publish(self, path: &Path, replace: bool) -> Result<()> {
        self.file.sync_all().while_trying("flush the new image")?;
        let directory = self.directory.clone();
        self.publish_unsynced(path, replace)?;
        directory.sync().while_trying("flush the image's directory")
    }

    /// As [`AtomicFile::publish`], without waiting for stable storage: a power failure may leave any part of it under the name.
    ///
    /// # Errors
    /// The same.
    pub fn publish_unsynced(mut self, path: &Path, replace: bool) -> Result<()> {
        let place = self.directory.place(path.file_name().unwrap_or_default());
        self.give_name(&place, replace).while_trying("name the new image")
    }

    fn give_name(&mut self, place: &Place, replace: bool) -> io::Result<()> {
        let name = match self.name.take() {
            Some(name) => name,
            None => match place.give_to(&self.file) {
                // A link never replaces anything.
                Err(error) if replace && error.kind() == io::ErrorKind::AlreadyExists => {
                    free_name(place, "new", |name| name.give_to(&self.file))?.1
                }
                given => return given,
            },
        };
        if replace { name.0.rename(place) } else { name.0.rename_new(place) }
    }
}

impl Temporary {
    /// A new, empty file in the directory of `path`, which has the NAME.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn named(path: &Path, purpose: &str) -> Result<Self> {
        let make = || free_name(&Place::of(path)?, purpose, |name| name.create(PRIVATE));
        let (file, name) = make().while_trying("create the image")?;
        Ok(Self { file, path: name.0.path(), name })
    }

    pub(crate) fn place(&self) -> &Place {
        &self.name.0
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // Fails after the rename, when the name is gone.
        let _ = self.0.remove();
    }
}

/// Does what makes a file under a temporary name, with the first name that is free.
fn free_name<T>(
    place: &Place,
    purpose: &str,
    make: impl Fn(&Place) -> io::Result<T>,
) -> io::Result<(T, Name)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let end = format!(".{}-{number}.{purpose}", std::process::id());
        let name = place.directory().place(beside_name(place.name(), &end));
        match make(&name) {
            Ok(made) => return Ok((made, Name(name))),
            // Left by a process of the same number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Brings the file at `path` to stable storage with its time of change, which a flush leaves out.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn flush_file(path: &Path) -> Result<()> {
    let flushed = open_named(path).and_then(|file| file.sync_all());
    flushed.while_trying("flush").map_err(|error| error.in_file(path))
}

/// Brings the names in the directory of `path` to stable storage.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn flush_directory(path: &Path) -> Result<()> {
    sync_directory(path).while_trying("flush the image's directory")
}

/// The same, with what the host says.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    Place::of(path)?.directory().sync()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::io::Write as _;

    use super::*;

    fn names(directory: &Path) -> Vec<OsString> {
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_draft_is_unseen_until_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        for (replace, text) in [(false, "first"), (true, "second")] {
            let before = names(dir.path());
            let mut draft = AtomicFile::beside(&path).unwrap();
            draft.file.write_all(text.as_bytes()).unwrap();
            assert_eq!(names(dir.path()), before);
            draft.publish(&path, replace).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), text.as_bytes());
        }
        AtomicFile::beside(&path).unwrap().publish(&path, false).unwrap_err();
        assert_eq!((std::fs::read(&path).unwrap(), names(dir.path()).len()), (b"second".to_vec(), 1));
    }

    #[test]
    fn a_draft_with_a_temporary_name_ends_as_one_without() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        let named = |text: &str| {
            let Temporary { mut file, name, .. } = Temporary::named(&path, "new").unwrap();
            file.write_all(text.as_bytes()).unwrap();
            AtomicFile { file, directory: name.0.directory().clone(), name: Some(name) }
        };
        named("first").publish(&path, false).unwrap();
        named("none").publish(&path, false).unwrap_err();
        named("second").publish(&path, true).unwrap();
        drop(named("none"));
        assert_eq!((std::fs::read(&path).unwrap(), names(dir.path()).len()), (b"second".to_vec(), 1));
    }
}
