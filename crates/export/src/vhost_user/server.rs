//! One disk on one socket: the control thread, and the life of a connection.

mod options;
mod stop;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};
use vmstrata_disk::{AttachedWriter, Disk, HasWriter};

use super::Error;
use super::back_channel::BackChannel;
use super::backend::Backend;
use super::config::{Device, DeviceParts};
use super::listener::SocketFile;
use super::stats::{Counters, Stats};
use super::worker::{Worker, WorkerOptions};
pub use options::Options;
use stop::{Stop, WhenEnded};

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
    /// When an option is out of range, somebody else listens at `path`, or the system refuses.
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

    /// The disk has another size: requests may use it, and the guest is told. Returns whether there was one to tell.
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

    /// Lets no frontend in any more, unless one is connected: then it returns `false`, and nothing changes.
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
        let mut handler = BackendReqHandler::from_stream(stream, Arc::new(Mutex::new(backend)));
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
            } else if knock {
                self.refuse_second(&twin);
            }
        }
        self.stop.leave();
        self.back.forget();
        // Dropping the backend stops the queues and finishes what they have in flight.
        drop(handler);
        tracing::info!(%path, "frontend gone; listening again");
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
fn wait_readable<const N: usize>(fds: [std::os::fd::BorrowedFd<'_>; N]) -> [bool; N] {
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
