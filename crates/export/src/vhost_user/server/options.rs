//! How a disk is served over vhost-user, and what of that makes sense.

use std::time::Duration;

use super::super::Error;
use crate::unix_socket::SocketAccess;

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
    pub(super) fn check(&self) -> Result<(), Error> {
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
