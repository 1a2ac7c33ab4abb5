//! Files of a file system that may never answer: it is not even asked.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use crate::vhost_common::frontend::{Guest, MEMORY_LEN, negotiate};
use crate::vhost_common::{Served, options};
use fuser::{
    BackgroundSession, Config, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, ReplyStatfs, Request, Session,
};
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use vmstrata_export::vhost_user::Options;

const FILE: INodeNo = INodeNo(2);

/// A file system with one file, which counts what it is asked about that. Nothing is remembered for it.
struct Counting(Arc<AtomicUsize>);

fn attr(ino: INodeNo) -> FileAttr {
    let time = SystemTime::UNIX_EPOCH;
    let (kind, size) =
        if ino == FILE { (FileType::RegularFile, MEMORY_LEN) } else { (FileType::Directory, 0) };
    FileAttr {
        ino,
        size,
        blocks: 0,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Counting {
    fn lookup(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.entry(&Duration::ZERO, &attr(FILE), Generation(0));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.0.fetch_add(1, Ordering::SeqCst);
        reply.attr(&Duration::ZERO, &attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.0.fetch_add(1, Ordering::SeqCst);
        reply.data(&vec![0; size as usize]);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.0.fetch_add(1, Ordering::SeqCst);
        reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
    }
}

fn mount(dir: &Path) -> (BackgroundSession, Arc<AtomicUsize>, File) {
    let asked = Arc::<AtomicUsize>::default();
    let session = Session::new(Counting(Arc::clone(&asked)), dir, &Config::default());
    let session = session.and_then(Session::spawn).expect("/dev/fuse, and the right to mount");
    let file = File::options().read(true).write(true).open(dir.join("memory")).unwrap();
    asked.store(0, Ordering::SeqCst);
    (session, asked, file)
}

fn region(guest: &Guest, file: &File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo { mmap_handle: file.as_raw_fd(), ..guest.region() }
}

#[test]
fn files_that_are_no_memory_of_the_kernel_are_refused_without_asking_them() {
    let dir = tempfile::tempdir().unwrap();
    let (_session, asked, file) = mount(dir.path());
    let served = Served::qcow2(1 << 20, options(1, 1));
    let guest = Guest::new(16);
    type Says = fn(&mut Frontend, &Guest, &File) -> bool;
    let says: [Says; 4] = [
        |frontend, guest, file| frontend.set_mem_table(&[region(guest, file)]).is_ok(),
        |frontend, guest, file| frontend.add_mem_region(&region(guest, file)).is_ok(),
        |frontend, _, file| {
            let info = VhostUserInflight::new(1 << 16, 0, 1, 16);
            frontend.set_inflight_fd(&info, file.as_raw_fd()).is_ok()
        },
        |frontend, _, file| {
            let region =
                VhostUserDirtyLogRegion { mmap_size: 4096, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
            frontend.set_log_base(0, Some(region)).is_ok()
        },
    ];
    for say in says {
        let (mut frontend, _socket) = negotiate(&served.socket());
        assert!(!say(&mut frontend, &guest, &file), "accepted");
        assert_eq!(asked.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn a_socket_for_any_memory_takes_them() {
    let dir = tempfile::tempdir().unwrap();
    let (_session, _, file) = mount(dir.path());
    let served = Served::qcow2(1 << 20, Options { any_memory: true, ..options(1, 1) });
    let (frontend, _socket) = negotiate(&served.socket());
    let guest = Guest::new(16);
    frontend.set_mem_table(&[region(&guest, &file)]).unwrap();
}
