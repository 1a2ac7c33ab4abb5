//! A store in a local file or block device.
//!
//! Place in the data flow: `disk` makes one of every layer's file, opened through a [`crate::Gate`]. Requests
//! come through the [`Store`] trait from any thread; [`crate::Ring`]s read and write the raw descriptor.
//!
//! Invariants:
//! - The lock asked for is held from construction until the store is dropped, and on the open file that [`crate::Ring`]s use:
//!   requests that a killed process left in the kernel keep that open, so nobody else has the file before they are done.
//! - The length is never cached: a ring, or another descriptor of ours, may extend the file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use vmstrata_types::HostOffset;

use crate::direct::Direct;
use crate::identity::{FileId, FileIdentity};
use crate::lock::{self, LockError, LockKind};
use crate::{Access, LocalFile, Segment, Store, View, total_len, transfer, view};

/// Bytes by which a file may grow, at least, before it is mapped anew.
const ROOM_MIN: u64 = 1 << 30;

/// Whether file data goes through the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheMode {
    /// Through the page cache: all disks on a file share what one of them read.
    #[default]
    Host,
    /// Around it (`O_DIRECT`), where the file system can.
    Direct,
}

/// How to use a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// What the file was opened for.
    pub access: Access,
    /// Page cache or not.
    pub cache: CacheMode,
    /// The lock to take; `None` takes none.
    pub lock: Option<LockKind>,
    /// For how long to go on trying while someone else has the file locked. The kernel may hold the files of a
    /// killed process for a moment longer, until I/O in flight has ended.
    pub lock_patience: Duration,
}

impl FileOptions {
    /// The active layer of a disk: written, locked against every other user, with 5 s of patience.
    pub const ACTIVE: Self = Self {
        access: Access::ReadWrite,
        cache: CacheMode::Host,
        lock: Some(LockKind::Active),
        lock_patience: Duration::from_secs(5),
    };

    /// A frozen layer: only read, locked against writers, without patience.
    pub const FROZEN: Self = Self {
        access: Access::ReadOnly,
        cache: CacheMode::Host,
        lock: Some(LockKind::Frozen),
        lock_patience: Duration::ZERO,
    };
}

/// Why a file could not be made a store.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Someone else uses it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A system call on it failed.
    #[error("cannot examine {}: {source}", path.display())]
    Examine {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl FileError {
    /// The file, which the words of the error name.
    pub fn path(&self) -> &Path {
        match self {
            Self::Lock(error) => error.path(),
            Self::Examine { path, .. } => path,
        }
    }
}

/// A local file or block device.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    path: PathBuf,
    /// As taken when this was made.
    lock: Option<LockKind>,
    is_owner: bool,
    is_block_device: bool,
    /// Of [`LocalFile::begin_flush`].
    unflushed: AtomicU64,
    /// Present when direct I/O was asked for and works.
    direct: Option<Direct>,
}

/// Asks the kernel not to look after the file's access time with every read, which costs a few percent of a warm
/// one. Only the file's owner may ask; for others nothing changes. Returns whether that is us.
fn spare_access_time(file: &File) -> bool {
    let flags = rustix::fs::fcntl_getfl(file);
    flags.is_ok_and(|flags| rustix::fs::fcntl_setfl(file, flags | OFlags::NOATIME).is_ok())
}

impl FileStore {
    /// Makes a store of `file`, which was opened from `path` with `options.access`.
    ///
    /// Where the file system cannot do direct I/O the page cache is used: see [`FileStore::cache`].
    ///
    /// # Errors
    /// [`FileError`]: locked by someone else, or the kernel refused to say what it is.
    pub fn new(file: File, path: &Path, options: &FileOptions) -> Result<Self, FileError> {
        let failed = |source| FileError::Examine { path: path.to_owned(), source };
        let direct = match options.cache {
            CacheMode::Host => None,
            CacheMode::Direct => Direct::open(&file, options.access).map_err(failed)?,
        };
        if let Some(kind) = options.lock {
            lock::lock(ring_fd(&file, direct.as_ref()), path, kind, options.lock_patience)?;
        }
        let is_owner = spare_access_time(&file);
        let is_block_device = file.metadata().map_err(failed)?.file_type().is_block_device();
        let (path, lock, unflushed) = (path.to_owned(), options.lock, AtomicU64::new(0));
        Ok(Self { file, path, lock, is_owner, is_block_device, unflushed, direct })
    }

    /// The path the file was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How the file is really read and written.
    pub fn cache(&self) -> CacheMode {
        if self.direct.is_some() { CacheMode::Direct } else { CacheMode::Host }
    }

    /// Which file this is, and what tells whether it has changed.
    ///
    /// # Errors
    /// Whatever the kernel reports.
    pub fn identity(&self) -> io::Result<FileIdentity> {
        let metadata = self.file.metadata()?;
        let ns = |seconds: i64, ns: i64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
        Ok(FileIdentity {
            file: FileId::of(&metadata),
            len: self.len()?,
            mtime_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Punches or zeroes a range of a block device, whose ends need not be sector boundaries.
    fn zero_device(&self, at: u64, end: u64) -> io::Result<()> {
        /// No device has larger logical sectors that user space can address.
        const SECTOR: u64 = 4096;
        let (first, last) = (at.next_multiple_of(SECTOR), end - end % SECTOR);
        if first >= last {
            return self.write_zeros(at, end);
        }
        self.write_zeros(at, first)?;
        self.write_zeros(last, end)?;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, punch, first, last - first) {
            // A device that cannot unmap with the promise of zeros is told to write them.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
                fallocate(&self.file, zero, first, last - first)
            }
            done => done,
        }
    }

    fn write_zeros(&self, at: u64, end: u64) -> io::Result<()> {
        self.write_all(&vec![0; (end - at) as usize], HostOffset::new(at))
    }
}

/// The open file that rings read and write.
fn ring_fd<'a>(file: &'a File, direct: Option<&'a Direct>) -> BorrowedFd<'a> {
    direct.map_or_else(|| file.as_fd(), Direct::fd)
}

fn fallocate(file: &File, flags: FallocateFlags, at: u64, len: u64) -> io::Result<()> {
    retry(|| rustix::fs::fallocate(file, flags, at, len))
}

/// Repeats an interrupted system call.
fn retry<T>(call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    Ok(rustix::io::retry_on_intr(call)?)
}

impl Store for FileStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        match &self.direct {
            None => transfer::read_at(self.file.as_fd(), segments, at),
            Some(direct) => direct.read_at(segments, at),
        }
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        match &self.direct {
            None => {
                self.unflushed.fetch_add(total_len(segments) as u64, Ordering::Relaxed);
                transfer::write_at(self.file.as_fd(), segments, at)
            }
            Some(direct) => direct.write_at(&self.file, segments, at),
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.begin_flush();
        retry(|| rustix::fs::fdatasync(&self.file))
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        let end = at.get().saturating_add(len).min(self.len()?);
        if at.get() >= end {
            return Ok(());
        }
        if self.is_block_device {
            return self.zero_device(at.get(), end);
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, at.get(), end - at.get())
    }

    fn len(&self) -> io::Result<u64> {
        // Works for block devices too, whose metadata has no length.
        retry(|| rustix::fs::seek(&self.file, SeekFrom::End(0)))
    }

    /// Cuts off, or extends with zeros, to `len` bytes.
    ///
    /// # Errors
    /// `Unsupported` for any change to the length of a block device; otherwise whatever the kernel reports.
    fn set_len(&self, len: u64) -> io::Result<()> {
        if self.is_block_device {
            let unchanged = len == self.len()?;
            return if unchanged { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) };
        }
        self.file.set_len(len)
    }

    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        let end = self.len()?;
        if at.get() >= end {
            return Ok((true, at));
        }
        let (is_data, next) = match rustix::fs::seek(&self.file, SeekFrom::Data(at.get())) {
            Ok(data) if data > at.get() => (false, data),
            // Between the two calls the file may have changed; the answer is then right for one of the states.
            Ok(_) => (true, rustix::fs::seek(&self.file, SeekFrom::Hole(at.get())).unwrap_or(end)),
            Err(rustix::io::Errno::NXIO) => (false, end),
            // Block devices, and file systems that do not keep track.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => (true, end),
            Err(errno) => return Err(errno.into()),
        };
        Ok((is_data, HostOffset::new(next.max(at.get() + 1))))
    }

    fn local(&self) -> Option<&dyn LocalFile> {
        Some(self)
    }
}

impl LocalFile for FileStore {
    fn raw(&self) -> Option<BorrowedFd<'_>> {
        Some(ring_fd(&self.file, self.direct.as_ref()))
    }

    fn raw_alignment(&self) -> usize {
        self.direct.as_ref().map_or(1, Direct::alignment)
    }

    fn view(&self) -> Option<View> {
        if self.direct.is_some() || self.is_block_device || !view::is_local(self.file.as_fd()) {
            return None;
        }
        let len = self.len().ok()?;
        let grows = self.lock.is_some_and(|kind| kind != LockKind::Frozen);
        let room = if grows { len + (len / 4).max(ROOM_MIN) } else { len };
        View::new(self.file.as_fd(), len, room, self.is_owner)
    }

    fn give_up_writing(&self) -> io::Result<()> {
        let writes = self.lock.is_some_and(|kind| kind != LockKind::Frozen);
        if writes { lock::downgrade(ring_fd(&self.file, self.direct.as_ref())) } else { Ok(()) }
    }

    fn read_now(&self, buf: &mut [u8], at: HostOffset) -> bool {
        self.direct.is_none() && transfer::read_cached(self.file.as_fd(), buf, at)
    }

    fn allocate(&self, at: HostOffset, len: u64) -> io::Result<()> {
        fallocate(&self.file, FallocateFlags::empty(), at.get(), len)
    }

    fn begin_write_out(&self, at: HostOffset, len: u64) {
        if self.direct.is_none()
            && let (Ok(at), Ok(len)) = (at.get().try_into(), len.try_into())
        {
            // SAFETY: takes no pointer. An error of a write is left for the next flush to tell.
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE) };
        }
    }

    fn begin_flush(&self) -> u64 {
        self.unflushed.swap(0, Ordering::Relaxed)
    }
}
