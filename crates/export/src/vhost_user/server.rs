//! One disk on one socket: the control thread, and the life of a connection.

mod stop;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};
use vmstrata_disk::Disk;

use super::Error;
use super::back_channel::BackChannel;
use super::backend::Backend;
use super::config::{Device, DeviceParts};
use super::listener::SocketFile;
use super::stats::Stats;
use super::worker::{Worker, WorkerOptions};
use stop::Stop;

/// Most queues of a device.
const QUEUES_MAX: u16 = 256;
/// Largest ring (virtio 1.2 allows 32768; no driver asks for more than 1024).
const QUEUE_SIZE_MAX: u16 = 4096;
/// Queues of one I/O thread: it waits for their kicks in one call, which takes so many descriptors.
const QUEUES_PER_THREAD_MAX: usize = 61;
/// Requests one I/O thread is prepared for; more wait a little, and cost memory.
const DEPTH_MAX: usize = 256;

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
        }
    }
}

impl Options {
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

/// A disk being served. Dropping it is [`Server::shutdown`].
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    device: Arc<Device>,
    back: Arc<BackChannel>,
    stop: Arc<Stop>,
    workers: Option<Arc<[Worker]>>,
    control: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `disk` on a socket at `path`, which only its owner may use, from now on.
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
        let socket = SocketFile::bind(path)?;
        let workers = spawn_workers(&disk, &device, &options)?;
        let stop = Arc::new(Stop::new().map_err(Error::Thread)?);
        let back = Arc::<BackChannel>::default();
        let control = Control {
            socket,
            device: Arc::clone(&device),
            back: Arc::clone(&back),
            workers: Arc::clone(&workers),
            queue_size_max: options.queue_size_max,
            stop: Arc::clone(&stop),
        };
        let thread = std::thread::Builder::new().name("vhost-control".into()).spawn(move || control.run());
        let control = Some(thread.map_err(Error::Thread)?);
        Ok(Self { path: path.to_owned(), device, back, stop, workers: Some(workers), control })
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The disk has another size: requests may use it, and the guest is told. Returns whether there was one to tell.
    pub fn set_size(&self, disk_bytes: u64) -> bool {
        self.device.set_size(disk_bytes);
        self.back.config_changed()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.workers.iter().flat_map(|workers| workers.iter()).for_each(|worker| worker.add_stats(&mut sum));
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

    /// Finishes what is in flight, closes the connection and removes the socket. The disk stays open.
    pub fn shutdown(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.request();
        if let Some(control) = self.control.take()
            && control.join().is_err()
        {
            tracing::error!(path = %self.path.display(), "the control thread panicked");
        }
        self.workers = None;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
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
    socket: SocketFile,
    device: Arc<Device>,
    back: Arc<BackChannel>,
    workers: Arc<[Worker]>,
    queue_size_max: u16,
    stop: Arc<Stop>,
}

impl Control {
    fn run(self) {
        while !self.stop.is_requested() {
            wait_readable([self.stop.as_fd(), self.socket.as_fd()]);
            let Some(stream) = self.socket.accept() else { continue };
            if self.stop.is_requested() {
                return;
            }
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
        }
    }

    fn serve(&self, stream: UnixStream, twin: UnixStream) {
        let path = self.socket.path().display();
        tracing::info!(%path, "frontend connected");
        let backend = Backend::new(Arc::clone(&self.device), Arc::clone(&self.workers), self.queue_size_max);
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
}
