//! A killed process's direct writes that its device has not answered keep the file locked.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session,
    WriteFlags,
};
use vmstrata_store::{
    Access, AlignedBuf, CacheMode, FileError, FileOptions, FileStore, Gate, LockError, OpenStore, Ring,
    Segment, SegmentVec,
};
use vmstrata_types::HostOffset;

const BYTES: u64 = 8 << 20;
const DISK: INodeNo = INodeNo(2);
const PATIENCE: Duration = Duration::from_secs(30);
/// The device, in the process that is killed.
const DEVICE: &str = "VMSTRATA_TEST_DEVICE";

/// Writes, which are held back as long as somebody wants that.
#[derive(Debug, Default)]
struct Held {
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Held {
    fn hold(&self, holds: bool) {
        self.state.lock().unwrap().0 = holds;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(holds, _)| *holds).unwrap());
    }

    fn wait_for_a_write(&self) {
        let state = self.state.lock().unwrap();
        let (state, timeout) =
            self.changed.wait_timeout_while(state, PATIENCE, |(_, writes)| *writes == 0).unwrap();
        assert!(!timeout.timed_out(), "no write has reached the device: {state:?}");
    }
}

/// A file system of one file, `disk`, which reads as zeros.
struct OneDisk(Arc<Held>);

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
            true => reply.entry(&PATIENCE, &attr(DISK), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&PATIENCE, &attr(ino));
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
        self.0.pass();
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// A loop device, detached when it is dropped.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Self {
        let output = Command::new("losetup").args(["-f", "--show"]).arg(file).output().expect("losetup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

fn open(device: &Path, patience: Duration) -> Result<FileStore, FileError> {
    let file = Gate::unrestricted().open(device, Access::ReadWrite).expect("the device is there");
    let options = FileOptions { cache: CacheMode::Direct, lock_patience: patience, ..FileOptions::ACTIVE };
    FileStore::new(file, device, &options)
}

/// What the process does that is killed: it leaves a write with the device.
fn write_and_wait(device: &Path) {
    let store = open(device, Duration::ZERO).unwrap();
    assert_eq!(store.cache(), CacheMode::Direct);
    let mut ring = Ring::new(8).unwrap();
    let mut bytes = AlignedBuf::zeroed(4096);
    bytes.fill(7);
    let mut segments = SegmentVec::new();
    // SAFETY: the ring is dropped, and so waits for the request, before the bytes are.
    segments.push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    let file = OpenStore::new(Arc::new(store));
    ring.push_write(Arc::clone(&file), segments, HostOffset::new(4096), 0);
    ring.submit().unwrap();
    println!("submitted");
    loop {
        ring.wait(&[], Some(PATIENCE)).unwrap();
    }
}

#[test]
fn a_killed_process_s_direct_write_in_flight_keeps_the_file_locked() {
    if let Some(device) = std::env::var_os(DEVICE) {
        return write_and_wait(device.as_ref());
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounts and loop devices need root");
        return;
    }
    let (dir, held) = (tempfile::tempdir().unwrap(), Arc::new(Held::default()));
    let session = Session::new(OneDisk(Arc::clone(&held)), dir.path(), &Config::default());
    let session = session.and_then(Session::spawn).expect("FUSE");
    let device = Loop::over(&dir.path().join("disk"));
    held.hold(true);
    let test = std::thread::current().name().unwrap().to_owned();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture"])
        .env(DEVICE, &device.0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("submitted")), "it has ended");
    held.wait_for_a_write();
    child.kill().unwrap();
    child.wait().unwrap();
    let refused = open(&device.0, Duration::ZERO);
    held.hold(false);
    assert!(matches!(refused, Err(FileError::Lock(LockError::Conflict { .. }))), "{refused:?}");
    open(&device.0, PATIENCE).expect("the write is done, and with it the lock is gone");
    drop(device);
    drop(session);
}
