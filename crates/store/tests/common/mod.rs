//! A file system of one file, in this process, which answers when the test wants.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, Session, WriteFlags,
};

/// Longer than anything takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const BYTES: u64 = 8 << 20;
const DISK: INodeNo = INodeNo(2);

/// Questions that the file system does not answer for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// To write.
    Write,
    /// What a file is like.
    Attributes,
}

/// What is held back, and how many questions of that kind came.
#[derive(Debug, Default)]
pub(crate) struct Held {
    state: Mutex<(Option<Question>, usize)>,
    changed: Condvar,
}

impl Held {
    /// Holds questions of one kind back, or answers all.
    pub(crate) fn hold(&self, question: Option<Question>) {
        *self.state.lock().unwrap() = (question, 0);
        self.changed.notify_all();
    }

    fn pass(&self, question: Question) {
        let mut state = self.state.lock().unwrap();
        if state.0 == Some(question) {
            state.1 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |(held, _)| *held == Some(question)).unwrap());
        }
    }

    /// Waits until a question is held back.
    #[allow(dead_code, reason = "not every test waits for one")]
    pub(crate) fn wait_for_one(&self) {
        let state = self.state.lock().unwrap();
        let (state, timeout) =
            self.changed.wait_timeout_while(state, PATIENCE, |(_, held)| *held == 0).unwrap();
        assert!(!timeout.timed_out(), "nothing has reached the file system: {state:?}");
    }
}

/// The file system: its file `disk` reads as zeros.
struct OneDisk(Arc<Held>);

/// Mounts it on `dir`, until what is returned is dropped; `None` where this user may not.
pub(crate) fn mount(dir: &Path, held: &Arc<Held>) -> Option<BackgroundSession> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounts need root");
        return None;
    }
    let session = Session::new(OneDisk(Arc::clone(held)), dir, &Config::default());
    Some(session.and_then(Session::spawn).expect("FUSE"))
}

fn attr(ino: INodeNo) -> FileAttr {
    let (kind, size) = if ino == DISK { (FileType::RegularFile, BYTES) } else { (FileType::Directory, 0) };
    let now = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size,
        blocks: size / 512,
        atime: now,
        mtime: now,
        ctime: now,
        crtime: now,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for OneDisk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == "disk" {
            true => reply.entry(&Duration::ZERO, &attr(DISK), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.0.pass(Question::Attributes);
        reply.attr(&Duration::ZERO, &attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
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
        reply.data(&vec![0; size as usize]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.0.pass(Question::Write);
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}
