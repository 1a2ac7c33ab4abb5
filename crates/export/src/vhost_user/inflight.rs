//! Which requests a ring has taken and not yet answered, in memory that outlives this process.
//!
//! The frontend keeps the memory file and hands it to the next server after this one was killed, which then
//! takes up exactly the requests that were not answered. The layout is the one of the vhost-user
//! specification, "Inflight I/O tracking", for split virtqueues:
//!
//! ```text
//!   region:  [queue 0][queue 1]...            each queue padded to a multiple of 64 bytes
//!   queue:   features u64 | version u16 | desc_num u16 | last_batch_head u16 | used_idx u16 | entry[desc_num]
//!   entry:   inflight u8 | padding [u8; 5] | next u16 | counter u64          indexed by head descriptor
//! ```
//!
//! A process may be killed between any two stores. The order of stores makes every such point recoverable:
//!
//! 1. *taking* a request sets its counter, then `inflight`, in the order of the available ring; so the
//!    requests marked are always a prefix of the ring, less what was answered;
//! 2. *answering* a batch links its heads into a list from `last_batch_head`, then publishes the used index,
//!    then clears `inflight` of the batch, then copies the used index to `used_idx`. A `used_idx` that
//!    differs from the ring's tells that the last batch was answered though still marked.
//!
//! The frontend asks for room for the queues that it offers, but a driver may make them larger: QEMU lets it, and the firmware
//! of QEMU 10 does. So each queue gets room for the largest ring there may be, and how much it has is told by the bytes of the
//! region, which the frontend keeps as they are, not by the size that it asked for.
//!
//! The frontend can write this memory at any time. What is read from it is bounded and never trusted to be
//! consistent; garbage here hurts only the guest that wrote it.

use std::fs::File;
use std::mem::{offset_of, size_of};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::guarded::{GuardedMapping, refuse_shrinking};
use super::shared_file::SharedFile;

/// The only version of the layout there is; zero marks a queue that was never used.
const VERSION: u16 = 1;
const QUEUE_ALIGNMENT: u64 = 64;

#[repr(C)]
struct QueueHeader {
    features: AtomicU64,
    version: AtomicU16,
    desc_num: AtomicU16,
    last_batch_head: AtomicU16,
    used_idx: AtomicU16,
}

#[repr(C)]
struct Entry {
    inflight: AtomicU8,
    padding: [AtomicU8; 5],
    next: AtomicU16,
    counter: AtomicU64,
}

const _: () = assert!(size_of::<QueueHeader>() == 16 && size_of::<Entry>() == 16);
const _: () = assert!(offset_of!(Entry, next) == 6 && offset_of!(Entry, counter) == 8);

/// Why an inflight region was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum InflightError {
    #[error(
        "an inflight region of {queues} queues of {queue_size} descriptors is outside what this server offers"
    )]
    Shape { queues: u16, queue_size: u16 },
    #[error("the inflight region holds {len:#x} bytes, {needed:#x} are needed")]
    TooSmall { len: u64, needed: u64 },
    #[error("the inflight region starts at {offset:#x} of its file, not on a page")]
    Offset { offset: u64 },
    #[error("cannot create or map the inflight region: {0}")]
    Map(std::io::Error),
    #[error("too much memory is shared with this process: no room for one more inflight region")]
    TooMany,
    #[error("queue {index} of {size} descriptors does not fit the inflight region")]
    QueueOutside { index: u16, size: u16 },
    #[error("the inflight region has layout version {version}, this server knows {VERSION}")]
    Version { version: u16 },
}

/// The inflight memory of all queues of one device.
#[derive(Debug)]
pub(super) struct InflightRegion {
    mapping: GuardedMapping,
    queues: u16,
    /// Bytes of each queue.
    stride: u64,
    /// Descriptors that each has room for.
    queue_size: u16,
}

impl InflightRegion {
    /// Bytes that `queues` queues of `queue_size` descriptors take.
    pub(super) fn size(queues: u16, queue_size: u16) -> u64 {
        Self::stride(queue_size) * u64::from(queues)
    }

    fn stride(queue_size: u16) -> u64 {
        (16 + 16 * u64::from(queue_size)).next_multiple_of(QUEUE_ALIGNMENT)
    }

    /// A new, zeroed file for a frontend to keep.
    ///
    /// # Errors
    /// When the system gives no memory file.
    pub(super) fn create_file(queues: u16, queue_size: u16) -> Result<File, InflightError> {
        let create = || {
            let fd = memfd_create("vhost-user-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&fd, Self::size(queues, queue_size))?;
            refuse_shrinking(&fd);
            Ok(File::from(fd))
        };
        create().map_err(|errno: rustix::io::Errno| InflightError::Map(errno.into()))
    }

    /// Maps what a frontend kept for `queues` queues of `queue_size` descriptors; up to `queue_size_max` if it has more room.
    ///
    /// # Errors
    /// When the file is too small for what the frontend says it holds, cannot be mapped, or is no [`SharedFile`].
    pub(super) fn attach(
        file: File,
        (offset, len): (u64, u64),
        queues: u16,
        queue_size: u16,
        queue_size_max: u16,
    ) -> Result<Self, InflightError> {
        let asked = Self::size(queues, queue_size);
        if len < asked {
            return Err(InflightError::TooSmall { len, needed: asked });
        }
        let each = len / u64::from(queues) / QUEUE_ALIGNMENT * QUEUE_ALIGNMENT;
        let stride = each.min(Self::stride(queue_size_max));
        let room = (stride - size_of::<QueueHeader>() as u64) / size_of::<Entry>() as u64;
        let queue_size = u16::try_from(room).unwrap_or(u16::MAX).min(queue_size_max);
        let needed = stride * u64::from(queues);
        if offset % 4096 != 0 {
            return Err(InflightError::Offset { offset });
        }
        let file = SharedFile::new(file).map_err(InflightError::Map)?;
        let file_len = file.len().map_err(InflightError::Map)?;
        if offset.checked_add(needed).is_none_or(|end| end > file_len) {
            return Err(InflightError::TooSmall { len: file_len, needed });
        }
        let mapping = GuardedMapping::new(file, offset, needed as usize).map_err(InflightError::Map)?;
        let mapping = mapping.ok_or(InflightError::TooMany)?;
        Ok(Self { mapping, queues, stride, queue_size })
    }
}

/// What a ring that starts over finds: how to go on.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recovered {
    /// Heads that were taken and not answered, in the order they were taken.
    pub(super) unanswered: Vec<u16>,
    /// Next entry of the available ring to take, where the region knows it.
    pub(super) next_avail: Option<u16>,
}

/// The inflight memory of one queue, used by the thread that owns the queue.
#[derive(Debug)]
pub(super) struct InflightQueue {
    region: Arc<InflightRegion>,
    header: NonNull<QueueHeader>,
    entries: NonNull<Entry>,
    size: u16,
    counter: u64,
}

// SAFETY: the pointers lead into the mapping that `region` keeps; all access is atomic.
unsafe impl Send for InflightQueue {}

impl InflightQueue {
    /// The part of `region` that belongs to queue `index`, for a ring of `size` descriptors.
    ///
    /// # Errors
    /// When the region has no such queue, or one of another size or layout.
    pub(super) fn new(region: Arc<InflightRegion>, index: u16, size: u16) -> Result<Self, InflightError> {
        if index >= region.queues || size > region.queue_size {
            return Err(InflightError::QueueOutside { index, size });
        }
        let offset = region.stride * u64::from(index);
        let start = region.mapping.start();
        // SAFETY: `attach` mapped `stride` bytes for each of `queues` queues.
        let base = unsafe { start.add(offset as usize) };
        let header = base.cast::<QueueHeader>();
        // SAFETY: a queue's header is followed by its entries inside the same stride.
        let entries = unsafe { header.add(1).cast::<Entry>() };
        let queue = Self { region, header, entries, size, counter: 0 };
        match queue.header().version.load(Ordering::Relaxed) {
            0 | VERSION => Ok(queue),
            version => Err(InflightError::Version { version }),
        }
    }

    fn header(&self) -> &QueueHeader {
        // SAFETY: inside the mapping, page-aligned plus a multiple of 64, all fields atomic.
        unsafe { self.header.as_ref() }
    }

    fn entry(&self, head: u16) -> &Entry {
        assert!(head < self.size, "head {head} outside the ring it came from");
        // SAFETY: `head` is below the number of entries, all of which are mapped.
        let entry = unsafe { self.entries.add(usize::from(head)) };
        // SAFETY: aligned as the header is; all fields are atomic.
        unsafe { entry.as_ref() }
    }

    /// Makes the memory consistent with a ring whose used index is `ring_used`, and tells what is unanswered.
    /// Call once, before the ring starts.
    pub(super) fn recover(&mut self, ring_used: u16) -> Recovered {
        let header = self.header();
        if header.version.load(Ordering::Relaxed) == 0 {
            header.desc_num.store(self.region.queue_size, Ordering::Relaxed);
            header.used_idx.store(ring_used, Ordering::Relaxed);
            header.version.store(VERSION, Ordering::Release);
            return Recovered::default();
        }
        self.forget_last_batch(ring_used);
        let mut taken: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.entry(head).inflight.load(Ordering::Relaxed) != 0)
            .map(|head| (self.entry(head).counter.load(Ordering::Relaxed), head))
            .collect();
        taken.sort_unstable();
        self.counter = taken.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let next_avail = Some(ring_used.wrapping_add(taken.len() as u16));
        Recovered { unanswered: taken.into_iter().map(|(_, head)| head).collect(), next_avail }
    }

    /// Unmarks the batch whose used index had been published when the previous server was killed.
    fn forget_last_batch(&self, ring_used: u16) {
        let header = self.header();
        let batch = ring_used.wrapping_sub(header.used_idx.load(Ordering::Relaxed));
        let mut head = header.last_batch_head.load(Ordering::Relaxed);
        for _ in 0..batch.min(self.size) {
            if head >= self.size {
                break;
            }
            self.entry(head).inflight.store(0, Ordering::Relaxed);
            head = self.entry(head).next.load(Ordering::Relaxed);
        }
        header.used_idx.store(ring_used, Ordering::Release);
    }

    /// Marks `head` as taken from the available ring.
    #[inline]
    pub(super) fn take(&mut self, head: u16) {
        let entry = self.entry(head);
        entry.counter.store(self.counter, Ordering::Relaxed);
        entry.inflight.store(1, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Links `head` into the batch about to be answered; before the used index is published.
    #[inline]
    pub(super) fn link(&self, head: u16) {
        let last = self.header().last_batch_head.load(Ordering::Relaxed);
        self.entry(head).next.store(last, Ordering::Relaxed);
        self.header().last_batch_head.store(head, Ordering::Release);
    }

    /// Unmarks the batch; after the used index `used` was published.
    #[inline]
    pub(super) fn answered(&self, batch: &[u16], used: u16) {
        std::sync::atomic::fence(Ordering::Release);
        for &head in batch {
            self.entry(head).inflight.store(0, Ordering::Release);
        }
        self.header().used_idx.store(used, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: u16 = 8;

    fn region(file: &File) -> Arc<InflightRegion> {
        let size = InflightRegion::size(2, SIZE);
        Arc::new(InflightRegion::attach(file.try_clone().unwrap(), (0, size), 2, SIZE, SIZE).unwrap())
    }

    fn queue(file: &File) -> InflightQueue {
        InflightQueue::new(region(file), 1, SIZE).unwrap()
    }

    #[test]
    fn a_fresh_region_leaves_the_start_to_the_frontend() {
        let file = InflightRegion::create_file(2, SIZE).unwrap();
        assert_eq!(queue(&file).recover(7), Recovered::default());
        assert_eq!(queue(&file).recover(7), Recovered { unanswered: vec![], next_avail: Some(7) });
    }

    #[test]
    fn unanswered_requests_come_back_in_the_order_they_were_taken() {
        let file = InflightRegion::create_file(2, SIZE).unwrap();
        let mut first = queue(&file);
        first.recover(65534);
        for head in [5, 2, 7, 0] {
            first.take(head);
        }
        first.link(7);
        first.answered(&[7], 65535);
        drop(first);
        let mut second = queue(&file);
        let expected = Recovered { unanswered: vec![5, 2, 0], next_avail: Some(2) };
        assert_eq!(second.recover(65535), expected);
        second.take(7);
        assert_eq!(queue(&file).recover(65535).unanswered, [5, 2, 0, 7]);
    }

    #[test]
    fn a_queue_has_the_room_that_the_region_gives_it() {
        // Asked for: two queues of 8. Given: room for 32 each, which the frontend keeps.
        let file = InflightRegion::create_file(2, 4 * SIZE).unwrap();
        let len = InflightRegion::size(2, 4 * SIZE);
        let attach = |len, most| {
            let region = InflightRegion::attach(file.try_clone().unwrap(), (0, len), 2, SIZE, most);
            Arc::new(region.unwrap())
        };
        let mut second = InflightQueue::new(attach(len, 4 * SIZE), 1, 4 * SIZE).unwrap();
        second.recover(0);
        second.take(4 * SIZE - 1);
        let mut first = InflightQueue::new(attach(len, 4 * SIZE), 0, 4 * SIZE).unwrap();
        assert_eq!(first.recover(0), Recovered::default());
        drop(second);
        let mut second = InflightQueue::new(attach(len, 4 * SIZE), 1, 4 * SIZE).unwrap();
        assert_eq!(second.recover(0).unanswered, [4 * SIZE - 1]);
        // No more than asked for, and never more than rings may have.
        let small = InflightRegion::size(2, SIZE);
        assert!(InflightQueue::new(attach(small, 4 * SIZE), 0, 2 * SIZE).is_err());
        assert!(InflightQueue::new(attach(len, 2 * SIZE), 0, 4 * SIZE).is_err());
    }

    #[test]
    fn wrong_shapes_versions_and_sizes_are_refused() {
        let file = InflightRegion::create_file(2, SIZE).unwrap();
        let size = InflightRegion::size(2, SIZE);
        let attach =
            |range, queues| InflightRegion::attach(file.try_clone().unwrap(), range, queues, SIZE, 4 * SIZE);
        assert!(matches!(attach((0, size - 1), 2), Err(InflightError::TooSmall { .. })));
        assert!(matches!(attach((0, size * 2), 4), Err(InflightError::TooSmall { .. })));
        assert!(matches!(attach((4096, size), 2), Err(InflightError::TooSmall { .. })));
        assert!(matches!(attach((u64::MAX - 4095, size), 2), Err(InflightError::TooSmall { .. })));
        assert!(matches!(attach((8, size), 2), Err(InflightError::Offset { .. })));
        assert!(InflightQueue::new(region(&file), 2, SIZE).is_err());
        assert!(InflightQueue::new(region(&file), 0, SIZE * 2).is_err());
        queue(&file).header().version.store(2, Ordering::Relaxed);
        assert!(matches!(InflightQueue::new(region(&file), 1, SIZE), Err(InflightError::Version { .. })));
    }

    /// Answers `batch` and stops after `stores` of the protocol's steps, as if killed there; returns the
    /// ring's used index.
    fn answer_until(queue: &InflightQueue, batch: &[u16], used: u16, mut stores: usize) -> u16 {
        let mut step = || {
            let go = stores > 0;
            stores = stores.saturating_sub(1);
            go
        };
        for &head in batch {
            if !step() {
                return used;
            }
            queue
                .entry(head)
                .next
                .store(queue.header().last_batch_head.load(Ordering::Relaxed), Ordering::Relaxed);
            if !step() {
                return used;
            }
            queue.header().last_batch_head.store(head, Ordering::Relaxed);
        }
        if !step() {
            return used;
        }
        let published = used.wrapping_add(batch.len() as u16);
        for &head in batch {
            if !step() {
                return published;
            }
            queue.entry(head).inflight.store(0, Ordering::Relaxed);
        }
        if step() {
            queue.header().used_idx.store(published, Ordering::Relaxed);
        }
        published
    }

    proptest! {
        /// Whenever the server is killed, what comes back is what was taken and not published.
        #[test]
        fn killed_between_any_two_stores(
            start in any::<u16>(),
            order in Just((0..SIZE).collect::<Vec<_>>()).prop_shuffle(),
            taken in 1usize..=SIZE as usize,
            cut in prop::collection::vec(1usize..4, 1..4),
            stores in 0usize..40,
        ) {
            let file = InflightRegion::create_file(2, SIZE).unwrap();
            let mut first = queue(&file);
            first.recover(start);
            order[..taken].iter().for_each(|&head| first.take(head));
            let mut left: Vec<u16> = order[..taken].to_vec();
            let mut used = start;
            for (round, &len) in cut.iter().enumerate() {
                // Answer from the middle, so that order of answers and of arrival differ.
                let from = left.len() / 2;
                let batch: Vec<u16> = left[from..(from + len).min(left.len())].to_vec();
                let budget = if round + 1 == cut.len() { stores } else { usize::MAX };
                let published = answer_until(&first, &batch, used, budget);
                if published != used {
                    left.retain(|head| !batch.contains(head));
                }
                used = published;
            }
            let recovered = queue(&file).recover(used);
            prop_assert_eq!(recovered.next_avail, Some(start.wrapping_add(taken as u16)));
            prop_assert_eq!(recovered.unanswered, left);
        }

        /// Garbage in the region is read without harm.
        #[test]
        fn garbage_is_bounded(bytes in prop::collection::vec(any::<u8>(), 288), used in any::<u16>()) {
            use std::os::unix::fs::FileExt;
            let file = InflightRegion::create_file(2, SIZE).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            file.write_all_at(&1u16.to_le_bytes(), 192 + 8).unwrap();
            let recovered = queue(&file).recover(used);
            prop_assert!(recovered.unanswered.len() <= usize::from(SIZE));
        }
    }
}
