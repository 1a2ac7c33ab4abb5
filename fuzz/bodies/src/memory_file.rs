//! One image in memory, opened as the engine opens files: as often as wanted, under the one name [`NAME`].
//!
//! Invariants: any other name but that of a small raw [`BASE`] is not found; the file grows no further than
//! [`LEN_MAX`], as on a file system that is full.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use vmstrata_disk::{
    Disk, Error, ErrorKind, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
};
use vmstrata_store::{FileId, FileIdentity, Gate, MemoryStore, Segment, Store, total_len};
use vmstrata_types::HostOffset;

/// The image.
pub(crate) const NAME: &str = "/fuzz/image";
/// What an image may name as its backing file.
const BASE: &str = "base";
const BASE_LEN: usize = 64 << 10;
const LEN_MAX: u64 = 32 << 20;

/// The image's inode; the device is 1.
pub(crate) const INODE: u64 = 7;

/// See the module documentation.
#[derive(Clone, Debug)]
pub(crate) struct MemoryFile {
    pub(crate) store: Arc<SmallStore>,
}

impl MemoryFile {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { store: Arc::new(SmallStore(MemoryStore::from_vec(bytes))) }
    }

    /// Opens the image, with the volatile journal in `journal_dir` if there is one.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub(crate) fn open(&self, read_only: bool, journal_dir: Option<&Path>) -> Result<Arc<Disk>, Error> {
        self.open_with(OpenOptions { read_only, ..OpenOptions::default() }, journal_dir)
    }

    /// As [`MemoryFile::open`].
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub(crate) fn open_with(
        &self,
        open: OpenOptions,
        journal_dir: Option<&Path>,
    ) -> Result<Arc<Disk>, Error> {
        let options = ResourceOptions {
            metadata_cache_bytes: 1 << 20,
            max_open_files: 4,
            workers: 1,
            journal_dir: journal_dir.map(Path::to_owned),
            // The same bytes do the same each time.
        };
        let resources = Resources::with_opener(options, Arc::new(self.clone()));
        Disk::open(Path::new(NAME), &open, &resources)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.store.0.to_vec()
    }
}

impl Opener for MemoryFile {
    fn flush_name(&self, _: &Path) -> Result<(), Error> {
        Ok(())
    }

    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened, Error> {
        if role == Role::Journal {
            return LocalFiles.open(path, role, gate);
        }
        // Written to between two openings, a file is never in the same state again.
        static TIME: AtomicI64 = AtomicI64::new(0);
        let is_base = path.file_name().is_some_and(|name| name == BASE);
        let (store, ino): (Arc<dyn Store>, u64) = if path == Path::new(NAME) {
            (self.store.clone(), INODE)
        } else if is_base {
            (Arc::new(MemoryStore::from_vec(vec![0xba; BASE_LEN])), INODE + 1)
        } else {
            let source = io::ErrorKind::NotFound.into();
            return Err(ErrorKind::Io { action: "open the file", source }.into());
        };
        let now = TIME.fetch_add(1, Ordering::Relaxed);
        let len = store.len().map_err(|source| ErrorKind::Io { action: "see the length", source })?;
        let identity = FileIdentity { file: FileId { dev: 1, ino }, len, mtime_ns: now, ctime_ns: now };
        Ok(Opened { store, identity })
    }
}

/// Memory that is full at [`LEN_MAX`].
#[derive(Debug)]
pub(crate) struct SmallStore(MemoryStore);

fn within(end: Option<u64>) -> io::Result<()> {
    if end.is_some_and(|end| end <= LEN_MAX) { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
}

impl Store for SmallStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.0.read_segments(segments, at)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        within(at.get().checked_add(total_len(segments) as u64))?;
        self.0.write_segments(segments, at)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.0.punch_hole(at, len)
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        within(Some(len))?;
        self.0.set_len(len)
    }
}
