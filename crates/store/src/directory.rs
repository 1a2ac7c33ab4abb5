//! Files beside an image: made, opened, named and removed in directories that are held open.
//!
//! ```text
//!   path ──► Directory, of the file's parent ──► Place: a name in it ──► open, create, link, rename, remove
//!            held by a descriptor                 never followed where a link is
//! ```
//!
//! Who may write a disk's directory may put links and pipes there, and put another directory in its place at any moment. So the
//! directory is looked up once and what is done is done in it, whatever its path leads to by then; no name in it is followed;
//! and what is opened is a regular file, which is found out without waiting for anybody.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use crate::{Access, FileId};

/// A directory that is held open.
#[derive(Clone, Debug)]
pub struct Directory {
    fd: Arc<OwnedFd>,
    path: PathBuf,
}

/// A name in a directory, whether or not something has it.
#[derive(Clone, Debug)]
pub struct Place {
    directory: Directory,
    name: OsString,
}

/// What has a name.
#[derive(Clone, Copy, Debug)]
pub struct Entry(Stat);

impl Directory {
    /// The directory at `path`, which whoever runs this has named: links in it are followed.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let fd = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { fd: Arc::new(fd), path: path.to_owned() })
    }

    /// As [`Directory::open`]; makes it where it is not there, and those above it.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn open_or_create(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path)?;
        Self::open(path)
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A name in it.
    pub fn place(&self, name: impl Into<OsString>) -> Place {
        Place { directory: self.clone(), name: name.into() }
    }

    /// What is in it, with its kind where the file system says so.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn entries(&self) -> io::Result<impl Iterator<Item = io::Result<(Place, FileType)>> + use<>> {
        let entries = Dir::read_from(self.reopen()?)?;
        let named = entries.filter(|entry| {
            entry.as_ref().map_or(true, |entry| !matches!(entry.file_name().to_bytes(), b"." | b".."))
        });
        let directory = self.clone();
        Ok(named.map(move |entry| {
            let entry = entry?;
            let place = directory.place(OsStr::from_bytes(entry.file_name().to_bytes()));
            let kind = match entry.file_type() {
                FileType::Unknown => place.look()?.kind(),
                kind => kind,
            };
            Ok((place, kind))
        }))
    }

    /// A new file without a name; `None` on file systems that know none.
    ///
    /// # Errors
    /// Whatever else the host reports.
    pub fn unnamed(&self, mode: u32) -> io::Result<Option<File>> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.fd, ".", flags, Mode::from_raw_mode(mode)) {
            Ok(file) => Ok(Some(file.into())),
            // Without such files, or by kernels that do not know the flag, a directory is opened for writing.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Brings the names in it to stable storage.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(self.reopen()?)?)
    }

    /// For what a path alone does not allow.
    fn reopen(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(&self.fd, ".", flags, Mode::empty())
    }
}

impl Place {
    /// The place of the file at `path`, in the directory that its path leads to now.
    ///
    /// # Errors
    /// A path without a name at its end; whatever the host reports.
    pub fn of(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        Ok(Directory::open(path.parent().unwrap_or(Path::new(".")))?.place(name))
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The name.
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// The path, for people.
    pub fn path(&self) -> PathBuf {
        self.directory.path.join(&self.name)
    }

    /// What has the name.
    ///
    /// # Errors
    /// `NotFound` when nothing has it; whatever else the host reports.
    pub fn look(&self) -> io::Result<Entry> {
        Ok(Entry(rustix::fs::statat(&self.directory.fd, &self.name, AtFlags::SYMLINK_NOFOLLOW)?))
    }

    /// Whether a regular file has the name.
    pub fn is_file(&self) -> bool {
        self.look().is_ok_and(|found| found.is_file())
    }

    /// Opens the regular file of this name.
    ///
    /// # Errors
    /// `InvalidInput` for anything else, such as a link or a pipe; whatever the host reports.
    pub fn open(&self, access: Access) -> io::Result<File> {
        regular(self.open_as(access_flags(access) | OFlags::NOFOLLOW, 0))
    }

    /// As [`Place::open`] for reading and writing; makes the file with `mode` where there is none.
    ///
    /// # Errors
    /// As [`Place::open`].
    pub fn open_or_create(&self, mode: u32) -> io::Result<File> {
        regular(self.open_as(OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CREATE, mode))
    }

    /// Makes a file that was not there.
    ///
    /// # Errors
    /// `AlreadyExists`; whatever else the host reports.
    pub fn create(&self, mode: u32) -> io::Result<File> {
        self.open_as(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, mode)
    }

    fn open_as(&self, flags: OFlags, mode: u32) -> io::Result<File> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let mode = Mode::from_raw_mode(mode);
        Ok(rustix::fs::openat(&self.directory.fd, &self.name, flags, mode)?.into())
    }

    /// The directory of this name.
    ///
    /// # Errors
    /// Something else, such as a link to one; whatever the host reports.
    pub fn open_directory(&self) -> io::Result<Directory> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.directory.fd, &self.name, flags, Mode::empty())?;
        Ok(Directory { fd: Arc::new(fd), path: self.path() })
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// `AlreadyExists`; whatever else the host reports.
    pub fn create_directory(&self, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::mkdirat(&self.directory.fd, &self.name, Mode::from_raw_mode(mode))?)
    }

    /// Makes a symbolic link to `target`.
    ///
    /// # Errors
    /// `AlreadyExists`; whatever else the host reports.
    pub fn create_link(&self, target: &Path) -> io::Result<()> {
        Ok(rustix::fs::symlinkat(target, &self.directory.fd, &self.name)?)
    }

    /// Where the symbolic link of this name leads.
    ///
    /// # Errors
    /// Anything else; whatever the host reports.
    pub fn read_link(&self) -> io::Result<PathBuf> {
        let target = rustix::fs::readlinkat(&self.directory.fd, &self.name, Vec::new())?;
        Ok(OsStr::from_bytes(target.as_bytes()).into())
    }

    /// Removes a file or a link.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.directory.fd, &self.name, AtFlags::empty())?)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn remove_directory(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.directory.fd, &self.name, AtFlags::REMOVEDIR)?)
    }

    /// Gives what has this name another one, in the place of what has that.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn rename(&self, to: &Self) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.directory.fd, &self.name, &to.directory.fd, &to.name)?)
    }

    /// As [`Place::rename`], to a name that nothing has. Where the file system cannot do that in one step, the old name stays.
    ///
    /// # Errors
    /// `AlreadyExists`; whatever else the host reports.
    pub fn rename_new(&self, to: &Self) -> io::Result<()> {
        let (from, into) = (&self.directory.fd, &to.directory.fd);
        match rustix::fs::renameat_with(from, &self.name, into, &to.name, RenameFlags::NOREPLACE) {
            // File systems without that flag have links.
            Err(Errno::INVAL | Errno::NOSYS) => self.link(to),
            done => Ok(done?),
        }
    }

    /// Gives what has this name a second one.
    ///
    /// # Errors
    /// `AlreadyExists`; whatever else the host reports.
    pub fn link(&self, to: &Self) -> io::Result<()> {
        let (from, into) = (&self.directory.fd, &to.directory.fd);
        Ok(rustix::fs::linkat(from, &self.name, into, &to.name, AtFlags::empty())?)
    }

    /// Gives a file without a name this one.
    ///
    /// # Errors
    /// `AlreadyExists`; whatever else the host reports.
    pub fn give_to(&self, file: &File) -> io::Result<()> {
        let (into, place) = (&self.directory.fd, format!("/proc/self/fd/{}", file.as_raw_fd()));
        match rustix::fs::linkat(CWD, place, into, &self.name, AtFlags::SYMLINK_FOLLOW) {
            // No /proc: a privilege, or a new kernel, makes up for it.
            Err(Errno::NOENT) => Ok(rustix::fs::linkat(file, "", into, &self.name, AtFlags::EMPTY_PATH)?),
            done => Ok(done?),
        }
    }
}

impl Entry {
    /// What kind of file it is.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.0.st_mode)
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == FileType::RegularFile
    }

    /// Which file it is.
    pub fn file(&self) -> FileId {
        match self.kind() {
            FileType::BlockDevice => FileId { dev: self.0.st_rdev, ino: 0 },
            _ => FileId { dev: self.0.st_dev, ino: self.0.st_ino },
        }
    }
}

/// Opens the regular file that a user has named: links are followed.
///
/// # Errors
/// As [`Place::open`].
pub fn open_named(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    regular(rustix::fs::open(path, flags, Mode::empty()).map(File::from).map_err(io::Error::from))
}

/// Opens a block device that nobody else has open for itself, no file system among them.
///
/// # Errors
/// A device in use; whatever else the host reports.
pub fn open_device(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

fn access_flags(access: Access) -> OFlags {
    match access {
        Access::ReadOnly => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
    }
}

fn regular(opened: io::Result<File>) -> io::Result<File> {
    let other = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    let file = match opened {
        Ok(file) => file,
        // A link; a pipe that nobody reads, or a socket.
        Err(error)
            if [Errno::LOOP, Errno::NXIO].contains(&Errno::from_io_error(&error).unwrap_or(Errno::IO)) =>
        {
            return Err(other());
        }
        Err(error) => return Err(error),
    };
    let stat = rustix::fs::fstat(file.as_fd())?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile { Ok(file) } else { Err(other()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> (tempfile::TempDir, Directory) {
        let root = tempfile::tempdir().unwrap();
        for name in ["ours", "victim"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        std::fs::write(root.path().join("victim/file"), "theirs").unwrap();
        let ours = Directory::open(&root.path().join("ours")).unwrap();
        (root, ours)
    }

    #[test]
    fn what_is_planted_is_neither_followed_nor_waited_for() {
        let (root, ours) = tree();
        let path = |name: &str| root.path().join("ours").join(name);
        symlink(root.path().join("victim/file"), path("link")).unwrap();
        symlink(root.path().join("victim"), path("directory")).unwrap();
        rustix::fs::mknodat(CWD, path("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for name in ["link", "directory", "pipe", "socket"] {
            for access in [Access::ReadOnly, Access::ReadWrite] {
                let kind = ours.place(name).open(access).unwrap_err().kind();
                assert!(matches!(kind, io::ErrorKind::InvalidInput), "{name}: {kind}");
            }
            assert!(ours.place(name).open_or_create(0o600).is_err(), "{name}");
            assert_eq!(ours.place(name).create(0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            assert!(ours.place(name).open_directory().is_err(), "{name}");
        }
        assert_eq!(open_named(&path("link")).unwrap().metadata().unwrap().len(), 6);
        assert!(open_named(&path("pipe")).is_err());
        ours.place("link").remove().unwrap();
        assert!(root.path().join("victim/file").exists());
    }

    #[test]
    fn what_is_done_is_done_in_the_directory_that_was_opened() {
        let (root, ours) = tree();
        let path = |name: &str| root.path().join(name);
        ours.place("file").create(0o640).unwrap().write_all(b"ours").unwrap();
        std::fs::rename(path("ours"), path("moved")).unwrap();
        symlink(path("victim"), path("ours")).unwrap();
        ours.place("file").link(&ours.place("second")).unwrap();
        ours.place("second").rename(&ours.place("third")).unwrap();
        ours.place("third").rename_new(&ours.place("file")).unwrap_err();
        ours.place("file").remove().unwrap();
        let mut text = String::new();
        ours.place("third").open(Access::ReadOnly).unwrap().read_to_string(&mut text).unwrap();
        let names: Vec<_> = ours.entries().unwrap().map(|entry| entry.unwrap().0.name().to_owned()).collect();
        assert_eq!((&*text, names), ("ours", vec![OsString::from("third")]));
        assert_eq!(std::fs::read(path("victim/file")).unwrap(), b"theirs");
    }
}
