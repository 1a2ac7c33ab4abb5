//! Files that nobody sees until they are whole.
//!
//! Invariant: under a draft's final name there is either what was there before or all of it, also after a crash or when the
//! file system is full. It is written without a name, flushed, and then named; the directory is flushed last. A process that
//! is killed so leaves nothing behind. On file systems that know no files without a name (NFS), and while it replaces
//! another file, a draft has a temporary name.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{Error, IoContext as _, Result};
use crate::opener::directory_of;

/// A file on its way to its name.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) file: File,
    name: Option<Name>,
}

/// A file under a temporary name, `.NAME.PID-NUMBER.purpose`, removed unless it is given another.
#[derive(Debug)]
pub(crate) struct Temporary {
    pub(crate) file: File,
    name: Name,
}

/// A name that goes with its owner.
#[derive(Debug)]
struct Name(PathBuf);

impl Draft {
    /// A new, empty file in the directory of `path`.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn beside(path: &Path) -> Result<Self> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        match rustix::fs::open(directory_of(path), flags, mode()) {
            Ok(file) => Ok(Self { file: file.into(), name: None }),
            // Without such files, or by kernels that do not know the flag, a directory is opened for writing.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                let Temporary { file, name } = Temporary::named(path, "new")?;
                Ok(Self { file, name: Some(name) })
            }
            Err(errno) => Err(Error::io("create the image", errno.into())),
        }
    }

    /// Brings the file to stable storage and gives it its final name.
    ///
    /// # Errors
    /// A file of that name, unless it may be replaced; whatever the host reports.
    pub(crate) fn publish(self, path: &Path, replace: bool) -> Result<()> {
        self.file.sync_all().while_trying("flush the new image")?;
        self.give_name(path, replace)?;
        flush_directory(path)
    }

    fn give_name(mut self, path: &Path, replace: bool) -> Result<()> {
        let named =
            |done: rustix::io::Result<()>| done.map_err(io::Error::from).while_trying("name the new image");
        let name = match self.name.take() {
            Some(name) => name,
            None => match link(&self.file, path) {
                // A link never replaces anything.
                Err(Errno::EXIST) if replace => free_name(path, "new", |name| link(&self.file, name))?.1,
                linked => return named(linked),
            },
        };
        if replace {
            return named(rustix::fs::rename(&name.0, path));
        }
        named(match rustix::fs::renameat_with(CWD, &name.0, CWD, path, RenameFlags::NOREPLACE) {
            // File systems without that flag have links.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::link(&name.0, path),
            done => done,
        })
    }
}

impl Temporary {
    /// A new, empty file in the directory of `path`, which has the NAME.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn named(path: &Path, purpose: &str) -> Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let (file, name) = free_name(path, purpose, |name| rustix::fs::open(name, flags, mode()))?;
        Ok(Self { file: file.into(), name })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.name.0
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // Fails after the rename, when the name is gone.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn mode() -> Mode {
    Mode::from_raw_mode(0o644)
}

/// Does what makes a file under a temporary name, with the first name that is free.
fn free_name<T>(
    path: &Path,
    purpose: &str,
    make: impl Fn(&Path) -> rustix::io::Result<T>,
) -> Result<(T, Name)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let file_name = path.file_name().ok_or(Errno::ISDIR).map_err(io::Error::from);
    let file_name = file_name.while_trying("create the image")?;
    loop {
        let mut name = OsString::from(".");
        name.push(file_name);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        name.push(format!(".{}-{number}.{purpose}", std::process::id()));
        let name = directory_of(path).join(name);
        match make(&name) {
            Ok(made) => return Ok((made, Name(name))),
            // Left by a process of the same number.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(Error::io("create the image", errno.into())),
        }
    }
}

/// Gives a file without a name one.
fn link(file: &File, name: &Path) -> rustix::io::Result<()> {
    let place = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, place, CWD, name, AtFlags::SYMLINK_FOLLOW) {
        // No /proc: a privilege, or a new kernel, makes up for it.
        Err(Errno::NOENT) => rustix::fs::linkat(file, "", CWD, name, AtFlags::EMPTY_PATH),
        done => done,
    }
}

/// Brings the names in the directory of `path` to stable storage.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn flush_directory(path: &Path) -> Result<()> {
    let directory = File::open(directory_of(path)).while_trying("open the image's directory")?;
    rustix::fs::fsync(directory.as_fd()).map_err(io::Error::from).while_trying("flush the image's directory")
}

#[cfg(test)]
mod tests {
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
            let mut draft = Draft::beside(&path).unwrap();
            draft.file.write_all(text.as_bytes()).unwrap();
            assert_eq!(names(dir.path()), before);
            draft.publish(&path, replace).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), text.as_bytes());
        }
        Draft::beside(&path).unwrap().publish(&path, false).unwrap_err();
        assert_eq!((std::fs::read(&path).unwrap(), names(dir.path()).len()), (b"second".to_vec(), 1));
    }

    #[test]
    fn a_draft_with_a_temporary_name_ends_as_one_without() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        let named = |text: &str| {
            let Temporary { mut file, name } = Temporary::named(&path, "new").unwrap();
            file.write_all(text.as_bytes()).unwrap();
            Draft { file, name: Some(name) }
        };
        named("first").publish(&path, false).unwrap();
        named("none").publish(&path, false).unwrap_err();
        named("second").publish(&path, true).unwrap();
        drop(named("none"));
        assert_eq!((std::fs::read(&path).unwrap(), names(dir.path()).len()), (b"second".to_vec(), 1));
    }
}
