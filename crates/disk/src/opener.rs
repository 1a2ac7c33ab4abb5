//! Opening the files of a chain: the one place where the engine meets the file system.
//!
//! [`LocalFiles`] is what everyone uses. Tests put their own [`Opener`] in its place, to wrap every file of a
//! chain in a store that fails, delays and records, and to give queues rings that go through such stores.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vmstrata_store::{
    Access, CacheMode, FileError, FileId, FileIdentity, FileOptions, FileStore, Gate, Holders, LockError,
    LockKind, OpenFiles, Place, Ring, Store,
};

use crate::atomic_file::{PRIVATE, sync_directory};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::names::{is_published, sidecar_of};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The layer that takes the guest's writes: opened for writing, with a writer's lock.
    Active(CacheMode),
    /// A layer that must not change: opened for reading, with a reader's lock that keeps writers out.
    Frozen,
    /// Tables of a file that is only looked at, by `info` for instance: no lock.
    Inspected,
    /// A frozen layer that takes an index past its allocated end: what is read there does not change, so it is opened for
    /// writing beside readers, by one at a time.
    Indexed,
    /// The same for a frozen layer that is copied into: there must be no readers that know its tables, but for this process.
    CopiedInto,
    /// Half of the volatile journal of an image: made where it is not there yet, for its owner alone. No lock: the image's
    /// covers it.
    Journal,
}

/// An open file of a chain.
#[derive(Debug)]
pub struct Opened {
    /// Its bytes.
    pub store: Arc<dyn Store>,
    /// Which file it is, and in what state it was when it was opened.
    pub identity: FileIdentity,
}

/// Opens the files of chains.
pub trait Opener: Send + Sync + std::fmt::Debug {
    /// Opens `path` for `role` if `gate` lets it through.
    ///
    /// # Errors
    /// The gate's refusal, a conflicting lock, or whatever the host reports.
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened>;

    /// Which file `path` is, and in what state, if `gate` lets it through.
    ///
    /// # Errors
    /// As [`Opener::open`].
    fn identity(&self, path: &Path, gate: &Gate) -> Result<FileIdentity> {
        Ok(self.open(path, Role::Inspected, gate)?.identity)
    }

    /// Where the index of the layer at `layer` lies if that has no room for it; `None` if it may have none there. `gate` is the one
    /// that its chain is opened through.
    fn sidecar(&self, layer: &Path, _gate: &Gate) -> Option<PathBuf> {
        sidecar_of(layer)
    }

    /// Brings the name of a file to stable storage, which a process may have been killed before it did. A directory that this user
    /// may not read is left alone.
    ///
    /// # Errors
    /// Whatever the host reports.
    fn flush_name(&self, path: &Path) -> Result<()> {
        match sync_directory(path) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            flushed => flushed.while_trying("flush the image's directory"),
        }
    }

    /// Whether bytes of some of its files may be elsewhere ([`Store::fetch`]).
    fn may_be_absent(&self) -> bool {
        false
    }

    /// A ring for the files that this opens, meant for up to `depth` requests at a time.
    ///
    /// # Errors
    /// As [`Ring::new`].
    fn ring(&self, depth: u32) -> io::Result<Ring> {
        Ring::new(depth)
    }
}

/// Files and block devices of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalFiles;

/// How long to try to lock a frozen layer: so that a server that was killed while it merged keeps its successor from nothing, and
/// a tool that writes to a layer for a moment no guest's request.
const DYING: Duration = Duration::from_secs(1);

/// How long to go on trying to lock an active layer's file while no process has it open.
const LINGERING: Duration = Duration::from_secs(60);

impl Opener for LocalFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened> {
        let written =
            |lock| FileOptions { access: Access::ReadWrite, lock: Some(lock), ..FileOptions::FROZEN };
        if is_published(path) && matches!(role, Role::Active(_) | Role::Indexed | Role::CopiedInto) {
            return Err(Error::from(ErrorKind::Published).in_file(path));
        }
        let options = match role {
            Role::Active(cache) => FileOptions { cache, ..FileOptions::ACTIVE },
            Role::Frozen => FileOptions { lock_patience: DYING, ..FileOptions::FROZEN },
            Role::Inspected => FileOptions { lock: None, ..FileOptions::FROZEN },
            Role::Indexed => written(LockKind::Unchanged),
            Role::CopiedInto => written(LockKind::CopiedInto),
            Role::Journal => FileOptions { access: Access::ReadWrite, lock: None, ..FileOptions::FROZEN },
        };
        let file = match role {
            Role::Journal => {
                let made = Place::of(path).and_then(|place| place.open_or_create(PRIVATE));
                made.while_trying("open or make it").map_err(|error| error.in_file(path))?
            }
            _ => gate.open(path, options.access)?,
        };
        let store = match FileStore::new(file, path, &options) {
            Err(FileError::Lock(LockError::Conflict { .. })) if is_held_by_nobody(path, role) => {
                tracing::warn!(file = %path.display(), "locked, and no process has it open: waiting for the I/O of a killed one");
                let options = FileOptions { lock_patience: LINGERING, ..options };
                FileStore::new(gate.open(path, options.access)?, path, &options)?
            }
            store => store?,
        };
        let identity =
            store.identity().while_trying("read the file's identity").map_err(|e| e.in_file(path))?;
        Ok(Opened { store: Arc::new(store), identity })
    }

    fn identity(&self, path: &Path, gate: &Gate) -> Result<FileIdentity> {
        match gate.look(path)? {
            Some(identity) => Ok(identity),
            None => Ok(self.open(path, Role::Inspected, gate)?.identity),
        }
    }
}

/// Whether the lock on the file of an active layer is what a killed process has left: requests that its device has not answered.
fn is_held_by_nobody(path: &Path, role: Role) -> bool {
    let Some(file) = FileId::at(path) else { return false };
    if !matches!(role, Role::Active(_)) || OpenFiles::own().map_or(true, |own| own.count(file) > 0) {
        return false;
    }
    let Holders { pids, unseen } = Holders::of([&file]);
    pids.is_empty() && !unseen.into_iter().any(uses_images)
}

/// Whether a process that cannot be looked into is one that uses images, by its name.
fn uses_images(pid: u32) -> bool {
    let program = vmstrata_store::proc::program(pid);
    ["qemu", "kvm", "vmstrata", "cloud-hypervis"].iter().any(|name| program.starts_with(name))
}

/// The directory that relative backing names in `path` are relative to.
pub fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
