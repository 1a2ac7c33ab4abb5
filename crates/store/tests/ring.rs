//! The ring against real files, pipes and event descriptors.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use vmstrata_store::{
    AlignedBuf, CacheMode, Effect, Fault, FaultPlan, FaultStore, FileOptions, FileStore, MemoryStore,
    OpenStore, OperationKind, Ring, RingCompletion, RingFile, Segment, SegmentVec, Store, StoreId, When,
    WindowStore,
};
use vmstrata_types::HostOffset;

const PATIENCE: Duration = Duration::from_secs(20);

/// A file store over a new temporary file that holds `content`.
fn file_store(content: &[u8], cache: CacheMode) -> Arc<dyn Store> {
    let mut file = tempfile::NamedTempFile::new_in(".").expect("temporary file");
    file.write_all(content).expect("write content");
    let options = FileOptions { cache, lock: None, ..FileOptions::ACTIVE };
    Arc::new(FileStore::new(file.reopen().expect("reopen"), file.path(), &options).expect("store"))
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 512 * 7 + i % 251) as u8).collect()
}

/// Memory for a request; it must outlive the request, which tests see to by dropping it last.
fn segments(buf: &mut [u8], pieces: usize) -> SegmentVec<'static> {
    let piece = buf.len().div_ceil(pieces);
    // SAFETY: every test reaps its completions, or drops its ring, before the buffer.
    buf.chunks_mut(piece).map(|part| unsafe { Segment::new(part.as_mut_ptr(), part.len()) }).collect()
}

/// One of each kind.
fn rings(depth: u32) -> [Ring; 2] {
    [Ring::new(depth).expect("ring"), Ring::of_threads().expect("ring")]
}

/// Submits, and waits until `count` requests have completed.
fn complete(ring: &mut Ring, count: usize) -> Vec<RingCompletion> {
    let deadline = Instant::now() + PATIENCE;
    let mut done = Vec::new();
    ring.submit().expect("submit");
    ring.reap(&mut done);
    while done.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} completed in time", done.len());
        ring.wait(&[], Some(Duration::from_secs(1))).expect("wait");
        ring.reap(&mut done);
    }
    assert_eq!(done.len(), count);
    done
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd")
}

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).expect("signal");
}

fn clear(fd: &OwnedFd) {
    rustix::io::read(fd, &mut [0; 8]).expect("clear");
}

#[test]
fn reads_and_writes_arrive_whole() {
    let store = file_store(&pattern(65536), CacheMode::Host);
    for mut ring in rings(8) {
        for pieces in [1, 3, 4, 9] {
            let mut buf = vec![0; 10_000];
            ring.push_read(
                OpenStore::new(store.clone()),
                segments(&mut buf, pieces),
                HostOffset::new(777),
                5,
            );
            let done = complete(&mut ring, 1);
            assert_eq!((done[0].token, done[0].expected), (5, 10_000));
            assert_eq!(*done[0].result.as_ref().expect("read"), 10_000);
            assert_eq!(buf, pattern(65536)[777..10_777]);

            let mut out = vec![pieces as u8; 5000];
            ring.push_write(
                OpenStore::new(store.clone()),
                segments(&mut out, pieces),
                HostOffset::new(100_000),
                6,
            );
            assert_eq!(*complete(&mut ring, 1)[0].result.as_ref().expect("write"), 5000);
            let mut back = vec![0; 5000];
            store.read_exact(&mut back, HostOffset::new(100_000)).expect("read back");
            assert_eq!(back, out);
        }
        assert_eq!(ring.in_flight(), 0);
    }
}

#[test]
fn a_flush_moves_no_bytes() {
    for cache in [CacheMode::Host, CacheMode::Direct] {
        let store = file_store(&pattern(4096), cache);
        for mut ring in rings(8) {
            ring.push_flush(OpenStore::new(store.clone()), 3);
            let done = complete(&mut ring, 1);
            assert_eq!((done[0].token, done[0].expected), (3, 0));
            assert_eq!(*done[0].result.as_ref().expect("flush"), 0);
        }
    }
}

#[test]
fn a_window_is_read_from_its_start() {
    let whole = file_store(&pattern(65536), CacheMode::Host);
    let window = OpenStore::new(Arc::new(WindowStore::new(whole, HostOffset::new(1000), 20_000)));
    assert!(!window.may_be_pinned());
    for mut ring in rings(8) {
        let mut buf = vec![0; 5000];
        ring.push_read(window.clone(), segments(&mut buf, 2), HostOffset::new(777), 5);
        assert_eq!(*complete(&mut ring, 1)[0].result.as_ref().expect("read"), 5000);
        assert_eq!(buf, pattern(65536)[1777..6777]);
    }
}

#[test]
fn the_end_of_the_file_cuts_reads_short() {
    let store = file_store(&pattern(1000), CacheMode::Host);
    for mut ring in rings(8) {
        let (mut tail, mut beyond) = (vec![0; 512], vec![0; 512]);
        ring.push_read(OpenStore::new(store.clone()), segments(&mut tail, 1), HostOffset::new(900), 0);
        ring.push_read(OpenStore::new(store.clone()), segments(&mut beyond, 2), HostOffset::new(5000), 1);
        let mut done = complete(&mut ring, 2);
        done.sort_by_key(|completion| completion.token);
        assert_eq!(*done[0].result.as_ref().expect("tail"), 100);
        assert_eq!(tail[..100], pattern(1000)[900..]);
        assert_eq!(*done[1].result.as_ref().expect("beyond"), 0);
    }
}

#[test]
fn errors_carry_their_errno() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    let read_only = std::fs::File::open(file.path()).expect("open");
    let options = FileOptions { lock: None, ..FileOptions::FROZEN };
    let store: Arc<dyn Store> = Arc::new(FileStore::new(read_only, file.path(), &options).expect("store"));
    for mut ring in rings(8) {
        let mut buf = vec![0; 512];
        ring.push_write(OpenStore::new(store.clone()), segments(&mut buf, 1), HostOffset::ZERO, 1);
        let done = complete(&mut ring, 1);
        assert_eq!(done[0].result.as_ref().unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}

#[test]
fn far_more_requests_than_the_ring_is_deep() {
    let content = pattern(1 << 20);
    for cache in [CacheMode::Host, CacheMode::Direct] {
        let store = file_store(&content, cache);
        for mut ring in rings(8) {
            let mut bufs: Vec<AlignedBuf> = (0..2000).map(|_| AlignedBuf::zeroed(4096)).collect();
            for round in 0..3 {
                for (i, buf) in bufs.iter_mut().enumerate() {
                    buf.fill(0);
                    ring.push_read(
                        OpenStore::new(store.clone()),
                        segments(buf, 1 + i % 2),
                        offset_of(i),
                        i as u64,
                    );
                }
                assert!(ring.in_flight() <= 2000);
                let mut done = complete(&mut ring, 2000);
                done.sort_by_key(|completion| completion.token);
                for (i, completion) in done.iter().enumerate() {
                    assert_eq!(completion.token, i as u64, "round {round}");
                    assert_eq!(*completion.result.as_ref().expect("read"), 4096);
                    let at = offset_of(i).get() as usize;
                    assert_eq!(bufs[i][..], content[at..at + 4096]);
                }
            }
        }
    }
}

fn offset_of(i: usize) -> HostOffset {
    HostOffset::new((i * 37 % 256) as u64 * 4096)
}

#[test]
fn more_segments_than_the_kernel_takes_complete_short() {
    let store = file_store(&pattern(8192), CacheMode::Host);
    for mut ring in rings(8) {
        let mut buf = vec![0; 3000];
        ring.push_read(OpenStore::new(store.clone()), segments(&mut buf, 1500), HostOffset::ZERO, 1);
        let done = complete(&mut ring, 1);
        assert_eq!((*done[0].result.as_ref().expect("read"), done[0].expected), (2048, 3000));
        assert_eq!(buf[..2048], pattern(8192)[..2048]);
    }
}

#[test]
#[should_panic(expected = "a store that a ring can use")]
fn stores_without_a_descriptor_are_refused() {
    let store: Arc<dyn Store> =
        Arc::new(FaultStore::new(Arc::new(MemoryStore::new()), &FaultPlan::new(), StoreId(0)));
    Ring::new(8).expect("ring").push_read(
        OpenStore::new(store.clone()),
        SegmentVec::new(),
        HostOffset::ZERO,
        0,
    );
}

#[test]
fn a_wait_ends_with_its_timeout() {
    for mut ring in rings(8) {
        let idle = event();
        for watched in [&[][..], &[idle.as_fd()]] {
            let start = Instant::now();
            assert_eq!(ring.wait(watched, Some(Duration::from_millis(30))).expect("wait"), 0);
            assert!(start.elapsed() >= Duration::from_millis(29));
            assert!(start.elapsed() < PATIENCE);
        }
        let start = Instant::now();
        assert_eq!(ring.wait(&[], Some(Duration::ZERO)).expect("wait"), 0);
        assert!(start.elapsed() < Duration::from_secs(1));
    }
}

#[test]
fn watched_descriptors_are_reported_by_position() {
    for mut ring in rings(8) {
        let fds: Vec<OwnedFd> = (0..5).map(|_| event()).collect();
        let watched: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        for round in 0..3 {
            signal(&fds[3]);
            assert_eq!(ring.wait(&watched, Some(PATIENCE)).expect("wait"), 1 << 3, "round {round}");
            // Not cleared: still readable, so reported again.
            assert_eq!(ring.wait(&watched, Some(PATIENCE)).expect("wait"), 1 << 3, "round {round}");
            clear(&fds[3]);
            signal(&fds[0]);
            signal(&fds[4]);
            let mut seen = 0;
            while seen != 0b10001 {
                let mask = ring.wait(&watched, Some(PATIENCE)).expect("wait");
                assert_ne!(mask, 0, "timed out");
                seen |= mask;
            }
            clear(&fds[0]);
            clear(&fds[4]);
            // What is armed now saw the old signals at most once more.
            while ring.wait(&watched, Some(Duration::from_millis(20))).expect("wait") != 0 {}
        }
    }
}

#[test]
fn a_signal_ends_a_sleep() {
    for mut ring in rings(8) {
        let fd = Arc::new(event());
        let other = Arc::clone(&fd);
        let signaller = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            signal(&other);
        });
        assert_eq!(ring.wait(&[fd.as_fd()], None).expect("wait"), 1);
        signaller.join().expect("signaller");
    }
}

#[test]
fn the_watched_set_may_change_from_wait_to_wait() {
    for mut ring in rings(8) {
        let (a, b, c) = (event(), event(), event());
        let short = Some(Duration::from_millis(10));
        assert_eq!(ring.wait(&[a.as_fd(), b.as_fd()], short).expect("wait"), 0);
        // Dropped from the set, `a` is not seen any more.
        signal(&a);
        assert_eq!(ring.wait(&[b.as_fd(), c.as_fd()], short).expect("wait"), 0);
        // Positions follow the set.
        signal(&c);
        assert_eq!(ring.wait(&[c.as_fd(), b.as_fd(), a.as_fd()], Some(PATIENCE)).expect("wait") & 0b001, 1);
        clear(&c);
        let mut seen = 0;
        while seen & 0b100 == 0 {
            seen = ring.wait(&[c.as_fd(), b.as_fd(), a.as_fd()], Some(PATIENCE)).expect("wait");
            assert_ne!(seen, 0, "timed out");
        }
    }
}

#[test]
fn an_unwatched_number_may_mean_another_file() {
    let mut ring = Ring::new(8).expect("ring");
    let short = Some(Duration::from_millis(10));
    let old = event();
    let number = std::os::fd::AsRawFd::as_raw_fd(&old);
    assert_eq!(ring.wait(&[old.as_fd()], short).expect("wait"), 0);
    ring.unwatch(old.as_fd()).expect("unwatch");
    let new = event();
    // SAFETY: `number` is `old`'s descriptor, owned here; `dup3` closes it and makes it mean `new`'s file.
    assert_eq!(unsafe { libc::dup3(std::os::fd::AsRawFd::as_raw_fd(&new), number, libc::O_CLOEXEC) }, number);
    assert_eq!(ring.wait(&[old.as_fd()], short).expect("wait"), 0);
    signal(&new);
    assert_eq!(ring.wait(&[old.as_fd()], Some(PATIENCE)).expect("wait"), 1);
}

#[test]
fn closing_the_other_end_of_a_watched_socket_wakes() {
    for mut ring in rings(8) {
        let (mine, theirs) = std::os::unix::net::UnixStream::pair().expect("pair");
        assert_eq!(ring.wait(&[mine.as_fd()], Some(Duration::from_millis(10))).expect("wait"), 0);
        drop(theirs);
        assert_eq!(ring.wait(&[mine.as_fd()], Some(PATIENCE)).expect("wait"), 1);
        assert_eq!((&mine).read(&mut [0; 1]).expect("read"), 0);
    }
}

#[test]
fn an_unwatched_socket_is_let_go() {
    for mut ring in rings(8) {
        let (mine, mut theirs) = std::os::unix::net::UnixStream::pair().expect("pair");
        theirs.set_read_timeout(Some(PATIENCE)).expect("timeout");
        assert_eq!(ring.wait(&[mine.as_fd()], Some(Duration::from_millis(10))).expect("wait"), 0);
        ring.unwatch(mine.as_fd()).expect("unwatch");
        drop(mine);
        assert_eq!(theirs.read(&mut [0; 1]).expect("the end, not a timeout"), 0);
    }
}

#[test]
fn completions_and_signals_come_through_one_wait() {
    let content = pattern(1 << 20);
    let store = file_store(&content, CacheMode::Direct);
    for mut ring in rings(16) {
        let fd = event();
        let mut bufs: Vec<AlignedBuf> = (0..16).map(|_| AlignedBuf::zeroed(4096)).collect();
        let (mut signals, mut done) = (0, Vec::new());
        for round in 0..200 {
            for (i, buf) in bufs.iter_mut().enumerate() {
                ring.push_read(
                    OpenStore::new(store.clone()),
                    segments(buf, 1),
                    offset_of(i + round),
                    i as u64,
                );
            }
            signal(&fd);
            ring.submit().expect("submit");
            let mut completed = 0;
            let mut signalled = false;
            while completed < 16 || !signalled {
                let mask = ring.wait(&[fd.as_fd()], Some(PATIENCE)).expect("wait");
                if mask == 1 && rustix::io::read(&fd, &mut [0; 8]).is_ok() {
                    signalled = true;
                    signals += 1;
                }
                ring.reap(&mut done);
                completed += done.len();
                assert!(done.drain(..).all(|completion| completion.result.expect("read") == 4096));
            }
            for (i, buf) in bufs.iter().enumerate() {
                let at = offset_of(i + round).get() as usize;
                assert_eq!(buf[..], content[at..at + 4096]);
            }
        }
        assert_eq!(signals, 200);
    }
}

#[test]
fn dropping_a_ring_waits_for_what_is_in_flight() {
    let content = pattern(4 << 20);
    let store = file_store(&content, CacheMode::Direct);
    let with = |submitted: bool| rings(64).map(|ring| (ring, submitted));
    for (mut ring, submitted) in [true, false].into_iter().flat_map(with) {
        let mut bufs: Vec<AlignedBuf> = (0..64).map(|_| AlignedBuf::zeroed(65536)).collect();
        for (i, buf) in bufs.iter_mut().enumerate() {
            ring.push_read(
                OpenStore::new(store.clone()),
                segments(buf, 1),
                HostOffset::new(i as u64 * 65536),
                0,
            );
        }
        if submitted {
            ring.submit().expect("submit");
        }
        drop(ring);
        assert_eq!(Arc::strong_count(&store), 1, "the ring holds no store any more");
        for (i, buf) in bufs.iter().enumerate() {
            assert_eq!(buf[..], content[i * 65536..(i + 1) * 65536]);
        }
    }
}

#[test]
fn a_ring_may_be_made_used_and_dropped_on_different_threads() {
    let content = pattern(4 << 20);
    let store = file_store(&content, CacheMode::Direct);
    for user_stays in [true, false] {
        let mut bufs: Vec<AlignedBuf> = (0..64).map(|_| AlignedBuf::zeroed(65536)).collect();
        let mut ring = Ring::new(64).expect("ring");
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (give, given) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (store, bufs) = (&store, &mut bufs);
            let user = scope.spawn(move || {
                for (i, buf) in bufs.iter_mut().enumerate() {
                    ring.push_read(
                        OpenStore::new(store.clone()),
                        segments(buf, 1),
                        HostOffset::new(i as u64 * 65536),
                        i as u64,
                    );
                }
                ring.submit().expect("submit");
                give.send(ring).expect("give");
                // Either asleep while another thread drops its ring, or gone.
                assert!(!user_stays || stopped.recv().is_err());
            });
            let ring = given.recv().expect("given");
            if user_stays {
                drop(ring);
                drop(stop);
                user.join().expect("user");
            } else {
                user.join().expect("user");
                drop(ring);
            }
        });
        assert_eq!(Arc::strong_count(&store), 1);
        for (i, buf) in bufs.iter().enumerate() {
            assert_eq!(buf[..], content[i * 65536..(i + 1) * 65536]);
        }
    }
}

#[test]
fn a_wait_that_need_not_sleep_submits_too() {
    let store = file_store(&pattern(4096), CacheMode::Host);
    for mut ring in rings(8) {
        let (fd, mut done) = (event(), Vec::new());
        assert_eq!(ring.wait(&[fd.as_fd()], Some(Duration::ZERO)).expect("wait"), 0);
        signal(&fd);
        // The ring knows of the signal before the wait, which then returns at once.
        ring.reap(&mut done);
        let mut buf = vec![0; 4096];
        ring.push_read(OpenStore::new(store.clone()), segments(&mut buf, 1), HostOffset::ZERO, 0);
        assert_eq!(ring.wait(&[fd.as_fd()], Some(PATIENCE)).expect("wait"), 1);
        let deadline = Instant::now() + PATIENCE;
        while done.is_empty() {
            assert!(Instant::now() < deadline, "never submitted");
            ring.reap(&mut done);
        }
        assert_eq!(buf, pattern(4096));
    }
}

#[test]
fn reads_apart_fill_their_segments_like_others() {
    let content: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
    let store = file_store(&content, CacheMode::Host);
    for mut ring in rings(8) {
        let mut buf = vec![0; content.len()];
        for (number, part) in buf.chunks_mut(1 << 18).enumerate() {
            let at = HostOffset::new((number as u64) << 18);
            ring.push_read_apart(OpenStore::new(store.clone()), segments(part, 1), at, number as u64);
        }
        let mut done = Vec::new();
        while done.len() < 4 {
            ring.wait(&[], None).expect("waits");
            ring.reap(&mut done);
        }
        assert!(done.iter().all(|part| part.result.as_ref().is_ok_and(|&moved| moved == 1 << 18)));
        assert_eq!(buf, content);
    }
}

#[test]
fn pinned_files_are_read_whoever_else_closes_them() {
    let content = [pattern(8192), pattern(8192).into_iter().rev().collect()];
    let mut ring = Ring::new(8).expect("ring");
    let pinned = content.each_ref().map(|content| {
        let store = OpenStore::new(file_store(content, CacheMode::Host));
        ring.pin(&store).expect("this kernel has a table of files")
    });
    let mut bufs = [vec![0; 4096], vec![0; 4096]];
    for (buf, file) in bufs.iter_mut().zip(pinned) {
        ring.push_read(RingFile::Pinned(file), segments(buf, 2), HostOffset::new(1024), 0);
    }
    for done in complete(&mut ring, 2) {
        assert_eq!(done.result.expect("read"), 4096);
    }
    for (buf, content) in bufs.iter().zip(&content) {
        assert_eq!(buf[..], content[1024..1024 + 4096]);
    }
}

#[test]
fn what_is_queued_when_files_are_unpinned_still_reads_the_old_ones() {
    let mut ring = Ring::new(8).expect("ring");
    let store = |byte| OpenStore::new(file_store(&[byte; 512], CacheMode::Host));
    let mut bufs = vec![vec![0; 512]; 20];
    for (round, buf) in (0..).zip(&mut bufs) {
        let file = ring.pin(&store(round)).expect("room again after each round");
        ring.push_read(RingFile::Pinned(file), segments(buf, 1), HostOffset::ZERO, 0);
        ring.unpin_all().expect("unpin");
    }
    complete(&mut ring, 20);
    for (round, buf) in (0..).zip(&bufs) {
        assert!(buf.iter().all(|&byte| byte == round), "round {round}");
    }
}

#[test]
fn a_ring_pins_thousands_of_files_and_no_more_than_its_table_holds() {
    let mut ring = Ring::new(8).expect("ring");
    let store = OpenStore::new(file_store(b"x", CacheMode::Host));
    let pinned = (0..10_000).map_while(|_| ring.pin(&store)).count();
    assert!((1000..5000).contains(&pinned), "{pinned}");
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
    ring.unpin_all().expect("unpin");
    assert_eq!(ring.pin(&OpenStore::new(memory)), None, "a store without a descriptor");
    assert!(ring.pin(&store).is_some());
}

/// A simulated ring, its plan, and a store of it that holds `content`.
fn simulated(content: &[u8]) -> (Ring, Arc<FaultPlan>, Arc<OpenStore>) {
    let plan = FaultPlan::recording();
    let memory = Arc::new(MemoryStore::from_vec(content.to_vec()));
    let store = OpenStore::new(Arc::new(FaultStore::new(memory, &plan, StoreId(0))));
    (Ring::simulated(&plan).expect("ring"), plan, store)
}

#[test]
fn a_simulated_ring_fails_tears_and_passes_requests_as_planned() {
    let (mut ring, plan, store) = simulated(b"....");
    let fault = |kind, nth, effect| Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect };
    plan.add(fault(OperationKind::Write, 1, Effect::Tear { bytes: 1, errno: libc::EIO }));
    plan.add(fault(OperationKind::Read, 0, Effect::Fail(libc::ENOSPC)));
    let (mut first, mut torn, mut failed, mut read) = (*b"a", *b"bc", [0; 4], [0; 4]);
    ring.push_write(store.clone(), segments(&mut first, 1), HostOffset::ZERO, 0);
    ring.push_write(store.clone(), segments(&mut torn, 1), HostOffset::new(1), 1);
    ring.push_read(store.clone(), segments(&mut failed, 1), HostOffset::ZERO, 2);
    ring.push_read_apart(store, segments(&mut read, 2), HostOffset::ZERO, 3);
    assert_eq!((plan.count(None), ring.in_flight()), (0, 4), "nothing happens before it is submitted");
    let done = complete(&mut ring, 4);
    let results: Vec<_> =
        done.iter().map(|done| done.result.as_ref().map_err(std::io::Error::raw_os_error)).collect();
    assert_eq!(results, [Ok(&1), Err(Some(libc::EIO)), Err(Some(libc::ENOSPC)), Ok(&4)]);
    assert_eq!((&read, ring.in_flight()), (b"ab..", 0));
}

#[test]
fn what_a_simulated_ring_holds_is_passed_and_wakes_it_when_released() {
    let (mut ring, plan, store) = simulated(b"....");
    let held = Fault { kind: None, store: None, when: When::Nth(0), effect: Effect::Hold };
    plan.add(held);
    let (mut write, mut before, mut after) = (*b"new!", [0; 4], [0; 4]);
    ring.push_write(store.clone(), segments(&mut write, 1), HostOffset::ZERO, 0);
    ring.push_read(store.clone(), segments(&mut before, 1), HostOffset::ZERO, 1);
    assert_eq!(complete(&mut ring, 1)[0].token, 1);
    assert!(before == *b"...." && ring.in_flight() == 1 && plan.wait_until_held(1, Duration::ZERO));
    std::thread::scope(|scope| {
        scope.spawn(|| plan.release());
        ring.wait(&[], None).expect("wait");
    });
    assert_eq!(complete(&mut ring, 1)[0].token, 0);
    assert!(!plan.wait_until_held(1, Duration::ZERO));
    ring.push_read(store, segments(&mut after, 1), HostOffset::ZERO, 2);
    complete(&mut ring, 1);
    assert_eq!(&after, b"new!");
}

#[test]
fn a_simulated_write_is_logged_as_completed_when_it_is_reaped() {
    let (mut ring, plan, store) = simulated(b"");
    let mut bytes = *b"new!";
    ring.push_write(store, segments(&mut bytes, 1), HostOffset::ZERO, 0);
    ring.submit().expect("submit");
    let is_completed = || plan.log().iter().map(|record| record.completed.is_some()).collect::<Vec<_>>();
    assert_eq!(is_completed(), [false]);
    complete(&mut ring, 1);
    assert_eq!(is_completed(), [true]);
}

#[test]
fn a_simulated_flush_fails_as_planned_and_is_logged_as_completed_when_it_is_reaped() {
    let (mut ring, plan, store) = simulated(b"....");
    plan.fail_nth(Some(OperationKind::Flush), 1, 5);
    for fails in [false, true] {
        ring.push_flush(Arc::clone(&store), 9);
        ring.submit().expect("submit");
        let logged = |plan: &FaultPlan| plan.log().last().map(|record| record.completed.is_some());
        assert_eq!(logged(&plan), Some(false));
        let mut done = Vec::new();
        ring.reap(&mut done);
        assert_eq!((done[0].token, done[0].result.is_err()), (9, fails));
        assert_eq!(logged(&plan), Some(!fails));
    }
}
