//! One queue without the server around it: what a fuzzer drives in place of a guest and its frontend.
//!
//! The ring, the requests and the engine are the real ones; threads, sockets and notifications are left out.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use vmstrata_disk::{Disk, IoQueue};
use vmstrata_store::EventNotifier;

use super::config::{Device, DeviceParts};
use super::dirty::DirtyLog;
use super::inflight::{InflightQueue, InflightRegion};
use super::memory::{GuestMemory, RegionInfo};
use super::queue::{Queue, QueueParts};
use super::ring::{Logging, Ring, RingLayout};
use super::shared_file::SharedFile;
use super::stats::Counters;

/// Bytes of guest memory, in two regions that touch.
pub const MEMORY_LEN: u64 = 64 << 10;
/// Where the second region starts.
const SPLIT: u64 = 40 << 10;
/// Longest time without any completion.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a frontend says about a queue.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Entries of the ring, a power of two.
    pub size: u16,
    /// First entry of the available ring to take.
    pub start: u16,
    /// Offsets of the descriptor table, the available and the used ring in guest memory.
    pub ring: [u16; 3],
    /// Whether notifications are suppressed by index.
    pub event_idx: bool,
    /// Whether indirect descriptors were negotiated.
    pub indirect: bool,
    /// Whether the disk takes no writes.
    pub read_only: bool,
    /// Whether the driver cannot flush.
    pub write_through: bool,
    /// What the frontend kept of an earlier life, zeros after it.
    pub inflight: Option<Vec<u8>>,
    /// Whether writes to memory are noted.
    pub log: bool,
}

/// A queue whose driver may do anything.
pub struct HostileQueue {
    io: IoQueue,
    queue: Queue,
    counters: Counters,
}

impl std::fmt::Debug for HostileQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostileQueue").field("in_flight", &self.io.in_flight()).finish_non_exhaustive()
    }
}

impl HostileQueue {
    /// A queue on `disk` over `memory`, a memfd of [`MEMORY_LEN`] bytes; `None` when the setup is refused.
    ///
    /// # Panics
    /// When the system is out of memory or descriptors, or the size is not a power of two.
    pub fn new(disk: Arc<Disk>, setup: &Setup, memory: &File) -> Option<Self> {
        let memory = Arc::new(guest_memory(memory));
        let inflight = match &setup.inflight {
            Some(bytes) => Some(inflight(bytes, setup.size)?),
            None => None,
        };
        let [descriptors, available, used] = setup.ring.map(u64::from);
        let (size, event_idx, indirect) = (setup.size, setup.event_idx, setup.indirect);
        let layout = RingLayout { size, descriptors, available, used, event_idx, indirect };
        let mut ring = Ring::new(layout, memory, inflight, setup.start).ok()?;
        if setup.log {
            ring.log_to(Logging::new(dirty_log(), Some(used)));
        }
        let device = Device::new(&DeviceParts {
            disk_bytes: disk.size(),
            cluster_bits: disk.cluster_bits(),
            read_only: setup.read_only,
            queues: 1,
            serial: "fuzz",
        });
        let features = if setup.write_through { 0 } else { 1 << VIRTIO_BLK_F_FLUSH };
        let call = Arc::new(EventNotifier::new().expect("a ring of the kernel"));
        let parts = QueueParts { index: 0, ring, ring_size: size, kick: None, call, err: None, features };
        let io = IoQueue::new(disk, 64).expect("a ring of the kernel");
        Some(Self { io, queue: Queue::new(parts, Arc::new(device), 0), counters: Counters::default() })
    }

    /// Takes requests from the ring and starts them; how many.
    pub fn take(&mut self) -> u32 {
        let taken = self.queue.take(&mut self.io, &self.counters);
        self.io.submit();
        taken
    }

    /// Waits for all requests that were started, answers them, and goes through the motions of sleeping.
    ///
    /// # Panics
    /// When a request is lost.
    pub fn finish(&mut self) {
        let mut done = Vec::new();
        while self.io.in_flight() > 0 {
            if self.io.reap(&mut done) == 0 {
                self.io.wait(&[], Some(PATIENCE));
                let late = self.io.reap(&mut done);
                assert!(
                    late > 0 || self.io.in_flight() == 0 || self.waited_again(&mut done),
                    "requests are lost"
                );
            }
            self.io.submit();
            done.drain(..).for_each(|completion| self.queue.complete(&completion, &self.counters));
        }
        self.queue.publish(&self.counters);
        self.queue.prepare_sleep();
        self.queue.woke();
    }

    /// Waking for nothing is allowed, though not for ever.
    fn waited_again(&mut self, done: &mut Vec<vmstrata_disk::Completion>) -> bool {
        (0..1000).any(|_| {
            self.io.submit();
            self.io.wait(&[], Some(PATIENCE / 1000));
            self.io.reap(done) > 0
        })
    }
}

fn guest_memory(file: &File) -> GuestMemory {
    let region = |start: u64, len| RegionInfo { guest: start, len, user: start, file_offset: start };
    let twin = || SharedFile::trusted(file.try_clone().expect("a descriptor"));
    let first = GuestMemory::default().with_region(region(0, SPLIT), twin()).expect("a region");
    first.with_region(region(SPLIT, MEMORY_LEN - SPLIT), twin()).expect("another")
}

fn inflight(bytes: &[u8], size: u16) -> Option<InflightQueue> {
    let file = InflightRegion::create_file(1, size).expect("memory");
    let len = InflightRegion::size(1, size);
    let bytes = &bytes[..bytes.len().min(len as usize)];
    file.write_all_at(bytes, 0).expect("memory");
    let region = InflightRegion::attach(file, (0, len), 1, size, size).expect("our own file");
    InflightQueue::new(Arc::new(region), 0, size).ok()
}

/// A log of one byte: most pages lie past its end.
fn dirty_log() -> Arc<DirtyLog> {
    let file = memfd_create("fuzz-log", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, 1).expect("memory");
    Arc::new(DirtyLog::attach(file.into(), 0, 1).expect("our own file"))
}
