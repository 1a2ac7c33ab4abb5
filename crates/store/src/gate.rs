//! The gate that backing files are opened through.
//!
//! The name of a backing file comes out of an image, which may be hostile: it could name any file of the host,
//! directly, through `..`, or through a symbolic link that changes between check and use. A [`Gate`] opens a
//! file only when it really lies below a directory the operator allowed.
//!
//! Place in the data flow: `disk` opens every layer through a gate and makes a [`crate::FileStore`] of the result.
//!
//! Invariant: what was checked is what is opened. The file is first pinned without opening it (`O_PATH`), the
//! kernel is asked where the pinned file is, and the pinned file itself is then opened. No name is looked up twice,
//! and nothing but regular files and block devices is ever opened, so a FIFO or a device cannot hang or act.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};

use crate::{FileId, FileIdentity};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reading only.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// Opens files that lie below allowed directories.
#[derive(Clone, Debug)]
pub struct Gate {
    /// Canonical; `None` allows every file.
    allowed: Option<Vec<PathBuf>>,
}

/// Why a gate did not open a file.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// An allowed directory does not exist or cannot be entered.
    #[error("cannot use {} as an allowed directory: {source}", path.display())]
    Directory {
        /// The directory as given.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file as named.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file lies outside every allowed directory.
    #[error(
        "{} is outside the allowed directories ({}){}; to use it, add --allow-backing {}",
        path.display(), List(allowed), Resolved(path, resolved),
        resolved.parent().unwrap_or(resolved).display()
    )]
    Outside {
        /// The file as named.
        path: PathBuf,
        /// Where it really is.
        resolved: PathBuf,
        /// The directories it may be in.
        allowed: Vec<PathBuf>,
    },
    /// Neither a regular file nor a block device.
    #[error("{} is a {kind}, not a regular file or block device", path.display())]
    NotAFile {
        /// The file as named.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
}

impl GateError {
    /// The file or directory, which the words of the error name.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory { path, .. }
            | Self::Open { path, .. }
            | Self::Outside { path, .. }
            | Self::NotAFile { path, .. } => path,
        }
    }
}

struct List<'a>(&'a [PathBuf]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, path) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{}", path.display())?;
        }
        Ok(())
    }
}

struct Resolved<'a>(&'a Path, &'a Path);

impl fmt::Display for Resolved<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == self.1 { Ok(()) } else { write!(f, ": it really is {}", self.1.display()) }
    }
}

impl Gate {
    /// A gate that opens files below any of `directories`, at any depth.
    ///
    /// # Errors
    /// [`GateError::Directory`] when one of them does not resolve.
    pub fn new<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> Result<Self, GateError> {
        let allowed = directories.into_iter().map(|directory| {
            let directory = directory.as_ref();
            directory
                .canonicalize()
                .map_err(|source| GateError::Directory { path: directory.to_owned(), source })
        });
        Ok(Self { allowed: Some(allowed.collect::<Result<_, _>>()?) })
    }

    /// A gate that opens any regular file or block device: for the one disk the operator named.
    pub fn unrestricted() -> Self {
        Self { allowed: None }
    }

    /// Opens `path`, which must lie below an allowed directory once every link is followed.
    ///
    /// # Errors
    /// [`GateError`]: not there, not permitted, outside, or not a file.
    pub fn open(&self, path: &Path, access: Access) -> Result<File, GateError> {
        let (pinned, _) = self.pin(path)?;
        let failed = |source: io::Error| GateError::Open { path: path.to_owned(), source };
        reopen(&pinned, access, OFlags::empty()).map_err(failed)
    }

    /// Which file `path` is, and in what state, without opening it; `None` for a block device, whose length only its
    /// opener can tell.
    ///
    /// # Errors
    /// As [`Gate::open`], but for permission to read it.
    pub fn look(&self, path: &Path) -> Result<Option<FileIdentity>, GateError> {
        let (_, stat) = self.pin(path)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let ns = |seconds: i64, ns: u64| seconds.saturating_mul(1_000_000_000).saturating_add_unsigned(ns);
        Ok(Some(FileIdentity {
            file: FileId { dev: stat.st_dev, ino: stat.st_ino },
            len: u64::try_from(stat.st_size).unwrap_or(0),
            mtime_ns: ns(stat.st_mtime, stat.st_mtime_nsec),
            ctime_ns: ns(stat.st_ctime, stat.st_ctime_nsec),
        }))
    }

    /// Pins the file at `path`, if it is one and may be opened.
    fn pin(&self, path: &Path) -> Result<(OwnedFd, Stat), GateError> {
        let failed = |source: io::Error| GateError::Open { path: path.to_owned(), source };
        let pinned = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed(errno.into()))?;
        let stat = rustix::fs::fstat(&pinned).map_err(|errno| failed(errno.into()))?;
        if let Some(kind) = refused_kind(FileType::from_raw_mode(stat.st_mode)) {
            return Err(GateError::NotAFile { path: path.to_owned(), kind });
        }
        if self.allowed.is_some() {
            self.check(path, &location(&pinned).map_err(failed)?)?;
        }
        Ok((pinned, stat))
    }

    /// Refuses the file at `path`, which really is at `resolved`, if it lies outside.
    ///
    /// # Errors
    /// [`GateError::Outside`].
    pub fn check(&self, path: &Path, resolved: &Path) -> Result<(), GateError> {
        match &self.allowed {
            Some(allowed) if !allowed.iter().any(|directory| resolved.starts_with(directory)) => {
                let (path, resolved, allowed) = (path.to_owned(), resolved.to_owned(), allowed.clone());
                Err(GateError::Outside { path, resolved, allowed })
            }
            _ => Ok(()),
        }
    }
}

fn refused_kind(kind: FileType) -> Option<&'static str> {
    match kind {
        FileType::RegularFile | FileType::BlockDevice => None,
        FileType::Directory => Some("directory"),
        FileType::Fifo => Some("FIFO"),
        FileType::Socket => Some("socket"),
        FileType::CharacterDevice => Some("character device"),
        FileType::Symlink | FileType::Unknown => Some("file of unknown type"),
    }
}

/// Where the file behind `fd` is, as the kernel knows it.
fn location(fd: &OwnedFd) -> io::Result<PathBuf> {
    let target = rustix::fs::readlink(proc_path(fd), Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

/// Opens the file behind `fd` again, whatever its name is now.
pub(crate) fn reopen(fd: &impl AsRawFd, access: Access, extra: OFlags) -> io::Result<File> {
    let mode = match access {
        Access::ReadOnly => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
    };
    let flags = mode | extra | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(rustix::fs::open(proc_path(fd), flags, Mode::empty())?.into())
}

fn proc_path(fd: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
