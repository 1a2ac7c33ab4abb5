//! A killed process's direct writes that its device has not answered keep the file locked.

use crate::common;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Held, PATIENCE, Question};
use vmstrata_store::{
    Access, AlignedBuf, CacheMode, FileError, FileOptions, FileStore, Gate, LockError, OpenStore, Ring,
    Segment, SegmentVec,
};
use vmstrata_types::HostOffset;

/// The device, in the process that is killed.
const DEVICE: &str = "VMSTRATA_TEST_DEVICE";

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
    let (dir, held) = (tempfile::tempdir().unwrap(), Arc::new(Held::default()));
    let Some(session) = common::mount(dir.path(), &held) else { return };
    let device = Loop::over(&dir.path().join("disk"));
    held.hold(Some(Question::Write));
    let test = std::thread::current().name().unwrap().to_owned();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture"])
        .env(DEVICE, &device.0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("submitted")), "it has ended");
    held.wait_for_one();
    child.kill().unwrap();
    child.wait().unwrap();
    let refused = open(&device.0, Duration::ZERO);
    held.hold(None);
    assert!(matches!(refused, Err(FileError::Lock(LockError::Conflict { .. }))), "{refused:?}");
    open(&device.0, PATIENCE).expect("the write is done, and with it the lock is gone");
    drop(device);
    drop(session);
}
