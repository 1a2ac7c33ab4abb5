//! The export through libblkio's driver, as a guest would use it, against a flat array.

use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::vhost_common::{Served, options};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const SECTOR: u64 = 512;
/// Requests a queue has in flight at once.
const DEPTH: usize = 8;
/// Largest request.
const LEN_MAX: usize = 64 << 10;

/// A connection, with memory for requests that is read and written as a file.
struct Client {
    queues: Vec<Blkioq>,
    region: MemoryRegion,
    buffers: File,
    blkio: Blkio,
}

fn connect(socket: &Path, queues: i32, polled: bool, read_only: bool) -> Client {
    let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
    blkio.set_str("path", socket.to_str().unwrap()).unwrap();
    blkio.set_bool("read-only", read_only).unwrap();
    blkio.connect().unwrap();
    blkio.set_i32("num-queues", if polled { 0 } else { queues }).unwrap();
    blkio.set_i32("num-poll-queues", if polled { queues } else { 0 }).unwrap();
    let started = blkio.start().unwrap();
    let region = blkio.alloc_mem_region(queues as usize * DEPTH * LEN_MAX).unwrap();
    blkio.map_mem_region(&region).unwrap();
    let path = format!("/proc/self/fd/{}", region.fd);
    let buffers = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let queues = if polled { started.poll_queues } else { started.queues };
    Client { queues, region, buffers, blkio }
}

/// Waits for `count` completions; panics when they do not come.
fn finish(queue: &mut Blkioq, count: usize) -> Vec<(usize, i32)> {
    let mut completions = [const { MaybeUninit::<Completion>::uninit() }; DEPTH];
    let mut timeout = Duration::from_secs(20);
    let done = queue.do_io(&mut completions[..count], count, Some(&mut timeout), None).unwrap();
    assert_eq!(done, count);
    // SAFETY: `do_io` returned how many it wrote, and it wrote all.
    completions[..count]
        .iter()
        .map(|slot| unsafe { slot.assume_init_ref() })
        .map(|c| (c.user_data, c.ret))
        .collect()
}

enum Expect {
    Read(usize, usize),
    /// What a discarded range reads as is not promised: it is zeroed after the batch.
    Discarded(usize, usize),
    Other,
}

/// Random requests of one queue, within its own part of the disk, against `model`.
struct Lane<'a> {
    queue: Blkioq,
    client: &'a ClientMemory,
    rng: SmallRng,
    start: u64,
    model: Vec<u8>,
}

struct ClientMemory {
    address: usize,
    buffers: File,
}

impl Lane<'_> {
    /// One batch: a request in each of `DEPTH` disjoint slices of the lane.
    fn batch(&mut self, buffer_base: usize) {
        let slice = self.model.len() / DEPTH;
        let mut expected = Vec::new();
        for slot in 0..DEPTH {
            let sectors = slice as u64 / SECTOR;
            let at = slot * slice + (self.rng.random_range(0..sectors) * SECTOR) as usize;
            let room = ((slot + 1) * slice - at).min(LEN_MAX) as u64 / SECTOR;
            let len = (self.rng.random_range(1..=room) * SECTOR) as usize;
            expected.push(self.request(slot, buffer_base + slot * LEN_MAX, at, len));
        }
        for (slot, ret) in finish(&mut self.queue, DEPTH) {
            assert_eq!(ret, 0);
            if let Expect::Read(at, len) = expected[slot] {
                let mut found = vec![0; len];
                self.client.buffers.read_exact_at(&mut found, (buffer_base + slot * LEN_MAX) as u64).unwrap();
                assert!(found == self.model[at..at + len], "read of {len:#x} bytes at {at:#x}");
            }
        }
        for expect in expected {
            if let Expect::Discarded(at, len) = expect {
                self.queue.write_zeroes(self.start + at as u64, len as u64, 0, ReqFlags::empty());
                assert_eq!(finish(&mut self.queue, 1), [(0, 0)]);
            }
        }
    }

    fn request(&mut self, slot: usize, buffer: usize, at: usize, len: usize) -> Expect {
        let address = (self.client.address + buffer) as *mut u8;
        let disk_at = self.start + at as u64;
        let none = ReqFlags::empty();
        match self.rng.random_range(0..10) {
            0..4 => {
                self.queue.read(disk_at, address, len, slot, none);
                return Expect::Read(at, len);
            }
            4..7 => {
                self.rng.fill(&mut self.model[at..at + len]);
                self.client.buffers.write_all_at(&self.model[at..at + len], buffer as u64).unwrap();
                self.queue.write(disk_at, address, len, slot, none);
            }
            7 => {
                self.model[at..at + len].fill(0);
                let flags = if self.rng.random() { none } else { ReqFlags::NO_UNMAP };
                self.queue.write_zeroes(disk_at, len as u64, slot, flags);
            }
            8 => {
                self.queue.discard(disk_at, len as u64, slot, none);
                self.model[at..at + len].fill(0);
                return Expect::Discarded(at, len);
            }
            _ => self.queue.flush(slot, none),
        }
        Expect::Other
    }
}

fn against_a_flat_array(queues: usize, io_threads: usize, polled: bool, poll_us: u32) {
    const LANE: usize = 2 << 20;
    let size = (queues * LANE) as u64;
    let served = Served::qcow2(
        size,
        vmstrata_export::vhost_user::Options { poll_us, ..options(queues as u16, io_threads) },
    );
    let Client { queues: lanes, region, buffers, blkio } =
        connect(&served.socket(), queues as i32, polled, false);
    assert_eq!(blkio.get_u64("capacity").unwrap(), size);
    let memory = ClientMemory { address: region.addr, buffers };
    std::thread::scope(|scope| {
        for (number, queue) in lanes.into_iter().enumerate() {
            let (rng, start) = (SmallRng::seed_from_u64(number as u64), (number * LANE) as u64);
            let mut lane = Lane { queue, client: &memory, rng, start, model: vec![0; LANE] };
            scope.spawn(move || (0..100).for_each(|_| lane.batch(number * DEPTH * LEN_MAX)));
        }
    });
    let stats = served.server().stats();
    assert!(stats.requests >= (queues * 100 * DEPTH) as u64, "{stats:?}");
    assert_eq!(stats.errors, 0);
}

#[test]
fn one_queue_that_waits() {
    against_a_flat_array(1, 1, false, 40);
}

#[test]
fn four_queues_on_two_threads_that_sleep_at_once() {
    against_a_flat_array(4, 2, false, 0);
}

#[test]
fn three_polled_queues_on_one_thread() {
    against_a_flat_array(3, 1, true, 40);
}

#[test]
fn a_read_only_disk_is_read_and_says_so() {
    let bytes: Vec<u8> = (0..10_000u32).flat_map(u32::to_le_bytes).collect();
    let served =
        Served::raw(&bytes, vmstrata_export::vhost_user::Options { read_only: true, ..options(1, 1) });
    let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
    blkio.set_str("path", served.socket().to_str().unwrap()).unwrap();
    blkio.connect().unwrap();
    assert!(blkio.start().is_err(), "a writable device was promised");
    drop(blkio);
    let mut client = connect(&served.socket(), 1, false, true);
    assert_eq!(client.blkio.get_u64("capacity").unwrap(), served.disk.size() / SECTOR * SECTOR);
    client.queues[0].read(4096, client.region.addr as *mut u8, 8192, 5, ReqFlags::empty());
    assert_eq!(finish(&mut client.queues[0], 1), [(5, 0)]);
    let mut found = vec![0; 8192];
    client.buffers.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, bytes[4096..4096 + 8192]);
    client.queues[0].flush(6, ReqFlags::empty());
    assert_eq!(finish(&mut client.queues[0], 1), [(6, 0)]);
}

#[test]
fn requests_past_the_end_fail_and_the_queue_goes_on() {
    let served = Served::qcow2(1 << 20, options(1, 1));
    let mut client = connect(&served.socket(), 1, false, false);
    let address = client.region.addr as *mut u8;
    client.queues[0].read((1 << 20) - 512, address, 1024, 1, ReqFlags::empty());
    assert_eq!(finish(&mut client.queues[0], 1), [(1, -5)]);
    client.queues[0].read((1 << 20) - 512, address, 512, 2, ReqFlags::empty());
    assert_eq!(finish(&mut client.queues[0], 1), [(2, 0)]);
    assert_eq!(served.server().stats().errors, 1);
}

#[test]
fn the_socket_serves_one_frontend_after_another() {
    let served = Served::qcow2(1 << 20, options(2, 2));
    for round in 0..5 {
        let mut client = connect(&served.socket(), 2, false, false);
        let address = client.region.addr as *mut u8;
        let mut found = [0xff];
        if round > 0 {
            client.queues[1].read(0, address, 512, 1, ReqFlags::empty());
            finish(&mut client.queues[1], 1);
            client.buffers.read_exact_at(&mut found, 7).unwrap();
            assert_eq!(found[0], round - 1);
        }
        client.buffers.write_all_at(&[round; 512], 0).unwrap();
        client.queues[0].write(0, address, 512, 1, ReqFlags::empty());
        finish(&mut client.queues[0], 1);
    }
}
