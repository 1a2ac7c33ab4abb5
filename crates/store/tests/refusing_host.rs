//! A host that refuses io_uring, or threads. In a process of its own: of io_uring the kernel is asked once.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use vmstrata_store::{
    EventNotifier, FileOptions, FileStore, OpenStore, Ring, Segment, SegmentVec, io_uring_refused, on_threads,
};
use vmstrata_types::HostOffset;

/// From now on the kernel refuses these calls to this thread, and to those that it starts, as in a container.
fn forbid(calls: &[libc::c_long], errno: i32) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let mut filter = vec![step(LOAD, 0, 0)];
    for &call in calls {
        filter.push(step(IS, 1, call as u32));
        filter.push(step(RETURN, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
    }
    filter.push(step(RETURN, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: it has no memory.
    let alone = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel reads the program, which outlives the call.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!((alone, set), (0, 0), "{}", std::io::Error::last_os_error());
}

#[test]
fn where_io_uring_is_forbidden_threads_stand_in_for_it() {
    let read = std::thread::spawn(|| {
        forbid(&[libc::SYS_io_uring_setup], libc::EPERM);
        let refused = io_uring_refused().and_then(std::io::Error::raw_os_error);
        assert_eq!(refused, Some(libc::EPERM));
        EventNotifier::new().expect("the kernel has the older interface").set(None).expect("set");
        let mut ring = Ring::new(8).expect("ring");
        let mut buf = vec![0; 4096];
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(&[7; 4096]).expect("write");
        let options = FileOptions { lock: None, ..FileOptions::ACTIVE };
        let store = FileStore::new(file.reopen().expect("reopen"), file.path(), &options).expect("store");
        // SAFETY: the completion is reaped before the buffer goes.
        let segment = unsafe { Segment::new(buf.as_mut_ptr(), buf.len()) };
        let segments = SegmentVec::from_slice(&[segment]);
        ring.push_read(OpenStore::new(Arc::new(store)), segments, HostOffset::ZERO, 1);
        let mut done = Vec::new();
        while done.is_empty() {
            ring.wait(&[], None).expect("wait");
            ring.reap(&mut done);
        }
        buf
    });
    assert_eq!(read.join().expect("reads"), [7; 4096]);
}

#[test]
fn where_there_are_no_more_threads_one_does_all_the_work() {
    let (left, done) = (AtomicUsize::new(100), AtomicUsize::new(0));
    let work = || {
        while left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok() {
            done.fetch_add(1, Relaxed);
        }
        std::thread::current().id()
    };
    let threads = std::thread::scope(|scope| {
        let alone = || {
            forbid(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN);
            on_threads(4, work)
        };
        scope.spawn(alone).join().expect("it does not panic")
    });
    assert_eq!((threads.len(), done.into_inner()), (1, 100));
    assert_eq!(on_threads(4, || std::thread::current().id()).len(), 4, "where there are");
}
