//! What needs a look inside the ring.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use vmstrata_types::HostOffset;

use super::*;
use crate::ring::RingFile;
use crate::{FileOptions, FileStore, OpenStore, Segment, SegmentVec, Store};

fn read(store: &Arc<dyn Store>, segments: SegmentVec<'static>, token: u64) -> Job {
    let file = RingFile::Open(OpenStore::new(Arc::clone(store)));
    Job { action: Action::Read, file, segments, at: HostOffset::ZERO, token }
}

/// Linux 5.10 has no timeouts in `io_uring_enter`.
#[test]
fn waits_work_without_timed_enters() {
    let mut ring = Uring::new(8).unwrap();
    ring.timed_enter = false;
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let start = std::time::Instant::now();
    assert_eq!(ring.wait(&[event.as_fd()], Some(Duration::from_millis(30))).unwrap(), 0);
    assert!(start.elapsed() >= Duration::from_millis(29));
    rustix::io::write(&event, &1_u64.to_ne_bytes()).unwrap();
    assert_eq!(ring.wait(&[event.as_fd()], Some(Duration::from_secs(20))).unwrap(), 1);

    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    let options = FileOptions { lock: None, ..FileOptions::ACTIVE };
    let store: Arc<dyn Store> =
        Arc::new(FileStore::new(file.reopen().unwrap(), file.path(), &options).unwrap());
    let mut buf = [1_u8; 4096];
    // SAFETY: the completion is reaped before the buffer goes.
    let segment = unsafe { Segment::new(buf.as_mut_ptr(), buf.len()) };
    ring.push(read(&store, SegmentVec::from_slice(&[segment]), 7));
    let mut done = Vec::new();
    while done.is_empty() {
        ring.wait(&[], Some(Duration::from_secs(20))).unwrap();
        ring.reap(&mut done);
    }
    assert_eq!((done[0].token, *done[0].result.as_ref().unwrap()), (7, 4096));
}

#[test]
fn slots_are_used_again() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let options = FileOptions { lock: None, ..FileOptions::ACTIVE };
    let store: Arc<dyn Store> =
        Arc::new(FileStore::new(file.reopen().unwrap(), file.path(), &options).unwrap());
    let mut ring = Uring::new(8).unwrap();
    let mut done = Vec::new();
    for round in 0..100 {
        for token in 0..8 {
            ring.push(read(&store, SegmentVec::new(), token));
        }
        while ring.in_flight() > 0 {
            ring.wait(&[], None).unwrap();
            ring.reap(&mut done);
        }
        assert_eq!(done.drain(..).count(), 8, "round {round}");
    }
    assert_eq!(ring.slots.capacity(), 8);
    assert_eq!(Arc::strong_count(&store), 1);
}
