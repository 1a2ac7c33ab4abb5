//! One disk on one socket: the control thread, and the life of a connection.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};
use vmstrata_disk::{AttachedWriter, Disk, HasWriter};

use super::back_channel::BackChannel;
use super::backend::Backend;
use super::config::{Device, DeviceParts};
use super::listener::SocketFile;
use super::stats::{Counters, Stats};
use super::worker::{Worker, WorkerOptions};
use super::{Error, notify};
use crate::unix_socket::SocketAccess;

/// Requests one I/O thread is prepared for; more wait a little, and cost memory.
const DEPTH_MAX: usize = 256;

/// A disk being served. Dropping it is [`Server::shutdown`].
#[derive(Debug)]
pub struct Server {
    socket: Arc<SocketFile>,
    device: Arc<Device>,
    back: Arc<BackChannel>,
    stop: Arc<Stop>,
    stop_limit: Duration,
    counters: Vec<Arc<Counters>>,
}

impl Server {
    /// Serves `disk` on a socket at `path`, for whom the options let in, from now on.
    ///
    /// # Errors
    /// When an option is out of range, another process listens at `path`, or the system refuses.
    pub fn bind(path: &Path, disk: Arc<Disk>, options: Options) -> Result<Self, Error> {
        options.check()?;
        let device = Arc::new(Device::new(&DeviceParts {
            disk_bytes: disk.size(),
            cluster_bits: disk.cluster_bits(),
            read_only: options.read_only || disk.is_read_only(),
            queues: options.queues,
            serial: &options.serial,
        }));
        let socket = Arc::new(SocketFile::bind(path, &options.access)?);
        let workers = spawn_workers(&disk, &device, &options)?;
        let stop = Arc::new(Stop::new().map_err(Error::Thread)?);
        let back = Arc::<BackChannel>::default();
        let counters = workers.iter().map(Worker::counters).collect();
        let control = Control {
            socket: Arc::clone(&socket),
            writes: (!(options.read_only || disk.is_read_only())).then(|| Arc::clone(&disk)),
            share: options.share,
            device: Arc::clone(&device),
            back: Arc::clone(&back),
            workers,
            queue_size_max: options.queue_size_max,
            any_memory: options.any_memory,
            stop: Arc::clone(&stop),
        };
        let ended = WhenEnded::new(&stop);
        let run = move || {
            // Dropped after the other, with which the I/O threads end.
            let (_ended, control) = (ended, control);
            control.run();
        };
        std::thread::Builder::new().name("vhost-control".into()).spawn(run).map_err(Error::Thread)?;
        Ok(Self { socket, device, back, stop, stop_limit: options.stop_limit, counters })
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Gives the disk another size, and tells the guest. Returns whether there was one.
    pub fn set_size(&self, disk_bytes: u64) -> bool {
        self.device.set_size(disk_bytes);
        self.back.config_changed()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.counters.iter().for_each(|counters| counters.add_to(&mut sum));
        sum
    }

    /// Whether a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.stop.is_connected()
    }

    /// Whether the frontend that is connected has sent a message. One that was accepted alone may not know it yet, and do something else first.
    pub fn has_spoken(&self) -> bool {
        self.stop.has_spoken.load(Ordering::Acquire)
    }

    /// Refuses new frontends, unless one is connected: then it returns `false`, and nothing changes.
    ///
    /// The socket stays where it is until [`Server::shutdown`].
    pub fn close_if_idle(&self) -> bool {
        self.stop.request_if_idle()
    }

    /// Begins to stop, and returns at once: of many servers, none then waits for another.
    pub fn begin_shutdown(&self) {
        self.stop.request();
    }

    /// Finishes what is in flight, closes the connection and removes the socket. The disk stays open.
    ///
    /// Returns whether that was done within the limit, which counts from [`Server::begin_shutdown`]. Else the socket is gone,
    /// and what hangs (storage that does not answer, a descriptor of the frontend's that cannot be closed) keeps its threads,
    /// and the disk, until it answers or the process ends.
    pub fn shutdown(self) -> bool {
        self.end()
    }

    fn end(&self) -> bool {
        self.stop.request();
        let is_over = self.stop.wait_ended(self.stop_limit);
        self.socket.close();
        is_over
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.end() {
            let (path, limit) = (self.path().display(), self.stop_limit);
            tracing::error!(%path, "not stopped within {limit:?}: storage, or a descriptor of the frontend's, does not answer");
        }
    }
}

fn spawn_workers(disk: &Arc<Disk>, device: &Arc<Device>, options: &Options) -> Result<Arc<[Worker]>, Error> {
    let slots = usize::from(options.queues).div_ceil(options.io_threads);
    let depth = (slots * usize::from(options.queue_size_max)).min(DEPTH_MAX) as u32;
    let poll = Duration::from_micros(options.poll_us.into());
    let spawn = |number| {
        let options = WorkerOptions { name: format!("vhost-io-{number}"), slots, depth, poll };
        Worker::spawn(Arc::clone(disk), Arc::clone(device), &options)
    };
    (0..options.io_threads).map(spawn).collect()
}

/// The control thread: accepts a frontend and does what it says, one at a time.
struct Control {
    socket: Arc<SocketFile>,
    /// The disk, if frontends may write it.
    writes: Option<Arc<Disk>>,
    share: bool,
    device: Arc<Device>,
    back: Arc<BackChannel>,
    workers: Arc<[Worker]>,
    queue_size_max: u16,
    any_memory: bool,
    stop: Arc<Stop>,
}

impl Control {
    fn run(&self) {
        // A frontend that reconnects every second must not fill the log.
        let mut told = None;
        while !self.stop.is_requested() {
            wait_readable([self.stop.as_fd(), self.socket.as_fd()]);
            let Some(stream) = self.socket.accept() else { continue };
            if self.stop.is_requested() {
                return;
            }
            let writer = match self.attach_writer() {
                Ok(writer) => writer,
                Err(HasWriter { by }) => {
                    if told.as_ref() != Some(&by) {
                        tracing::warn!(path = %self.socket.path().display(), "frontend refused: the disk is attached for writing by {by}");
                    }
                    told = Some(by);
                    continue;
                }
            };
            told = None;
            let twins = || {
                stream.set_nonblocking(false)?;
                Ok::<_, std::io::Error>((stream.try_clone()?, stream.try_clone()?))
            };
            match twins() {
                Ok((twin, known)) => {
                    if self.stop.enter(known) {
                        self.serve(stream, twin);
                    }
                }
                Err(error) => tracing::warn!(%error, "cannot set up a connection"),
            }
            // Nothing is in flight any more.
            drop(writer);
        }
    }

    /// The place of a frontend among the disk's writers, if it may write.
    fn attach_writer(&self) -> Result<Option<AttachedWriter>, HasWriter> {
        let name = || format!("the guest at {}", self.socket.path().display());
        self.writes.as_ref().map(|disk| disk.attach_writer(&name(), self.share)).transpose()
    }

    fn serve(&self, stream: UnixStream, twin: UnixStream) {
        let path = self.socket.path().display();
        tracing::info!(%path, "frontend connected");
        let (device, workers) = (Arc::clone(&self.device), Arc::clone(&self.workers));
        let backend = Backend::new(device, workers, self.queue_size_max, self.any_memory);
        let mut handler = BackendReqHandler::from_stream(stream, Arc::new(std::sync::Mutex::new(backend)));
        // A stop that was requested before the connection could be seen by it ends here.
        while !self.stop.is_requested() {
            let [stopped, message, knock] =
                wait_readable([self.stop.as_fd(), twin.as_fd(), self.socket.as_fd()]);
            if stopped {
                break;
            }
            if message {
                self.back.look_at(&twin);
                if let Err(error) = handler.handle_request() {
                    log_end(&path, &error);
                    break;
                }
                self.stop.has_spoken.store(true, Ordering::Release);
            } else if knock {
                self.refuse_second(&twin);
            }
        }
        self.stop.leave();
        self.back.forget();
        // Dropping the backend stops the queues and finishes what they have in flight.
        drop(handler);
        let then = if self.stop.is_requested() { "the export is closed" } else { "listening again" };
        tracing::info!(%path, "frontend gone; {then}");
    }

    /// Turns a second frontend away, unless the first has just gone and this is its successor.
    fn refuse_second(&self, first: &UnixStream) {
        if is_readable(first) {
            return;
        }
        if self.socket.accept().is_some() {
            tracing::warn!(path = %self.socket.path().display(), "second frontend refused: one is connected");
        }
    }
}

fn log_end(path: &dyn std::fmt::Display, error: &MessageError) {
    match error {
        MessageError::Disconnected | MessageError::PartialMessage => {
            tracing::debug!(%path, "frontend closed the connection");
        }
        error => tracing::warn!(%path, %error, "connection closed: the frontend's message was refused"),
    }
}

/// Waits until one of `fds` is readable or broken; which are.
fn wait_readable<const N: usize>(fds: [BorrowedFd<'_>; N]) -> [bool; N] {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    // An interrupted wait reports nothing, and the caller waits again.
    let _ = poll(&mut polled, None);
    polled.map(|fd| !fd.revents().is_empty())
}

fn is_readable(fd: impl AsFd) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok() && !polled[0].revents().is_empty()
}

/// Most queues of a device.
const QUEUES_MAX: u16 = 256;
/// Largest ring (virtio 1.2 allows 32768; no driver asks for more than 1024).
const QUEUE_SIZE_MAX: u16 = 4096;
/// Queues of one I/O thread: it waits for their kicks in one call, which takes so many descriptors.
const QUEUES_PER_THREAD_MAX: usize = 61;
/// Long enough for storage that hesitates, and shorter than what service managers allow for the end of a server.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// How a disk is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Queues offered, 1 to 256. A frontend that wants more refuses to start (QEMU wants one for each
    /// virtual processor unless told otherwise), and one not used costs nothing: hence 16 or the number of
    /// processors, whichever is more.
    pub queues: u16,
    /// Largest ring accepted: a power of two up to 4096. 1024 unless set.
    pub queue_size_max: u16,
    /// Threads that do I/O; the queues are spread over them. At least one for every 61 queues. The number of
    /// processors unless set, at most 4.
    pub io_threads: usize,
    /// What the guest reads as the disk's serial number; the first 20 bytes count.
    pub serial: String,
    /// Microseconds a thread looks for more work before it sleeps, at most; 0 makes it sleep at once.
    pub poll_us: u32,
    /// Refuses writes even if the disk would take them.
    pub read_only: bool,
    /// Other exports that say so, too, may write the disk at the same time.
    pub share: bool,
    /// Takes memory from files on any file system, not only memfds and files on tmpfs or hugetlbfs. One that does not answer
    /// then holds up threads that serve this disk and others.
    pub any_memory: bool,
    /// Who may connect: the socket's owner alone unless set.
    pub access: SocketAccess,
    /// Longest time for what is in flight when the server stops, 30 s unless set. Past it, the server lets its threads be.
    pub stop_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            queues: processors.clamp(16, usize::from(QUEUES_MAX)) as u16,
            queue_size_max: 1024,
            io_threads: processors.min(4),
            serial: String::new(),
            poll_us: 40,
            read_only: false,
            share: false,
            any_memory: false,
            access: SocketAccess::default(),
            stop_limit: STOP_LIMIT,
        }
    }
}

impl Options {
    /// Whether all are in range.
    ///
    /// # Errors
    /// [`Error::Option`], for the first that is not.
    fn check(&self) -> Result<(), Error> {
        let threads_min = usize::from(self.queues).div_ceil(QUEUES_PER_THREAD_MAX);
        let size = self.queue_size_max;
        let checks = [
            ("queues", (1..=QUEUES_MAX).contains(&self.queues), "1 to 256", u64::from(self.queues)),
            (
                "queue_size_max",
                size.is_power_of_two() && size <= QUEUE_SIZE_MAX,
                "a power of two up to 4096",
                u64::from(size),
            ),
            (
                "io_threads",
                (threads_min..=usize::from(self.queues)).contains(&self.io_threads),
                "at least one for every 61 queues, at most one a queue",
                self.io_threads as u64,
            ),
            ("poll_us", self.poll_us <= 10_000, "at most 10000", u64::from(self.poll_us)),
        ];
        match checks.into_iter().find(|(_, holds, ..)| !holds) {
            Some((name, _, allowed, value)) => Err(Error::Option { name, allowed, value }),
            None => Ok(()),
        }
    }
}

/// How the server ends, also in the middle of a message, and who is connected until then: one lock for both, so that no frontend
/// comes in beside a decision.
#[derive(Debug)]
struct Stop {
    requested: AtomicBool,
    event: OwnedFd,
    connection: Mutex<Option<UnixStream>>,
    has_spoken: AtomicBool,
    end: Mutex<End>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct End {
    requested_at: Option<Instant>,
    is_over: bool,
}

/// Says that the server has ended, when it is dropped.
struct WhenEnded(Arc<Stop>);

impl WhenEnded {
    fn new(stop: &Arc<Stop>) -> Self {
        Self(Arc::clone(stop))
    }
}

impl Drop for WhenEnded {
    fn drop(&mut self) {
        self.0.end.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl Stop {
    /// A stop that is not requested.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    fn new() -> io::Result<Self> {
        let event = notify::event()?;
        Ok(Self {
            requested: AtomicBool::new(false),
            event,
            connection: Mutex::default(),
            has_spoken: AtomicBool::new(false),
            end: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Ends the connection, and refuses new ones.
    fn request(&self) {
        self.note_request();
        if let Some(connection) = &*self.connection.lock() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Refuses new connections, unless a frontend is connected: then nothing happens.
    fn request_if_idle(&self) -> bool {
        let connection = self.connection.lock();
        if connection.is_some() {
            return false;
        }
        self.note_request();
        true
    }

    fn note_request(&self) {
        self.requested.store(true, Ordering::Release);
        self.end.lock().requested_at.get_or_insert_with(Instant::now);
        notify::signal(&self.event);
    }

    /// Waits until the server has ended, but no longer than `limit` after that was requested first; whether it has.
    fn wait_ended(&self, limit: Duration) -> bool {
        let mut end = self.end.lock();
        let deadline = end.requested_at.unwrap_or_else(Instant::now) + limit;
        self.changed.wait_while_until(&mut end, |end| !end.is_over, deadline);
        end.is_over
    }

    /// Makes a connection known; `false` when the server is ending.
    fn enter(&self, stream: UnixStream) -> bool {
        let mut connection = self.connection.lock();
        if self.is_requested() {
            return false;
        }
        *connection = Some(stream);
        true
    }

    /// The connection is over.
    fn leave(&self) {
        self.has_spoken.store(false, Ordering::Release);
        *self.connection.lock() = None;
    }

    /// Whether a frontend is connected.
    fn is_connected(&self) -> bool {
        self.connection.lock().is_some()
    }

    fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_allowed() {
        Options::default().check().unwrap();
    }

    #[test]
    fn options_out_of_range_are_named() {
        let base = Options { queues: 2, io_threads: 1, ..Options::default() };
        base.check().unwrap();
        let named = |options: Options| match options.check() {
            Err(Error::Option { name, .. }) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(named(Options { queues: 0, ..base.clone() }), "queues");
        assert_eq!(named(Options { queue_size_max: 100, ..base.clone() }), "queue_size_max");
        assert_eq!(named(Options { queue_size_max: 8192, ..base.clone() }), "queue_size_max");
        assert_eq!(named(Options { io_threads: 0, ..base.clone() }), "io_threads");
        assert_eq!(named(Options { io_threads: 3, ..base.clone() }), "io_threads");
        assert_eq!(named(Options { queues: 62, io_threads: 1, ..base.clone() }), "io_threads");
        assert_eq!(named(Options { poll_us: 10_001, ..base }), "poll_us");
    }

    #[test]
    fn a_server_that_closes_because_it_is_idle_lets_nobody_in_and_a_connected_one_does_not_close() {
        let (one, other) = UnixStream::pair().unwrap();
        let stop = Stop::new().unwrap();
        assert!(stop.enter(one));
        assert!(!stop.request_if_idle() && !stop.is_requested());
        stop.leave();
        assert!(stop.request_if_idle() && stop.is_requested());
        assert!(!stop.enter(other));
    }
}
