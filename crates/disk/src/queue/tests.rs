use std::sync::Arc;
use std::time::Duration;

use vmstrata_store::{AlignedBuf, CacheMode, Segment, SegmentVec, copy_to_slice};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use super::IoQueue;
use crate::stats::Kind;
use crate::{CreateOptions, Disk, Op, OpenOptions, Request, ResourceOptions, Resources, Shrink, create};

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
    request(Op::Write { fua: false }, at, vec![7; LEN].leak())
}

fn request(op: Op, at: u64, memory: &'static mut [u8]) -> Request {
    let range = GuestRange::new(GuestOffset::new(at), memory.len() as u64);
    Request { op, range, segments: SegmentVec::from_iter([Segment::from_mut(memory)]), token: at }
}

/// A disk that is not written any more, as [`active_disk`]. Its file's pages are on stable storage.
fn frozen_disk() -> (tempfile::TempDir, Arc<Disk>) {
    let (dir, disk) = active_disk();
    disk.close().unwrap();
    drop(disk);
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&dir.path().join("disk"), &read_only, &resources).unwrap();
    (dir, disk)
}

/// A disk in a directory that is kept on a file system with blocks: each of its bytes tells which page of the disk it is in.
fn active_disk() -> (tempfile::TempDir, Arc<Disk>) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    create(&path, &CreateOptions { size: Some(PAGES * LEN as u64), ..CreateOptions::default() }).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    for page in 0..PAGES {
        let mut bytes = vec![page as u8; LEN];
        disk.write(GuestOffset::new(page * LEN as u64), &[Segment::from_mut(&mut bytes)]).unwrap();
    }
    (dir, disk)
}

const PAGES: u64 = 256;

/// Takes the file's pages out of the host's memory, as far as no one has them mapped.
fn evict(dir: &tempfile::TempDir) {
    let file = std::fs::File::open(dir.path().join("disk")).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Reads a page of a frozen disk, which must be right; whether that was done without the ring and without a worker.
fn reads_on_the_spot(queue: &mut IoQueue, page: u64) -> bool {
    let request = request(Op::Read, page * LEN as u64, vec![0xFF; LEN].leak());
    let segments = request.segments.clone();
    queue.push(request);
    queue.submit();
    let is_done = queue.ready.len() == 1;
    assert_eq!(drain(queue), 1);
    let mut found = [0; LEN];
    copy_to_slice(&segments, &mut found);
    assert!(found.iter().all(|byte| *byte == page as u8), "page {page}: {:?}", &found[..8]);
    is_done
}

/// Has a queue meet a frozen disk: a worker reads its tables, and the ring its file.
fn meet(queue: &mut IoQueue) {
    for by in ["a worker", "the ring"] {
        assert!(!reads_on_the_spot(queue, 0), "read without {by}");
    }
}

/// Waits until all that was pushed has ended well; returns how many. Each time it is woken, something has.
fn drain(queue: &mut IoQueue) -> usize {
    drain_woken(queue, |ended| assert!(ended > 0, "woken for nothing, or not at all"))
}

/// The same; `woken` is told how many have ended each time.
fn drain_woken(queue: &mut IoQueue, woken: impl Fn(usize)) -> usize {
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        queue.submit();
        queue.wait(&[], Some(Duration::from_secs(10)));
        woken(queue.reap(&mut ended));
    }
    assert!(ended.iter().all(|completion| completion.result.is_ok()), "{ended:?}");
    ended.len()
}

#[test]
fn durable_overwrites_and_flushes_after_them_need_no_worker() {
    for cache in [CacheMode::Host, CacheMode::Direct] {
        let (dir, disk) = empty_disk();
        disk.write(GuestOffset::ZERO, &[Segment::from_mut(&mut vec![1; 1 << 16])]).unwrap();
        disk.close().unwrap();
        drop(disk);
        let (path, resources) = (dir.path().join("disk"), Resources::new(ResourceOptions::default()));
        let disk = Disk::open(&path, &OpenOptions { cache, ..OpenOptions::default() }, &resources).unwrap();
        disk.warm_map().unwrap();
        let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
        let memory = &mut Box::leak(Box::new(AlignedBuf::zeroed(LEN)))[..];
        queue.push(request(Op::Write { fua: true }, 0, memory));
        queue.push(Request { op: Op::Flush, segments: SegmentVec::new(), ..write_at(0) });
        // Around the page cache the end of the write only begins its flush.
        assert_eq!(drain_woken(&mut queue, |_| ()), 2);
        assert_eq!(disk.stats().at_workers.iter().sum::<u64>(), 0, "{cache:?}");
        drop(queue);
        disk.close().unwrap();
    }
}

#[test]
fn a_short_flush_that_is_alone_is_made_on_the_spot() {
    let (_dir, disk) = empty_disk();
    let whole = || vec![1; 1 << 20].leak();
    disk.write(GuestOffset::ZERO, &[Segment::from_mut(whole())]).unwrap();
    disk.flush().unwrap();
    let flush = || Request { op: Op::Flush, segments: SegmentVec::new(), ..write_at(0) };
    let durable = || request(Op::Write { fua: true }, 0, vec![7; LEN].leak());
    let made_on_the_spot = |requests: Vec<Request>| {
        let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
        let count = requests.len();
        requests.into_iter().for_each(|request| queue.push(request));
        queue.submit();
        let made = queue.ready.len() == count;
        assert_eq!(drain(&mut queue), count);
        made
    };
    assert!(made_on_the_spot(vec![durable()]));
    assert!(!made_on_the_spot(vec![durable(), flush()]), "others would wait");
    assert!(made_on_the_spot(vec![request(Op::Write { fua: false }, 0, whole())]));
    assert!(!made_on_the_spot(vec![flush()]), "all of the disk is to be written out");
    assert!(made_on_the_spot(vec![flush()]));
    assert_eq!(disk.stats().at_workers.iter().sum::<u64>(), 0);
    disk.close().unwrap();
}

#[test]
fn writes_wait_without_a_worker_while_the_layers_change() {
    let (_dir, disk) = empty_disk();
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    queue.push(write_at(0));
    assert_eq!(drain(&mut queue), 1);
    let at_workers = || disk.stats().at_workers[Kind::Write as usize];
    let mut needs_no_worker = || {
        queue.writes_wait_until = None;
        let before = at_workers();
        disk.write_gate.quiesce(|| {
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
        at_workers() == before
    };
    // A write that waited for a processor leaves the next one to a worker.
    while !needs_no_worker() {}
    drop(queue);
    disk.close().unwrap();
}

#[test]
fn a_drained_disk_holds_requests_until_it_resumes_or_is_closed() {
    let (_dir, disk) = empty_disk();
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    let mut ended = Vec::new();
    for closes in [false, true] {
        disk.drain();
        queue.push(request(Op::Read, 0, vec![0; LEN].leak()));
        queue.push(write_at(4096));
        queue.submit();
        assert_eq!(queue.reap(&mut ended), 0, "carried out while the disk is drained");
        assert_eq!((queue.in_flight(), queue.at_others()), (2, 2));
        if closes {
            disk.close().unwrap();
        } else {
            disk.resume();
        }
        while queue.in_flight() > 0 {
            queue.submit();
            queue.wait(&[], Some(Duration::from_secs(10)));
            queue.reap(&mut ended);
        }
        assert!(ended.drain(..).all(|completion| completion.result.is_err() == closes));
    }
}

#[test]
fn a_flush_passes_requests_that_wait_for_a_drained_disk() {
    let (_dir, disk) = empty_disk();
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    disk.drain();
    queue.push(write_at(4096));
    queue.push(Request { token: 7, ..request(Op::Flush, 0, &mut []) });
    let mut ended = Vec::new();
    while ended.is_empty() {
        queue.submit();
        queue.wait(&[], Some(Duration::from_secs(10)));
        queue.reap(&mut ended);
    }
    let ended: Vec<_> =
        ended.iter().map(|completion| (completion.token, completion.result.is_ok())).collect();
    assert_eq!((ended, queue.in_flight()), (vec![(7, true)], 1));
    disk.resume();
    while queue.in_flight() > 0 {
        queue.submit();
        queue.wait(&[], Some(Duration::from_secs(10)));
        queue.reap(&mut Vec::new());
    }
}

#[test]
fn a_queue_that_ends_waits_for_writes_that_are_held() {
    let (_dir, disk) = empty_disk();
    let (closed, is_closed) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let disk = &disk;
        scope.spawn(move || {
            disk.write_gate.quiesce(|| {
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

#[test]
fn pages_in_memory_are_read_on_the_spot() {
    let (_dir, disk) = frozen_disk();
    let mut queue = IoQueue::new(disk, 8).unwrap();
    meet(&mut queue);
    for page in [0, 1, 77, PAGES - 1] {
        assert!(reads_on_the_spot(&mut queue, page), "page {page}");
    }
}

#[test]
fn pages_in_memory_are_read_on_the_spot_in_any_number_of_pieces() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk");
    let (size, cluster_bits) = (Some(PAGES * LEN as u64), ClusterBits::new(12).unwrap());
    create(&path, &CreateOptions { size, cluster_bits, ..CreateOptions::default() }).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    // No page follows in the file the one that it follows on the disk.
    for page in (0..PAGES).rev() {
        let mut bytes = vec![page as u8; LEN];
        disk.write(GuestOffset::new(page * LEN as u64), &[Segment::from_mut(&mut bytes)]).unwrap();
    }
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    let mut reads_all_on_the_spot = || {
        let request = request(Op::Read, 0, vec![0xFF; PAGES as usize * LEN].leak());
        let segments = request.segments.clone();
        queue.push(request);
        queue.submit();
        let is_done = queue.ready.len() == 1;
        assert_eq!(drain_woken(&mut queue, |_| ()), 1);
        let mut found = vec![0; PAGES as usize * LEN];
        copy_to_slice(&segments, &mut found);
        let is_right = |(number, page): (usize, &[u8])| page.iter().all(|byte| *byte == number as u8);
        assert!(found.chunks(LEN).enumerate().all(is_right));
        is_done
    };
    assert!(!reads_all_on_the_spot(), "the ring meets the file");
    // The thread may have waited for a page of its own meanwhile, and leaves reading to the ring for a while.
    while !reads_all_on_the_spot() {}
    assert_eq!(disk.stats().at_workers[Kind::Read as usize], 0);
    drop(queue);
    disk.close().unwrap();
}

#[test]
fn pages_of_the_active_layer_are_read_on_the_spot_though_it_grows_and_is_punched() {
    let (_dir, disk) = active_disk();
    disk.resize(3 * PAGES * LEN as u64, Shrink::Refuse).unwrap();
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    assert!(!reads_on_the_spot(&mut queue, 0), "the ring meets the file");
    // Page after page at a new place, in clusters that the discard freed.
    disk.discard(GuestRange::new(GuestOffset::ZERO, PAGES * LEN as u64)).unwrap();
    for page in (0..PAGES).rev() {
        let mut bytes = vec![page as u8; LEN];
        disk.write(GuestOffset::new(page * LEN as u64), &[Segment::from_mut(&mut bytes)]).unwrap();
    }
    for page in PAGES..3 * PAGES {
        let mut bytes = vec![page as u8; LEN];
        disk.write(GuestOffset::new(page * LEN as u64), &[Segment::from_mut(&mut bytes)]).unwrap();
    }
    for page in 0..3 * PAGES {
        reads_on_the_spot(&mut queue, page);
    }
    // The thread may have waited for a page of its own meanwhile, and leaves reading to the ring for a while.
    for page in [0, PAGES, 3 * PAGES - 1] {
        while !reads_on_the_spot(&mut queue, page) {}
    }
    drop(queue);
    disk.close().unwrap();
}

#[test]
fn a_page_that_the_host_took_back_is_waited_for_once() {
    let (dir, disk) = frozen_disk();
    let mut queue = IoQueue::new(disk, 8).unwrap();
    meet(&mut queue);
    // The first read on the spot asks the host for 64 pages, and maps at most the sixteen around its own.
    let waited = (0..PAGES).step_by(64).flat_map(|first| [first + 1, first + 40]).find(|page| {
        reads_on_the_spot(&mut queue, *page);
        evict(&dir);
        reads_on_the_spot(&mut queue, *page + 17);
        queue.views.is_away()
    });
    let page = waited.expect("the host gives unused pages back when asked to");
    for other in [0, page, page + 17, page + 18] {
        assert!(!reads_on_the_spot(&mut queue, other), "page {other}");
    }
}

#[test]
fn a_layer_cut_off_below_its_views_is_read_as_any_other() {
    let (dir, disk) = frozen_disk();
    let mut queue = IoQueue::new(Arc::clone(&disk), 8).unwrap();
    meet(&mut queue);
    assert!(reads_on_the_spot(&mut queue, PAGES - 2));
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("disk")).unwrap();
    let len = file.metadata().unwrap().len();
    // Behind the disk's back, to the middle of its data.
    file.set_len(len / 2).unwrap();
    let request = request(Op::Read, (PAGES - 2) * LEN as u64, vec![0xFF; LEN].leak());
    queue.push(request);
    queue.submit();
    assert!(queue.ready.is_empty(), "what took the mapping's place was taken for the file's bytes");
    let mut ended = Vec::new();
    // The ring finds the end, and then a worker is asked.
    while queue.in_flight() > 0 {
        queue.submit();
        queue.wait(&[], Some(Duration::from_secs(10)));
        queue.reap(&mut ended);
    }
    let said = ended[0].result.as_ref().unwrap_err().to_string();
    let mut buffer = [0xFF; LEN];
    let read = disk.read(GuestOffset::new((PAGES - 2) * LEN as u64), &[Segment::from_mut(&mut buffer)]);
    assert_eq!(read.unwrap_err().to_string(), said);
    assert!(said.contains("another program changed"), "{said}");
    assert!(!reads_on_the_spot(&mut queue, 1), "the view is of no use any more");
}
