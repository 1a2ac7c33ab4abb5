//! Files as such, whatever they are called.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// Which file this is and whether it has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// The file itself, by whatever name it was opened.
    pub file: FileId,
    /// Bytes up to the end.
    pub len: u64,
    /// Time of the last change to the data, in ns since 1970.
    pub mtime_ns: i64,
    /// Time of the last change to data or attributes, in ns since 1970.
    pub ctime_ns: i64,
}

/// A file, whatever its names: equal for all links to one file, and for all nodes of one block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The file system's device number; for a block device its own number.
    pub dev: u64,
    /// The inode number; 0, which no file system uses, for a block device.
    pub ino: u64,
}

impl FileId {
    /// The file that this was found out about.
    pub fn of(found: &Metadata) -> Self {
        if found.file_type().is_block_device() {
            Self { dev: found.rdev(), ino: 0 }
        } else {
            Self { dev: found.dev(), ino: found.ino() }
        }
    }

    /// The file that a path leads to; `None` if that cannot be found out.
    pub fn at(path: &Path) -> Option<Self> {
        path.metadata().ok().map(|found| Self::of(&found))
    }

    /// Whether it is a block device.
    pub fn is_device(&self) -> bool {
        self.ino == 0
    }
}
