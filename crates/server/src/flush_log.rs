//! The log that makes the disks' flushes durable: made or brought into the images before a disk is opened, empty once all are closed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_api as api;
use vmstrata_disk::{Opened, Opener, Role, open_logged};
use vmstrata_flushlog::{FlushLog, Host, LogError, LoggedStore, Targets};
pub use vmstrata_flushlog::{Held, Recovered, Subject};
use vmstrata_store::{
    Access, CacheMode, FileIdentity, FileOptions, FileStore, Gate, LockKind, Place, Ring, Store, proc,
};
use vmstrata_types::{HostOffset, path_to_text};

use crate::error::Error;

/// Bytes that are written at once while a log is made, and of which its length is a multiple.
const CHUNK: usize = 4 << 20;
/// Who may read it: what guests write is in it.
const PRIVATE: u32 = 0o600;
/// How long to wait for a server that is ending to let go of it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Opens the log at `path`, and brings what it has into the images. A file that is not there, or is empty, becomes a log of `len` bytes.
///
/// # Errors
/// A file that cannot be used as a log, or an image that cannot be brought what it has: nothing is served then.
pub(crate) fn open(path: &Path, len: u64) -> Result<Arc<FlushLog>, Error> {
    if let Err(error) = path.metadata()
        && error.kind() == io::ErrorKind::NotFound
    {
        Place::of(path).and_then(|place| place.open_or_create(PRIVATE)).map_err(io(path, "make"))?;
    }
    let store = open_store(path, PATIENCE).map_err(io(path, "open"))?;
    if store.len().map_err(io(path, "read"))? == 0 {
        let len = len.next_multiple_of(CHUNK as u64);
        fill(&store, len).and_then(|()| Place::of(path)?.directory().sync()).map_err(io(path, "make"))?;
        tracing::info!(log = %path.display(), bytes = len, "made a flush log");
    }
    let (log, _) = bring(path, store, &[])?;
    log.start_checkpoints().map_err(io(path, "start the thread of"))?;
    Ok(log)
}

/// What the log at `path` has that is not in the images, while no server uses it. Changes nothing.
///
/// # Errors
/// No log, or one that is in use or damaged.
pub fn held(path: &Path) -> Result<Vec<Held>, Error> {
    let store = open_store(path, Duration::ZERO).map_err(io(path, "open"))?;
    Ok(FlushLog::look(&store, path, this_host().map_err(io(path, "tell whose is"))?)?)
}

/// Brings what the log at `path` has into the images, as a server does that starts with it, and empties it. What it has of the images
/// in `discarded` is lost.
///
/// # Errors
/// As [`held`]; an image that cannot be brought what the log has of it.
pub fn recover(path: &Path, discarded: &[PathBuf]) -> Result<Recovered, Error> {
    let store = open_store(path, Duration::ZERO).map_err(io(path, "open"))?;
    Ok(bring(path, store, discarded)?.1)
}

fn io(log: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> LogError {
    let log = log.to_owned();
    move |source| LogError::Io { log, doing, source }
}

fn bring(path: &Path, store: FileStore, discarded: &[PathBuf]) -> Result<(Arc<FlushLog>, Recovered), Error> {
    let host = this_host().map_err(io(path, "tell whose is"))?;
    let started = Instant::now();
    let (log, recovered) = FlushLog::open(Arc::new(store), path, host, &Images { discarded })?;
    for subject in &recovered.replayed {
        tracing::info!(file = %subject.path.display(), log = %path.display(), "brought flushed writes from the flush log");
    }
    for subject in &recovered.synced {
        tracing::info!(file = %subject.path.display(), log = %path.display(), "synced what was flushed to the flush log");
    }
    for subject in &recovered.lost {
        tracing::warn!(file = %subject.path.display(), log = %path.display(), "discarded what the flush log had of it");
    }
    if recovered.bytes > 0 {
        let ms = started.elapsed().as_millis();
        tracing::info!(log = %path.display(), bytes = recovered.bytes, ms, "the flush log was recovered");
    }
    Ok((log, recovered))
}

/// Makes sure that the log is empty. All disks are closed.
///
/// # Errors
/// A host that cannot write it.
pub(crate) fn close(log: &FlushLog) -> Result<(), Error> {
    let emptied = log.advance();
    emptied.map_err(io(log.path(), "empty"))?;
    let usage = log.usage();
    tracing::info!(log = %log.path().display(), flushes = usage.records, syncs = usage.syncs, left = usage.used, "the flush log is closed");
    Ok(())
}

fn open_store(path: &Path, patience: Duration) -> io::Result<FileStore> {
    let file = Gate::unrestricted().open(path, Access::ReadWrite).map_err(io::Error::other)?;
    let options = FileOptions {
        access: Access::ReadWrite,
        cache: CacheMode::Direct,
        lock: Some(LockKind::Active),
        lock_patience: patience,
    };
    FileStore::new(file, path, &options).map_err(io::Error::other)
}

/// Gives a file its length, in zeros: what is written over them later needs no change of the file's extents, so that a sync has only
/// bytes to write.
fn fill(store: &FileStore, len: u64) -> io::Result<()> {
    let zeros = vmstrata_store::AlignedBuf::zeroed(CHUNK);
    (0..len).step_by(CHUNK).try_for_each(|at| store.write_all(&zeros, HostOffset::new(at)))?;
    store.flush()
}

fn this_host() -> io::Result<Host> {
    let digits = |text: &str| {
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        u128::from_str_radix(&digits, 16).map(u128::to_le_bytes).map_err(io::Error::other)
    };
    // A host without a name of its own is told by nothing.
    let id = std::fs::read_to_string("/etc/machine-id").ok().and_then(|text| digits(&text).ok());
    Ok(Host { id: id.unwrap_or_default(), boot: digits(&proc::boot_id()?)? })
}

/// Finds the images that the log has writes of.
struct Images<'a> {
    discarded: &'a [PathBuf],
}

impl Targets for Images<'_> {
    fn open(&self, subject: &Subject, marks: &[u64]) -> io::Result<Option<Arc<dyn Store>>> {
        if self.discarded.contains(&subject.path) {
            return Ok(None);
        }
        open_logged(&subject.path, subject.ino, marks).map(Some).map_err(io::Error::other)
    }
}

/// Images whose flushes a log makes durable, and all that another opener knows.
#[derive(Debug)]
pub(crate) struct LoggedFiles {
    others: Arc<dyn Opener>,
    log: Arc<FlushLog>,
}

impl LoggedFiles {
    /// Files that `others` opens, and `log`.
    pub(crate) fn over(others: Arc<dyn Opener>, log: &Arc<FlushLog>) -> Arc<dyn Opener> {
        Arc::new(Self { others, log: Arc::clone(log) })
    }
}

impl Opener for LoggedFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let Opened { store, identity } = self.others.open(path, role, gate)?;
        // Only what is written through the host's page cache is whole in a log; a device has no inode to be known by.
        let is_file =
            store.local().is_some_and(|file| file.raw_alignment() == 1) && !identity.file.is_device();
        let store: Arc<dyn Store> = match role {
            Role::Active(CacheMode::Host) if is_file => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
                LoggedStore::new(store, path, identity.file.ino, &self.log)
            }
            _ => store,
        };
        Ok(Opened { store, identity })
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<FileIdentity> {
        self.others.identity(path, gate)
    }

    fn sidecar(&self, layer: &Path, gate: &Gate) -> Option<PathBuf> {
        self.others.sidecar(layer, gate)
    }

    fn flush_name(&self, path: &Path) -> vmstrata_disk::Result<()> {
        self.others.flush_name(path)
    }

    fn may_be_absent(&self) -> bool {
        self.others.may_be_absent()
    }

    fn ring(&self, depth: u32) -> io::Result<Ring> {
        self.others.ring(depth)
    }
}

/// How the log is used.
pub(crate) fn status(log: &FlushLog) -> api::FlushLogStatus {
    let usage = log.usage();
    api::FlushLogStatus {
        path: path_to_text(log.path()),
        bytes: usage.bytes,
        used_bytes: usage.used,
        files: usage.files as u64,
        flushes: usage.records,
        syncs: usage.syncs,
        waiting: usage.waiting as u64,
        failed: log.failure(),
    }
}
