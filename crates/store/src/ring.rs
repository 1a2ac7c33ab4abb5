//! Many reads, writes and flushes of raw files at a time.
//!
//! Place in the data flow: every I/O thread of `disk` has one. It pushes requests for [`crate::Store`]s that
//! have a raw descriptor, hands them over in one call, and reaps completions. The same call that waits for completions
//! also waits for the thread's other descriptors (kicks, sockets).
//!
//! [`uring`] does this with one io_uring. Where the host forbids that, as containers and `kernel.io_uring_disabled` do,
//! [`threads`] stands in for it: slower, and the same otherwise. In tests, [`simulated`] fails, holds and records requests.

mod simulated;
mod threads;
mod uring;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;
use vmstrata_types::HostOffset;

use crate::transfer::SEGMENTS_MAX;
use crate::{FaultPlan, OpenStore, Segment, SegmentVec, total_len};
use simulated::Simulated;
use threads::Threads;
use uring::Uring;
pub use uring::{PinnedFile, RingFile};

/// A finished request.
#[derive(Debug)]
pub struct RingCompletion {
    /// As given when pushed.
    pub token: u64,
    /// Bytes moved, which may be fewer than expected: at the end of the file, or for no reason at all.
    pub result: io::Result<usize>,
    /// Bytes asked for.
    pub expected: usize,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Read,
    /// Reads on another thread than the one that submits.
    ReadApart,
    Write,
    /// Brings what was written to stable storage.
    Flush,
}

/// A request as it was pushed.
#[derive(Debug)]
struct Job {
    action: Action,
    file: RingFile,
    segments: SegmentVec<'static>,
    at: HostOffset,
    token: u64,
}

/// A queue of requests to raw files, for one thread at a time.
#[derive(Debug)]
pub struct Ring(Engine);

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each I/O thread, and nearly always the large one")]
enum Engine {
    Uring(Uring),
    Emulated(Box<dyn Emulated>),
}

/// A ring without the kernel's; methods as of [`Ring`].
trait Emulated: std::fmt::Debug + Send {
    fn push(&mut self, job: Job);
    fn submit(&mut self);
    fn reap(&mut self, out: &mut Vec<RingCompletion>);
    fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<u64>;
    fn in_flight(&self) -> usize;
}

impl Job {
    /// Its file. Emulated rings pin none.
    fn store(&self) -> &Arc<OpenStore> {
        let RingFile::Open(store) = &self.file else { unreachable!("these rings pin no files") };
        store
    }

    /// As many segments as the kernel would use.
    fn used(&self) -> &[Segment<'static>] {
        &self.segments[..self.segments.len().min(SEGMENTS_MAX)]
    }

    fn ended(&self, result: io::Result<usize>) -> RingCompletion {
        RingCompletion { token: self.token, result, expected: total_len(&self.segments) }
    }
}

/// Why this process may not use io_uring; `None` where it may. The kernel is asked once.
pub fn io_uring_refused() -> Option<&'static io::Error> {
    static ASKED: OnceLock<Option<io::Error>> = OnceLock::new();
    ASKED.get_or_init(|| Uring::try_out().err().filter(is_refusal)).as_ref()
}

/// Whether the host does not want io_uring to be used: the kernel, a seccomp filter or a security module says so.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS))
}

impl Ring {
    /// A ring meant for up to `depth` requests at a time; more are allowed and cost memory.
    ///
    /// # Errors
    /// Whatever the kernel reports, but where it refuses io_uring: threads then carry the requests out.
    pub fn new(depth: u32) -> io::Result<Self> {
        if io_uring_refused().is_some() {
            return Self::of_threads();
        }
        match Uring::new(depth) {
            Ok(uring) => Ok(Self(Engine::Uring(uring))),
            // The host has changed its mind.
            Err(error) if is_refusal(&error) => Self::of_threads(),
            Err(error) => Err(error),
        }
    }

    /// One that does without io_uring.
    ///
    /// # Errors
    /// No descriptor.
    pub fn of_threads() -> io::Result<Self> {
        Ok(Self(Engine::Emulated(Box::new(Threads::new()?))))
    }

    /// One for [`crate::FaultStore`]s of `plan`: the thread that submits carries requests out, in order, as the plan says. A
    /// request that the plan holds lets later ones pass.
    ///
    /// # Errors
    /// No descriptor.
    pub fn simulated(plan: &Arc<FaultPlan>) -> io::Result<Self> {
        Ok(Self(Engine::Emulated(Box::new(Simulated::new(plan)?))))
    }

    /// Queues a read of `file` at `at` into `segments`.
    ///
    /// At most 1,024 segments are used; the completion is then short.
    ///
    /// # Panics
    /// When the store has no raw descriptor (of [`Ring::simulated`]: is no [`crate::FaultStore`]), or the queue is full and the
    /// kernel refuses to take it.
    #[inline]
    pub fn push_read(
        &mut self,
        file: impl Into<RingFile>,
        segments: SegmentVec<'static>,
        at: HostOffset,
        token: u64,
    ) {
        self.push(Job { action: Action::Read, file: file.into(), segments, at, token });
    }

    /// As [`Ring::push_read`], carried out by another thread than this one: for pieces of large requests. Copying those out of
    /// the page cache takes longer than handing them over, and one thread does not use all of the memory's bandwidth.
    ///
    /// # Panics
    /// As [`Ring::push_read`].
    pub fn push_read_apart(
        &mut self,
        file: impl Into<RingFile>,
        segments: SegmentVec<'static>,
        at: HostOffset,
        token: u64,
    ) {
        self.push(Job { action: Action::ReadApart, file: file.into(), segments, at, token });
    }

    /// Queues a write of `segments` to `file` at `at`.
    ///
    /// At most 1,024 segments are used; the completion is then short.
    ///
    /// # Panics
    /// As [`Ring::push_read`].
    pub fn push_write(
        &mut self,
        file: impl Into<RingFile>,
        segments: SegmentVec<'static>,
        at: HostOffset,
        token: u64,
    ) {
        self.push(Job { action: Action::Write, file: file.into(), segments, at, token });
    }

    /// Queues a flush of `file`: it brings all writes that completed before to stable storage.
    ///
    /// # Panics
    /// As [`Ring::push_read`].
    pub fn push_flush(&mut self, file: impl Into<RingFile>, token: u64) {
        let (segments, at) = (SegmentVec::new(), HostOffset::ZERO);
        self.push(Job { action: Action::Flush, file: file.into(), segments, at, token });
    }

    #[inline]
    fn push(&mut self, job: Job) {
        match &mut self.0 {
            Engine::Uring(uring) => uring.push(job),
            Engine::Emulated(ring) => ring.push(job),
        }
    }

    /// Holds on to the store's file until [`Ring::unpin_all`], whoever else closes it; `None` when it cannot.
    pub fn pin(&mut self, store: &OpenStore) -> Option<PinnedFile> {
        match &mut self.0 {
            Engine::Uring(uring) => uring.pin(store),
            Engine::Emulated(_) => None,
        }
    }

    /// Lets go of every pinned file.
    ///
    /// # Errors
    /// As [`Ring::submit`]: the files stay pinned.
    pub fn unpin_all(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Engine::Uring(uring) => uring.unpin_all(),
            Engine::Emulated(_) => Ok(()),
        }
    }

    /// Hands everything queued over.
    ///
    /// # Errors
    /// What `io_uring_enter` reports and trying again does not cure; what is queued stays queued.
    pub fn submit(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Engine::Uring(uring) => uring.submit(),
            Engine::Emulated(ring) => {
                ring.submit();
                Ok(())
            }
        }
    }

    /// Appends finished requests to `out`; never sleeps.
    pub fn reap(&mut self, out: &mut Vec<RingCompletion>) {
        match &mut self.0 {
            Engine::Uring(uring) => uring.reap(out),
            Engine::Emulated(ring) => ring.reap(out),
        }
    }

    /// Submits what is queued, then sleeps until a completion is there to reap, one of `watched` is readable (or
    /// closed by its other end, or in error), or `timeout` has passed. May wake for no reason.
    ///
    /// Returns which of `watched` are readable, a bit for each position. Readiness may be out of date: use descriptors
    /// that do not block.
    ///
    /// The ring holds on to what it watches until a `wait` is called without it, or [`Ring::unwatch`]. Before
    /// a descriptor is closed one of the two must happen: the ring knows descriptors by number, and would not
    /// see that the number means another file now.
    ///
    /// # Errors
    /// What the kernel reports and trying again does not cure.
    ///
    /// # Panics
    /// When more than 64 descriptors are watched.
    pub fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<u64> {
        match &mut self.0 {
            Engine::Uring(uring) => uring.wait(watched, timeout),
            Engine::Emulated(ring) => ring.wait(watched, timeout),
        }
    }

    /// Stops watching `fd`; to be called before it is closed.
    ///
    /// # Errors
    /// As [`Ring::submit`].
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        match &mut self.0 {
            Engine::Uring(uring) => uring.unwatch(fd),
            Engine::Emulated(_) => Ok(()),
        }
    }

    /// Requests pushed and not yet completed, whether submitted or not; reaping lags behind.
    pub fn in_flight(&self) -> usize {
        match &self.0 {
            Engine::Uring(uring) => uring.in_flight(),
            Engine::Emulated(ring) => ring.in_flight(),
        }
    }
}

/// Sleeps until `own` or one of `watched` is readable, or `timeout` has passed; returns which of `watched` are.
fn poll_with(watched: &[BorrowedFd<'_>], own: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<u64> {
    assert!(watched.len() <= 64, "more descriptors than a mask has bits");
    let fds = watched.iter().copied().chain([own]);
    let mut polled: SmallVec<[PollFd<'_>; 8]> =
        fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timespec = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(&mut polled, timespec.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(0),
        Err(error) => return Err(error.into()),
    }
    let readable = polled[..watched.len()].iter().enumerate();
    Ok(readable.filter(|(_, fd)| !fd.revents().is_empty()).fold(0, |mask, (place, _)| mask | 1 << place))
}
