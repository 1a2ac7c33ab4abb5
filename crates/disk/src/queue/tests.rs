use std::sync::Arc;
use std::time::Duration;

use vmstrata_store::{Segment, SegmentVec};
use vmstrata_types::{GuestOffset, GuestRange};

use super::IoQueue;
use crate::stats::Kind;
use crate::{CreateOptions, Disk, Op, OpenOptions, Request, ResourceOptions, Resources, create};

const LEN: usize = 4096;

fn empty_disk() -> (tempfile::TempDir, Arc<Disk>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    create(&path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
    let disk =
        Disk::open(&path, &OpenOptions::default(), &Resources::new(ResourceOptions::default())).unwrap();
    (dir, disk)
}

fn write_at(at: u64) -> Request {
    let range = GuestRange::new(GuestOffset::new(at), LEN as u64);
    let segments = SegmentVec::from_iter([Segment::from_mut(vec![7; LEN].leak())]);
    Request { op: Op::Write { fua: false }, range, segments, token: at }
}

/// Waits until all that was pushed has ended well; returns how many.
fn drain(queue: &mut IoQueue) -> usize {
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        queue.submit();
        queue.wait(&[], Some(Duration::from_secs(10)));
        assert!(queue.reap(&mut ended) > 0, "woken for nothing, or not at all");
    }
    assert!(ended.iter().all(|completion| completion.result.is_ok()), "{ended:?}");
    ended.len()
}

#[test]
fn writes_wait_without_a_worker_while_the_layers_change() {
    let (_dir, disk) = empty_disk();
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    queue.push(write_at(0));
    assert_eq!(drain(&mut queue), 1);
    let at_workers = || disk.stats().at_workers[Kind::Write as usize];
    let before = at_workers();
    disk.writers.closed(|| {
        [0, 4096].into_iter().for_each(|at| queue.push(write_at(at)));
        queue.submit();
        let mut ended = Vec::new();
        for _ in 0..2 {
            assert_eq!(queue.reap(&mut ended), 0, "written while the layers change");
            assert_eq!((queue.in_flight(), queue.at_others()), (2, 2));
            // As when a worker has finished something else.
            queue.mailbox.call();
        }
    });
    assert_eq!(drain(&mut queue), 2);
    assert_eq!(at_workers(), before);
    drop(queue);
    disk.close().unwrap();
}

#[test]
fn a_queue_that_ends_waits_for_writes_that_are_held() {
    let (_dir, disk) = empty_disk();
    let (closed, is_closed) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let disk = &disk;
        scope.spawn(move || {
            disk.writers.closed(|| {
                closed.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            });
        });
        is_closed.recv().unwrap();
        let mut queue = IoQueue::new(Arc::clone(disk), 8).unwrap();
        queue.push(write_at(0));
    });
    assert_eq!(disk.stats().requests[Kind::Write as usize], 1);
    disk.close().unwrap();
}
