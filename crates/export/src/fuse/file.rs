//! An open file: a queue into its disk, with a thread of its own.
//!
//! ```text
//!   kernel ──► a thread of the mount: request ──► Inbox ──► I/O thread: Engine ──► reply to the kernel
//! ```
//!
//! The thread takes all that has arrived, hands it to the disk in one go, and answers in whatever order requests end. Once the
//! file is closed it ends what is under way; later requests get ESTALE. Then nothing of the disk is held any more.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use fuser::{ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite};
use parking_lot::{Condvar, Mutex, RwLock};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use vmstrata_disk::{AttachedWriter, Disk, Error, Op};
use vmstrata_types::{GuestOffset, GuestRange};

use super::sparse;
use super::tree::Opened;
use crate::buffer::{Buffer, SpareBuffers};
use crate::engine::{Engine, Piece};

/// Requests of one open file inside the disk at a time.
const DEPTH: u32 = 128;
/// Failures of one file's requests that are logged.
const REPORTED_MAX: u32 = 10;

/// A file that is open.
#[derive(Debug)]
pub(super) struct OpenFile {
    inbox: Arc<Inbox>,
    /// `None` once it is closed.
    disk: RwLock<Option<Arc<Disk>>>,
    of: String,
    writes: bool,
}

/// What waits for the I/O thread.
#[derive(Debug)]
struct Inbox {
    state: Mutex<State>,
    /// Signalled when the thread has ended.
    ended: Condvar,
    wake: OwnedFd,
    spare: Mutex<SpareBuffers>,
}

#[derive(Debug, Default)]
struct State {
    jobs: Vec<Job>,
    is_asleep: bool,
    is_closed: bool,
    has_ended: bool,
}

#[derive(Debug)]
struct Job {
    op: Op,
    range: GuestRange,
    buffer: Option<Buffer>,
    answer: Answer,
}

/// Whom to tell the end of a request.
#[derive(Debug)]
enum Answer {
    Read(ReplyData),
    Write(ReplyWrite),
    Other(ReplyEmpty),
}

impl Answer {
    fn fail(self, errno: Errno) {
        let errno = fuser::Errno::from_i32(errno.raw_os_error());
        match self {
            Self::Read(reply) => reply.error(errno),
            Self::Write(reply) => reply.error(errno),
            Self::Other(reply) => reply.error(errno),
        }
    }
}

impl OpenFile {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread, no descriptor, or a disk that can have no queue.
    pub(super) fn start(opened: Opened) -> io::Result<Self> {
        let Opened { disk, writer, of, .. } = opened;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (state, ended, spare) = (Mutex::default(), Condvar::new(), Mutex::default());
        let inbox = Arc::new(Inbox { state, ended, wake, spare });
        let writes = writer.is_some();
        let body = {
            let (disk, inbox) = (Arc::clone(&disk), Arc::clone(&inbox));
            move || {
                serve(disk, writer, &inbox);
                inbox.end();
            }
        };
        thread::Builder::new().name("fuse-io".to_owned()).spawn(body)?;
        Ok(Self { inbox, disk: RwLock::new(Some(disk)), of, writes })
    }

    /// The served disk that it belongs to.
    pub(super) fn of(&self) -> &str {
        &self.of
    }

    /// Takes no more requests, and lets go of the disk once those under way have ended. Whether that is so by the deadline.
    pub(super) fn close(&self, deadline: Instant) -> bool {
        self.begin_close();
        drop(self.disk.write().take());
        let mut state = self.inbox.state.lock();
        while !state.has_ended {
            if self.inbox.ended.wait_until(&mut state, deadline).timed_out() {
                return state.has_ended;
            }
        }
        true
    }

    /// Takes no more requests.
    pub(super) fn begin_close(&self) {
        self.inbox.state.lock().is_closed = true;
        self.inbox.wake();
    }

    /// Whether the disk is let go of.
    pub(super) fn has_let_go(&self) -> bool {
        self.inbox.state.lock().has_ended
    }

    pub(super) fn read(&self, offset: u64, size: u32, reply: ReplyData) {
        match self.inside(offset, size.into()) {
            None => Answer::Read(reply).fail(Errno::STALE),
            Some(range) if range.len == 0 => reply.data(&[]),
            Some(range) => {
                let buffer = self.inbox.buffer(range.len);
                self.push(Op::Read, range, Some(buffer), Answer::Read(reply));
            }
        }
    }

    /// Writes what fits the disk; with `fua` it is on stable storage when that ends.
    pub(super) fn write(&self, offset: u64, data: &[u8], fua: bool, reply: ReplyWrite) {
        match self.inside(offset, data.len() as u64) {
            None => Answer::Write(reply).fail(Errno::STALE),
            Some(range) if range.len == 0 && !data.is_empty() => Answer::Write(reply).fail(Errno::NOSPC),
            Some(range) if range.len == 0 => reply.written(0),
            Some(range) => {
                let mut buffer = self.inbox.buffer(range.len);
                buffer.bytes_mut().copy_from_slice(&data[..range.len as usize]);
                self.push(Op::Write { fua }, range, Some(buffer), Answer::Write(reply));
            }
        }
    }

    /// Makes a range zeros, with `unmap` by giving its space back. What lies past the end is zeros to begin with.
    pub(super) fn clear(&self, offset: u64, len: u64, unmap: bool, reply: ReplyEmpty) {
        match self.inside(offset, len) {
            None => Answer::Other(reply).fail(Errno::STALE),
            Some(range) if range.len == 0 => reply.ok(),
            Some(range) => {
                self.push(Op::WriteZeroes { unmap, fua: false }, range, None, Answer::Other(reply));
            }
        }
    }

    /// Brings what was written to stable storage.
    pub(super) fn flush(&self, reply: ReplyEmpty) {
        if self.writes {
            self.push(Op::Flush, GuestRange::new(GuestOffset::ZERO, 0), None, Answer::Other(reply));
        } else {
            reply.ok();
        }
    }

    /// Not a thing of the I/O thread: while the disk is drained this waits, and who drains waits for that thread.
    pub(super) fn seek(&self, offset: i64, whence: i32, reply: ReplyLseek) {
        let disk = self.disk.read();
        let found = disk.as_ref().ok_or(Errno::STALE).and_then(|disk| sparse::seek(disk, offset, whence));
        match found {
            // Disks are far smaller than 2^63 bytes.
            Ok(at) => reply.offset(at as i64),
            Err(errno) => reply.error(fuser::Errno::from_i32(errno.raw_os_error())),
        }
    }

    /// The part of a range that is on the disk; `None` once the file is closed.
    fn inside(&self, offset: u64, len: u64) -> Option<GuestRange> {
        let size = self.disk.read().as_ref()?.size();
        Some(GuestRange::new(GuestOffset::new(offset.min(size)), len.min(size.saturating_sub(offset))))
    }

    fn push(&self, op: Op, range: GuestRange, buffer: Option<Buffer>, answer: Answer) {
        let mut state = self.inbox.state.lock();
        if state.is_closed {
            drop(state);
            return answer.fail(Errno::STALE);
        }
        state.jobs.push(Job { op, range, buffer, answer });
        if std::mem::take(&mut state.is_asleep) {
            drop(state);
            self.inbox.wake();
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.begin_close();
    }
}

impl Inbox {
    fn wake(&self) {
        // A full counter wakes the thread, too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn buffer(&self, len: u64) -> Buffer {
        let len = len as usize;
        let spare = self.spare.lock().take(len);
        spare.unwrap_or_else(|| Buffer::new(len))
    }

    /// Moves all jobs to the end of `into`; whether no more will come.
    fn take(&self, into: &mut VecDeque<Job>) -> bool {
        let mut state = self.state.lock();
        into.extend(state.jobs.drain(..));
        state.is_closed
    }

    /// Whether the thread may sleep: the next job wakes it.
    fn rest(&self) -> bool {
        let mut state = self.state.lock();
        state.is_asleep = state.jobs.is_empty() && !state.is_closed;
        state.is_asleep
    }

    fn woken(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.state.lock().is_asleep = false;
    }

    /// The thread has ended: what still waits is refused.
    fn end(&self) {
        let mut state = self.state.lock();
        (state.is_closed, state.has_ended) = (true, true);
        let left = std::mem::take(&mut state.jobs);
        drop(state);
        left.into_iter().for_each(|job| job.answer.fail(Errno::STALE));
        self.ended.notify_all();
    }
}

/// The I/O thread. Lets go of the disk when it returns.
fn serve(disk: Arc<Disk>, writer: Option<AttachedWriter>, inbox: &Inbox) {
    let mut engine: Engine<Answer> = match Engine::new(disk, DEPTH) {
        Ok(engine) => engine,
        Err(error) => return tracing::error!(%error, "a file of a mount cannot be read"),
    };
    let (mut jobs, mut done, mut reported) = (VecDeque::new(), Vec::new(), 0);
    loop {
        let is_closed = inbox.take(&mut jobs);
        while engine.has_room()
            && let Some(Job { op, range, buffer, answer }) = jobs.pop_front()
        {
            engine.push(op, Piece { task: answer, range, buffer });
        }
        engine.submit();
        engine.reap(&mut done);
        let is_idle = done.is_empty();
        for (piece, result) in done.drain(..) {
            if let Err(error) = &result
                && reported < REPORTED_MAX
            {
                reported += 1;
                report(engine.disk(), piece.range, error, reported);
            }
            answer(piece, result, inbox);
        }
        if is_closed && jobs.is_empty() && engine.in_flight() == 0 {
            break;
        }
        // A closed file wakes for the ends of its requests alone.
        if is_idle && (is_closed || inbox.rest()) {
            engine.wait(&[inbox.wake.as_fd()], None);
            inbox.woken();
        }
    }
    drop(engine);
    // Until nothing is under way any more.
    drop(writer);
}

fn answer(piece: Piece<Answer>, result: Result<(), Error>, inbox: &Inbox) {
    let Piece { task, range, buffer } = piece;
    match (result, task, &buffer) {
        (Err(error), task, _) => task.fail(Errno::from_raw_os_error(error.errno())),
        (Ok(()), Answer::Read(reply), Some(buffer)) => reply.data(buffer.bytes()),
        // No request of the kernel is that long.
        (Ok(()), Answer::Write(reply), _) => reply.written(range.len as u32),
        (Ok(()), Answer::Other(reply), _) => reply.ok(),
        (Ok(()), Answer::Read(reply), None) => reply.data(&[]),
    }
    if let Some(buffer) = buffer {
        inbox.spare.lock().give(buffer);
    }
}

fn report(disk: &Disk, range: GuestRange, error: &Error, number: u32) {
    let more = if number == REPORTED_MAX { "; later failures of this file are not logged" } else { "" };
    tracing::error!(disk = %disk.path().display(), %range, %error, "a request through a mounted file failed{more}");
}
