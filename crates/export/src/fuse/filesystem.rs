//! What the kernel asks of a mount.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use parking_lot::{Mutex, RwLock};
use rustix::fs::FallocateFlags;

use super::file::OpenFile;
use super::inodes::Inodes;
use super::tree::{About, Node};

/// The most bytes of a read or a write.
const REQUEST_MAX: u32 = 1 << 20;
/// Requests that the kernel sends without a thread of the caller that waits: readahead, and what a loop device has under way.
const BACKGROUND_MAX: u16 = 256;
/// Files open at a time: each has a thread.
const OPEN_MAX: usize = 1024;
/// What the kernel may remember of files whose bytes never change.
const EVER: Duration = Duration::from_secs(1 << 30);
/// What it may remember of others.
const NEVER: Duration = Duration::ZERO;
/// In a listing, an entry's number if it is not known.
const UNKNOWN: INodeNo = INodeNo(0xffff_ffff);
const BLOCK: u32 = 4096;

/// What a mount has open. Lock order: none of the locks is held while another is taken.
#[derive(Debug)]
pub(super) struct Files {
    inodes: Mutex<Inodes>,
    open: RwLock<HashMap<u64, Arc<OpenFile>>>,
    listed: Mutex<HashMap<u64, Vec<(OsString, FileType)>>>,
    next: AtomicU64,
    for_all: bool,
}

impl Files {
    /// A mount of `root`; `for_all` has other users read what the owner reads.
    pub(super) fn new(root: Node, for_all: bool) -> Self {
        Self {
            inodes: Mutex::new(Inodes::new(root)),
            open: RwLock::default(),
            listed: Mutex::default(),
            next: AtomicU64::new(1),
            for_all,
        }
    }

    /// Open files of a served disk, or of all.
    pub(super) fn open_of(&self, of: Option<&str>) -> Vec<Arc<OpenFile>> {
        let open = self.open.read();
        let own = open.values().filter(|file| of.is_none_or(|of| file.of() == of) && !file.has_let_go());
        own.cloned().collect()
    }

    fn file(&self, handle: FileHandle) -> Result<Arc<OpenFile>, Errno> {
        self.open.read().get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    fn node(&self, ino: INodeNo) -> Result<Node, Errno> {
        self.inodes.lock().node(ino.0).ok_or(Errno::ESTALE)
    }

    fn look_up(&self, parent: INodeNo, name: &OsStr) -> Result<(Duration, FileAttr), Errno> {
        let Node::Directory(directory) = self.node(parent)? else { return Err(Errno::ENOTDIR) };
        let node = directory.find(name).map_err(errno)?;
        let number = self.inodes.lock().enter(parent.0, name, node.clone());
        Ok(self.attributes(INodeNo(number), &node))
    }

    /// What `stat` shows, and for how long that holds.
    fn attributes(&self, ino: INodeNo, node: &Node) -> (Duration, FileAttr) {
        let (kind, about, own, others) = match node {
            Node::Directory(_) => {
                let (modified, is_fixed) = (SystemTime::UNIX_EPOCH, false);
                let about = About { size: 0, allocated: 0, modified, is_writable: false, is_fixed };
                (FileType::Directory, about, 0o500, 0o055)
            }
            Node::File(file) => {
                let about = file.about();
                let own = if about.is_writable { 0o600 } else { 0o400 };
                (FileType::RegularFile, about, own, 0o044)
            }
        };
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let time = about.modified;
        // Programs look for holes where a file takes less than its size.
        let blocks = about.allocated.min(about.size).div_ceil(512);
        let attr = FileAttr {
            ino,
            size: about.size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm: if self.for_all { own | others } else { own },
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: BLOCK,
            flags: 0,
        };
        (if about.is_fixed { EVER } else { NEVER }, attr)
    }

    fn open(&self, ino: INodeNo, writes: bool) -> Result<(FileHandle, FopenFlags), Errno> {
        let Node::File(file) = self.node(ino)? else { return Err(Errno::EISDIR) };
        if self.open.read().len() >= OPEN_MAX {
            return Err(Errno::ENFILE);
        }
        let opened = file.open(writes).map_err(errno)?;
        // Others may write what is not fixed, so the kernel must keep nothing of it.
        let flags = if opened.is_fixed {
            FopenFlags::FOPEN_KEEP_CACHE
        } else {
            FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
        };
        let opened = Arc::new(OpenFile::start(opened).map_err(errno)?);
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(handle, Arc::clone(&opened));
        // Who withdraws the disk has seen the file in the table, or this sees that it is withdrawn.
        if !file.is_served() {
            opened.close(Instant::now() + super::PATIENCE);
            self.open.write().remove(&handle);
            return Err(Errno::ESTALE);
        }
        Ok((FileHandle(handle), flags | FopenFlags::FOPEN_NOFLUSH))
    }

    fn list(&self, ino: INodeNo) -> Result<FileHandle, Errno> {
        let Node::Directory(directory) = self.node(ino)? else { return Err(Errno::ENOTDIR) };
        let kind = |node: &Node| match node {
            Node::Directory(_) => FileType::Directory,
            Node::File(_) => FileType::RegularFile,
        };
        let listed = directory.list().map_err(errno)?;
        let listed = listed.into_iter().map(|(name, node)| (name, kind(&node)));
        let own = [".", ".."].map(|name| (name.into(), FileType::Directory));
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.listed.lock().insert(handle, own.into_iter().chain(listed).collect());
        Ok(FileHandle(handle))
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// [`Files`] for a session, which wants to own them.
#[derive(Debug)]
pub(super) struct Mounted(pub(super) Arc<Files>);

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Limits and abilities that the kernel does not have stay as they are.
        let _ = config.set_max_write(REQUEST_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        for ability in [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_PARALLEL_DIROPS] {
            let _ = config.add_capabilities(ability);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.0.look_up(parent, name) {
            // A name may be another's at any time.
            Ok((holds, attr)) => reply.entry_with_ttls(&holds, &NEVER, &attr, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn forget(&self, _: &Request, ino: INodeNo, lookups: u64) {
        self.0.inodes.lock().forget(ino.0, lookups);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.node(ino) {
            Ok(node) => {
                let (holds, attr) = self.0.attributes(ino, &node);
                reply.attr(&holds, &attr);
            }
            Err(errno) => reply.error(errno),
        }
    }

    /// A disk has its size. Times are the disk's own: setting them is no error, for the sake of programs that copy.
    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let is_size = |size| match self.0.node(ino) {
            Ok(Node::File(file)) => file.about().size == size,
            _ => false,
        };
        if mode.is_some() || uid.is_some() || gid.is_some() || size.is_some_and(|size| !is_size(size)) {
            return reply.error(Errno::EPERM);
        }
        self.getattr(request, ino, handle, reply);
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let files = Arc::clone(&self.0);
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        let open = move || match files.open(ino, writes) {
            Ok((handle, flags)) => reply.opened(handle, flags),
            Err(errno) => reply.error(errno),
        };
        // A state whose storage is slow to answer must hold up no other file. Without a thread, the reply is an error.
        if let Err(error) = thread::Builder::new().name("fuse-open".to_owned()).spawn(open) {
            tracing::warn!(%error, "a file of a mount cannot be opened: no thread");
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.file(handle) {
            Ok(file) => file.read(offset, size, reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // For direct I/O, the kernel leaves O_SYNC and O_DSYNC to this side.
        let fua = flags.0 & (libc::O_SYNC | libc::O_DSYNC) != 0;
        match self.0.file(handle) {
            Ok(file) => file.write(offset, data, fua, reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        use FallocateFlags as F;
        let file = match self.0.file(handle) {
            Ok(file) => file,
            Err(errno) => return reply.error(errno),
        };
        let mode = F::from_bits_retain(mode.cast_unsigned());
        if mode == F::PUNCH_HOLE | F::KEEP_SIZE {
            file.clear(offset, length, true, reply);
        } else if mode - F::KEEP_SIZE == F::ZERO_RANGE {
            file.clear(offset, length, false, reply);
        } else {
            reply.error(Errno::EOPNOTSUPP);
        }
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        match self.0.file(handle) {
            Ok(file) => file.seek(offset, whence, reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.0.file(handle) {
            Ok(file) => file.flush(reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        // Nothing is under way any more: it is in the table until its disk is free, for those who wait for that.
        let file = self.0.open.read().get(&handle.0).cloned();
        if let Some(file) = file {
            file.close(Instant::now() + super::PATIENCE);
            self.0.open.write().remove(&handle.0);
        }
        reply.ok();
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.0.list(ino) {
            Ok(handle) => reply.opened(handle, FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, from: u64, mut reply: ReplyDirectory) {
        let listed = self.0.listed.lock();
        let Some(entries) = listed.get(&handle.0) else { return reply.error(Errno::EBADF) };
        let rest = (1..).zip(entries).skip(usize::try_from(from).unwrap_or(usize::MAX));
        for (next, (name, kind)) in rest {
            if reply.add(UNKNOWN, next, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.0.listed.lock().remove(&handle.0);
        reply.ok();
    }

    /// A loop device takes the size of a block for what it may discard.
    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, BLOCK, 255, BLOCK);
    }
}
