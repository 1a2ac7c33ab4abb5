//! What a mount shows. The kernel asks at each lookup, so disks and snapshots may come and go.

use std::ffi::{OsStr, OsString};
use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use rustix::io::Errno;
use vmstrata_disk::{AttachedWriter, Disk};

/// What has a name in a mount.
#[derive(Clone, Debug)]
pub enum Node {
    /// More names.
    Directory(Arc<dyn Directory>),
    /// A state of a disk.
    File(Arc<dyn File>),
}

/// A directory of a mount.
pub trait Directory: Debug + Send + Sync {
    /// What is in it, by name.
    ///
    /// # Errors
    /// What the directory shows cannot be listed.
    fn list(&self) -> io::Result<Vec<(OsString, Node)>>;

    /// What has a name in it.
    ///
    /// # Errors
    /// ENOENT, or as [`Directory::list`].
    fn find(&self, name: &OsStr) -> io::Result<Node> {
        let found = self.list()?.into_iter().find(|(other, _)| other == name);
        found.map(|(_, node)| node).ok_or_else(|| Errno::NOENT.into())
    }
}

/// A file of a mount: a disk as it is now, or as it was at a snapshot.
pub trait File: Debug + Send + Sync {
    /// Tells apart files that have the same name, one after the other.
    fn id(&self) -> u64;

    /// What `stat` shows of it.
    fn about(&self) -> About;

    /// Opens the disk, for writing if asked to.
    ///
    /// # Errors
    /// What `open` reports.
    fn open(&self, writes: bool) -> io::Result<Opened>;

    /// Whether it may be open: looked at once it is, as its disk may have been withdrawn meanwhile.
    fn is_served(&self) -> bool {
        true
    }
}

/// What `stat` shows of a file.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that its layers take on the host.
    pub allocated: u64,
    /// When it changed last, as far as is known.
    pub modified: SystemTime,
    /// Whether it may be opened for writing.
    pub is_writable: bool,
    /// Whether its bytes never change: the kernel may keep them.
    pub is_fixed: bool,
}

/// An open file.
#[derive(Debug)]
pub struct Opened {
    /// The disk.
    pub disk: Arc<Disk>,
    /// Its place among the disk's writers, if it was opened for writing.
    pub writer: Option<AttachedWriter>,
    /// Whether its bytes never change.
    pub is_fixed: bool,
    /// The served disk that it belongs to: see [`Mount::withdraw`](super::Mount::withdraw).
    pub of: String,
}
