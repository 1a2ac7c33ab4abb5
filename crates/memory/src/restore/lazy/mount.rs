//! A file system with one file per memory backend, whose pages are read when they are touched.
//!
//! Once QEMU has the files open the mount is taken out of everybody's sight: the file system lives until QEMU ends, and nothing
//! is left of it then, however QEMU or this process ended.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use rustix::fs::FallocateFlags;
use rustix::mount::{UnmountFlags, unmount};

use super::memory::{LazyMemory, PageError};
use crate::address::PAGE_BYTES;

/// Threads that serve page faults: one that waits for a slow repository must not hold up the others.
const THREADS: usize = 4;
/// The most bytes of a write.
const WRITE_MAX: u32 = 1 << 20;
/// What the kernel may remember: sizes and names never change.
const EVER: Duration = Duration::from_secs(1 << 30);
/// The inode of the first file; 1 is the directory.
const FIRST: u64 = 2;

/// A file of the file system: a part of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// Its name.
    pub name: String,
    /// Its bytes; they follow those of the file before it.
    pub bytes: u64,
}

/// A file system that is mounted, or was and is still in use.
#[derive(Debug)]
pub struct Mounted {
    dir: PathBuf,
    /// Whether it can be seen in `dir`.
    visible: bool,
    _session: BackgroundSession,
}

impl Mounted {
    /// Mounts `files` of `memory` on the directory `dir`, which is made.
    ///
    /// # Errors
    /// When the directory cannot be made, or the host does not let this user mount.
    pub fn new(memory: Arc<LazyMemory>, files: Vec<MemoryFile>, dir: &Path) -> io::Result<Self> {
        fs::create_dir(dir)?;
        let mut config = Config::default();
        let named = MountOption::FSName("vmstrata".to_owned());
        config.mount_options = vec![named, MountOption::NoSuid, MountOption::NoDev, MountOption::NoExec];
        config.n_threads = Some(THREADS);
        let session = Session::new(MemoryFs::new(memory, files), dir, &config).and_then(Session::spawn);
        match session {
            Ok(session) => Ok(Self { dir: dir.to_owned(), visible: true, _session: session }),
            Err(error) => {
                let _ = fs::remove_dir(dir);
                Err(error)
            }
        }
    }

    /// Takes the mount away; who has a file open keeps it.
    ///
    /// # Errors
    /// When it is still there.
    pub fn detach(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.visible, false) { detach(&self.dir) } else { Ok(()) }
    }
}

/// Takes the mount on a directory away, and removes the directory.
///
/// # Errors
/// When one of them is still there.
pub fn detach(dir: &Path) -> io::Result<()> {
    // What a link leads to is not this program's.
    match unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Err(rustix::io::Errno::PERM) => {
            Command::new("fusermount3").args(["-u", "-z", "--"]).arg(dir).status()?;
        }
        // There is no mount, or no directory.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
        other => other?,
    }
    fs::remove_dir(dir)
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            tracing::warn!("{}: the mount is left: {error}", self.dir.display());
        }
    }
}

/// What the kernel asks.
#[derive(Debug)]
struct MemoryFs {
    memory: Arc<LazyMemory>,
    /// Each with the offset of its first byte in the memory.
    files: Vec<(u64, MemoryFile)>,
}

impl MemoryFs {
    fn new(memory: Arc<LazyMemory>, files: Vec<MemoryFile>) -> Self {
        let mut before = 0;
        let place = |file: MemoryFile| {
            let start = before;
            before += file.bytes;
            (start, file)
        };
        Self { files: files.into_iter().map(place).collect(), memory }
    }

    fn file(&self, ino: INodeNo) -> Option<&(u64, MemoryFile)> {
        self.files.get(usize::try_from(u64::from(ino).checked_sub(FIRST)?).ok()?)
    }

    /// Where `len` bytes of a file lie in the memory.
    fn place(&self, ino: INodeNo, offset: u64, len: u64) -> Result<u64, Errno> {
        let (start, file) = self.file(ino).ok_or(Errno::ENOENT)?;
        let end = offset.checked_add(len).filter(|end| *end <= file.bytes);
        end.map(|_| start + offset).ok_or(Errno::EINVAL)
    }

    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, size, perm) = match self.file(ino) {
            Some((_, file)) => (FileType::RegularFile, file.bytes, 0o600),
            None if ino == INodeNo::ROOT => (FileType::Directory, 0, 0o500),
            None => return None,
        };
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        // Times that change would have the kernel drop what it has of the file.
        let time = SystemTime::UNIX_EPOCH;
        let (atime, mtime, ctime, crtime) = (time, time, time, time);
        let blksize = PAGE_BYTES as u32;
        let (blocks, nlink, rdev, flags) = (size.div_ceil(512), 1, 0, 0);
        Some(FileAttr {
            ino,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            crtime,
            kind,
            perm,
            nlink,
            uid,
            gid,
            rdev,
            blksize,
            flags,
        })
    }
}

/// An error is said here: the kernel passes on no more than that there is one, and QEMU is killed for it (SIGBUS) when its
/// guest needs the page.
fn refusal(error: &PageError) -> Errno {
    tracing::error!("{error}; QEMU is ended by SIGBUS if its guest needs it");
    Errno::EIO
}

impl Filesystem for MemoryFs {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The limit it had stays if the kernel does not take this one.
        let _ = config.set_max_write(WRITE_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let index = self.files.iter().position(|(_, file)| *file.name == *name);
        let ino = index.filter(|_| parent == INodeNo::ROOT).map(|index| INodeNo(FIRST + index as u64));
        match ino.and_then(|ino| self.attr(ino)) {
            Some(attr) => reply.entry(&EVER, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(attr) => reply.attr(&EVER, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // What a QEMU that ends had written need not come here.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let follow = self.file(ino).map_or(0, |(_, file)| file.bytes.saturating_sub(offset));
        let len = u64::from(size).min(follow);
        let mut bytes = vec![0; len as usize];
        let read = self
            .place(ino, offset, len)
            .and_then(|at| self.memory.read(at, &mut bytes).map_err(|error| refusal(&error)));
        match read {
            Ok(()) => reply.data(&bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .place(ino, offset, data.len() as u64)
            .and_then(|at| self.memory.write(at, data).map_err(|error| refusal(&error)));
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    /// Takes back pages that a balloon gave up; anything else is not done.
    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if mode.cast_unsigned() != punch.bits() {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let done = self
            .place(ino, offset, length)
            .and_then(|at| self.memory.discard(at, length).map_err(|error| refusal(&error)));
        match done {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }
}
