//! The exported directory of a NAS as a mounted file system, where the kernel has no NFS client of its own.
//!
//! ```text
//!   vmstrata, QEMU ──► kernel's page cache ──► FUSE ──► NFSv3 calls from a host's network namespace ──► NAS
//! ```
//!
//! As NFS clients do, it asks for attributes again after a while, and flushes by COMMIT. Locks are of this machine alone.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyStatfs, ReplyWrite, Request,
    Session, TimeOrNow, WriteFlags,
};
use nfs3_client::nfs3_types::nfs3::{
    COMMIT3args, CREATE3args, FSSTAT3args, GETATTR3args, LINK3args, LOOKUP3args, MKDIR3args, Nfs3Option,
    READ3args, READDIRPLUS3args, READLINK3args, REMOVE3args, RENAME3args, RMDIR3args, SETATTR3args,
    SYMLINK3args, WRITE3args, cookieverf3, createhow3, diropargs3, entryplus3, fattr3, filename3, ftype3,
    nfs_fh3, nfspath3, nfstime3, sattr3, set_mtime, stable_how, symlinkdata3,
};
use nfs3_client::nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use parking_lot::Mutex;
use rustix::mount::{UnmountFlags, unmount};

use super::Nas;
use super::link::{self, Link, now};

/// Calls of the kernel that are answered at a time.
const THREADS: usize = 16;
/// The most bytes of a read or a write.
const PIECE_MAX: u32 = 1 << 20;
/// Bytes of a directory listed at a time.
const LISTED: u32 = 64 << 10;
/// For so long attributes are not asked for again, as Linux does at the least.
const FRESH: Duration = Duration::from_secs(3);
const BLOCK: u32 = 4096;

/// A mounted NAS, until it is dropped.
#[derive(Debug)]
pub struct Mount {
    dir: PathBuf,
    _session: BackgroundSession,
}

impl Mount {
    /// Mounts what the NAS exports, as `host` reaches it, on the directory `dir`, which is there.
    ///
    /// # Errors
    /// A server that does not answer, a host that does not let this user mount.
    pub fn new(nas: &Nas, host: u8, dir: &Path) -> Result<Self> {
        let (server, path) = nas.address(host, "");
        let connect = || -> Result<(nfs_fh3, Link)> {
            nas.network().enter_host(host)?;
            Ok((link::mount(server.into(), path.trim_end_matches('/'))?, Link::new(server.into())?))
        };
        // Connections are of the namespace of the thread that makes them.
        let (root, link) = thread::scope(|scope| scope.spawn(connect).join().expect("does not panic"))?;
        let files = Mutex::new(HashMap::from([(INodeNo::ROOT, root)]));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("nas".to_owned())];
        config.n_threads = Some(THREADS);
        let session =
            Session::new(Mounted { link, files }, dir, &config).and_then(Session::spawn).context("mount")?;
        Ok(Self { dir: dir.to_owned(), _session: session })
    }

    /// Where it is mounted.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.dir, UnmountFlags::DETACH) {
            eprintln!("{}: {error}", self.dir.display());
        }
    }
}

/// What the kernel asks.
struct Mounted {
    link: Link,
    /// Handles of the inodes that the kernel has looked up.
    files: Mutex<HashMap<INodeNo, nfs_fh3>>,
}

/// For `map_err`.
fn errno(error: io::Error) -> Errno {
    Errno::from(error)
}

impl Mounted {
    fn file(&self, ino: INodeNo) -> Result<nfs_fh3, Errno> {
        self.files.lock().get(&ino).cloned().ok_or(Errno::ESTALE)
    }

    fn place(&self, dir: INodeNo, name: &OsStr) -> Result<diropargs3<'static>, Errno> {
        Ok(diropargs3 { dir: self.file(dir)?, name: filename3::from(name.as_bytes().to_vec()) })
    }

    fn attributes(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        let asked = GETATTR3args { object: self.file(ino)? };
        let about = self.link.ask(move |client| now(client.getattr(&asked))).map_err(errno)?.obj_attributes;
        Ok(FileAttr { ino, ..attributes(&about) })
    }

    fn look_up(&self, dir: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let asked = LOOKUP3args { what: self.place(dir, name)? };
        let found = self.link.ask(move |client| now(client.lookup(&asked))).map_err(errno)?;
        let asked = GETATTR3args { object: found.object.clone() };
        let about = match found.obj_attributes {
            Nfs3Option::Some(about) => about,
            Nfs3Option::None => {
                self.link.ask(move |client| now(client.getattr(&asked))).map_err(errno)?.obj_attributes
            }
        };
        let attr = attributes(&about);
        self.files.lock().insert(attr.ino, found.object);
        Ok(attr)
    }

    fn change(&self, ino: INodeNo, new_attributes: sattr3) -> Result<FileAttr, Errno> {
        let asked = SETATTR3args { object: self.file(ino)?, new_attributes, guard: Nfs3Option::None };
        self.link.ask(move |client| now(client.setattr(&asked))).map_err(errno)?;
        self.attributes(ino)
    }

    fn make(&self, dir: INodeNo, name: &OsStr, mode: u32) -> Result<FileAttr, Errno> {
        let attributes = sattr3 { mode: Nfs3Option::Some(mode & 0o7777), ..sattr3::default() };
        let asked = CREATE3args { where_: self.place(dir, name)?, how: createhow3::GUARDED(attributes) };
        self.link.ask(move |client| now(client.create(&asked))).map_err(errno)?;
        self.look_up(dir, name)
    }

    fn read_piece(&self, ino: INodeNo, offset: u64, count: u32) -> Result<Vec<u8>, Errno> {
        let asked = READ3args { file: self.file(ino)?, offset, count };
        let read = self.link.ask(move |client| now(client.read(&asked))).map_err(errno)?;
        Ok(read.data.into_owned())
    }

    fn write_piece(&self, ino: INodeNo, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        let (file, count, stable) = (self.file(ino)?, data.len() as u32, stable_how::UNSTABLE);
        let asked = WRITE3args { file, offset, count, stable, data: Opaque::owned(data.to_vec()) };
        Ok(self.link.ask(move |client| now(client.write(&asked))).map_err(errno)?.count)
    }

    fn commit(&self, ino: INodeNo) -> Result<(), Errno> {
        let asked = COMMIT3args { file: self.file(ino)?, offset: 0, count: 0 };
        self.link.ask(move |client| now(client.commit(&asked))).map(drop).map_err(errno)
    }

    /// What is in a directory from `cookie` on: the inode, the cookie that follows it, the kind, and the name.
    fn list(&self, ino: INodeNo, cookie: u64) -> Result<Vec<(INodeNo, u64, FileType, OsString)>, Errno> {
        let (dir, cookieverf) = (self.file(ino)?, cookieverf3::default());
        let asked = READDIRPLUS3args { dir, cookie, cookieverf, dircount: LISTED, maxcount: LISTED };
        let listed = self.link.ask(move |client| now(client.readdirplus(&asked))).map_err(errno)?;
        let seen = |entry: entryplus3<'_>| {
            let kind = match &entry.name_attributes {
                Nfs3Option::Some(about) => attributes(about).kind,
                Nfs3Option::None => FileType::RegularFile,
            };
            (INodeNo(entry.fileid), entry.cookie, kind, OsString::from_vec(entry.name.0.into_owned()))
        };
        Ok(listed.reply.entries.into_inner().into_iter().map(seen).collect())
    }
}

/// What NFS says of a file, as the kernel wants it.
fn attributes(about: &fattr3) -> FileAttr {
    let time = |time: &nfstime3| SystemTime::UNIX_EPOCH + Duration::new(time.seconds.into(), time.nseconds);
    let kind = match about.type_ {
        ftype3::NF3DIR => FileType::Directory,
        ftype3::NF3LNK => FileType::Symlink,
        _ => FileType::RegularFile,
    };
    FileAttr {
        ino: INodeNo(about.fileid),
        size: about.size,
        blocks: about.used.div_ceil(512),
        atime: time(&about.atime),
        mtime: time(&about.mtime),
        ctime: time(&about.ctime),
        crtime: SystemTime::UNIX_EPOCH,
        kind,
        perm: (about.mode & 0o7777) as u16,
        nlink: about.nlink,
        uid: about.uid,
        gid: about.gid,
        rdev: 0,
        blksize: PIECE_MAX,
        flags: 0,
    }
}

fn tell_entry(reply: ReplyEntry, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attr) => reply.entry(&FRESH, &attr, Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn tell_done(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Limits that the kernel does not take stay as they are.
        let _ = config.set_max_write(PIECE_MAX);
        let _ = config.set_max_readahead(PIECE_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        tell_entry(reply, self.look_up(parent, name));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Ok(attr) => reply.attr(&FRESH, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        fn some<T: Pack + Unpack>(value: Option<T>) -> Nfs3Option<T> {
            value.map_or(Nfs3Option::None, Nfs3Option::Some)
        }
        let mtime = match mtime {
            None => set_mtime::DONT_CHANGE,
            Some(TimeOrNow::Now) => set_mtime::SET_TO_SERVER_TIME,
            Some(TimeOrNow::SpecificTime(time)) => {
                set_mtime::SET_TO_CLIENT_TIME(nfstime3::try_from(time).unwrap_or_default())
            }
        };
        let mode = some(mode.map(|mode| mode & 0o7777));
        let new =
            sattr3 { mode, uid: some(uid), gid: some(gid), size: some(size), mtime, ..sattr3::default() };
        match self.change(ino, new) {
            Ok(attr) => reply.attr(&FRESH, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        let read = || {
            let asked = READLINK3args { symlink: self.file(ino)? };
            self.link.ask(move |client| now(client.readlink(&asked))).map_err(errno)
        };
        match read() {
            Ok(link) => reply.data(&link.data.0),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let make = || {
            let attributes = sattr3 { mode: Nfs3Option::Some(mode & 0o7777), ..sattr3::default() };
            let asked = MKDIR3args { where_: self.place(parent, name)?, attributes };
            self.link.ask(move |client| now(client.mkdir(&asked))).map_err(errno)?;
            self.look_up(parent, name)
        };
        tell_entry(reply, make());
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let remove = || {
            let asked = REMOVE3args { object: self.place(parent, name)? };
            self.link.ask(move |client| now(client.remove(&asked))).map(drop).map_err(errno)
        };
        tell_done(reply, remove());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let remove = || {
            let asked = RMDIR3args { object: self.place(parent, name)? };
            self.link.ask(move |client| now(client.rmdir(&asked))).map(drop).map_err(errno)
        };
        tell_done(reply, remove());
    }

    fn symlink(&self, _: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = nfspath3(Opaque::owned(target.as_os_str().as_bytes().to_vec()));
        let make = || {
            let symlink = symlinkdata3 { symlink_attributes: sattr3::default(), symlink_data: target };
            let asked = SYMLINK3args { where_: self.place(parent, name)?, symlink };
            self.link.ask(move |client| now(client.symlink(&asked))).map_err(errno)?;
            self.look_up(parent, name)
        };
        tell_entry(reply, make());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        new: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let rename = || {
            // NFSv3 has no others.
            if !flags.is_empty() {
                return Err(Errno::EINVAL);
            }
            let asked = RENAME3args { from: self.place(parent, name)?, to: self.place(to, new)? };
            self.link.ask(move |client| now(client.rename(&asked))).map(drop).map_err(errno)
        };
        tell_done(reply, rename());
    }

    fn link(&self, _: &Request, ino: INodeNo, to: INodeNo, new: &OsStr, reply: ReplyEntry) {
        let make = || {
            let asked = LINK3args { file: self.file(ino)?, link: self.place(to, new)? };
            self.link.ask(move |client| now(client.link(&asked))).map_err(errno)?;
            self.look_up(to, new)
        };
        tell_entry(reply, make());
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        match self.make(parent, name, mode) {
            Ok(attr) => reply.created(&FRESH, &attr, Generation(0), FileHandle(0), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
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
        match self.read_piece(ino, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
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
        match self.write_piece(ino, offset, data) {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        tell_done(reply, self.commit(ino));
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        // The server answers once a name is on stable storage.
        reply.ok();
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        match self.list(ino, offset) {
            Ok(entries) => {
                let _is_full =
                    entries.iter().any(|(ino, cookie, kind, name)| reply.add(*ino, *cookie, *kind, name));
                reply.ok();
            }
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let ask = || {
            let asked = FSSTAT3args { fsroot: self.file(ino)? };
            self.link.ask(move |client| now(client.fsstat(&asked))).map_err(errno)
        };
        match ask() {
            Ok(found) => {
                let blocks = |bytes: u64| bytes / u64::from(BLOCK);
                let (all, free, available) =
                    (blocks(found.tbytes), blocks(found.fbytes), blocks(found.abytes));
                reply.statfs(all, free, available, found.tfiles, found.ffiles, BLOCK, 255, BLOCK);
            }
            Err(error) => reply.error(error),
        }
    }
}
