//! What was done to a disk, counted where it is done.
//!
//! ```text
//!   IoQueue (one thread) ──► Counters: plain adds, cache lines of its own ──┐
//!   IoQueue              ──► Counters                                     ──┼─► DiskStats, summed when asked for
//!   workers              ──► Counters that they share                     ──┤
//!   queues that are gone ──► retired sums                                 ──┘
//! ```
//!
//! Counting costs a request a few adds on lines that no other thread writes, and no system call. The clock is read for
//! every [`TIMED_EVERY`]th read and write only, and for whatever is slow anyway (flush, discard, zeroing): a histogram
//! of one in thirteen says the same as one of all. Thirteen, because a power of two would always meet the same place
//! in a batch.
//!
//! Invariant: a queue's [`Counters`] has one writer, the queue's thread; what workers count, whose requests take longer anyway,
//! they count together. Readers see each number as it was at some moment, not all at the same.

mod set;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) use self::set::{Begun, QueueStats, StatsSet};
use crate::request::Op;

/// Of so many reads and writes one is timed.
const TIMED_EVERY: u8 = 13;

/// Kinds of requests that are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Kind {
    /// Reads.
    #[default]
    Read,
    /// Writes, with or without FUA.
    Write,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
    /// Writes of zeros.
    WriteZeroes,
    /// Prefetches.
    Prefetch,
}

impl Kind {
    /// All of them, each at its own index.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Prefetch];

    fn is_frequent(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

impl From<Op> for Kind {
    fn from(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard => Self::Discard,
            Op::WriteZeroes { .. } => Self::WriteZeroes,
            Op::Prefetch => Self::Prefetch,
        }
    }
}

/// Declares the live counters and the snapshot of their sums with the same fields.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: [$len:expr],)*) => {
        /// What was done to a disk since it was opened.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct DiskStats {
            $($(#[$doc])* pub $name: [u64; $len],)*
        }

        impl Default for DiskStats {
            fn default() -> Self {
                Self { $($name: [0; $len],)* }
            }
        }

        /// The counters of one queue.
        #[derive(Debug)]
        #[repr(align(128))]
        pub(crate) struct Counters {
            $($name: [Counter; $len],)*
        }

        impl Default for Counters {
            fn default() -> Self {
                Self { $($name: std::array::from_fn(|_| Counter::default()),)* }
            }
        }

        impl Counters {
            fn add_to(&self, sum: &mut DiskStats) {
                $(sum.$name.iter_mut().zip(&self.$name).for_each(|(sum, counter)| *sum += counter.get());)*
            }
        }
    };
}

/// Kinds of requests.
pub const KINDS: usize = Kind::ALL.len();
/// Buckets of a latency histogram: bucket *i* counts what took less than 2^(i + 10) ns and not less than half of
/// that; the first also all that was faster, the last also all that was slower. 1 µs to 17 s.
pub const LATENCY_BUCKETS: usize = 25;
/// log2 of the first bucket's bound in nanoseconds.
const LATENCY_SHIFT: u32 = 10;
/// Buckets of depths: 0 is the active layer, bucket *i* has depths from 2^(i - 1) to 2^i - 1 below it.
pub const DEPTH_BUCKETS: usize = 17;

counters! {
    /// Requests that ended, by [`Kind`].
    requests: [KINDS],
    /// Of these, the ones that failed.
    errors: [KINDS],
    /// Bytes of the requests that ended, by [`Kind`].
    bytes: [KINDS],
    /// Requests that could not be answered from the metadata in memory, or may block for another reason: workers
    /// carried them out. By [`Kind`].
    at_workers: [KINDS],
    /// How long reads took from being pushed to being reaped, sampled; see [`LATENCY_BUCKETS`].
    read_latency: [LATENCY_BUCKETS],
    /// The same of writes.
    write_latency: [LATENCY_BUCKETS],
    /// The same of all else, not sampled.
    other_latency: [LATENCY_BUCKETS],
    /// Nanoseconds in each of the three histograms together, in their order.
    latency_ns: [3],
    /// Bytes that reads took from files, by how far below the active layer; see [`DEPTH_BUCKETS`].
    read_depth: [DEPTH_BUCKETS],
    /// Bytes of the same reads that no layer has data for.
    zero_bytes: [1],
    /// Lookups of where a run of a read or write lies that the metadata in memory answered.
    metadata_hits: [1],
    /// Those that it did not: tables had to be read first.
    metadata_misses: [1],
    /// Requests that the disk's limits had wait, or have.
    throttled: [1],
    /// For how many nanoseconds those waited that wait no more, together.
    throttled_ns: [1],
}

/// A counter with one writer, or with several that all share it.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`; to be called by the one thread that owns the counter.
    #[inline]
    fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// The same by any of several threads.
    fn add_shared(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    /// A request of `kind` over `len` bytes has ended.
    #[inline]
    fn ended(&self, kind: Kind, len: u64, is_ok: bool, began: Option<Instant>) {
        let at = kind as usize;
        self.requests[at].add(1);
        self.bytes[at].add(len);
        if !is_ok {
            self.errors[at].add(1);
        }
        if let Some(began) = began {
            self.took(kind, began.elapsed());
        }
    }

    fn took(&self, kind: Kind, time: Duration) {
        let (sum, histogram) = match kind {
            Kind::Read => (&self.latency_ns[0], &self.read_latency),
            Kind::Write => (&self.latency_ns[1], &self.write_latency),
            _ => (&self.latency_ns[2], &self.other_latency),
        };
        histogram[latency_bucket(time)].add(1);
        sum.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// A read took `len` bytes from the layer `depth` below the active one.
    #[inline]
    pub(crate) fn read_from(&self, depth: u16, len: u64) {
        self.read_depth[depth_bucket(depth)].add(len);
    }

    /// A read found nothing in any layer for `len` bytes.
    #[inline]
    pub(crate) fn read_zeros(&self, len: u64) {
        self.zero_bytes[0].add(len);
    }

    /// A worker's read took `len` bytes from the layer `depth` below the active one, or found nothing in any.
    fn worker_read(&self, depth: Option<u16>, len: u64) {
        depth.map_or(&self.zero_bytes[0], |depth| &self.read_depth[depth_bucket(depth)]).add_shared(len);
    }

    /// The metadata in memory was asked where a run lies.
    #[inline]
    pub(crate) fn looked_up<T>(&self, found: Option<T>) -> Option<T> {
        let counter = if found.is_some() { &self.metadata_hits } else { &self.metadata_misses };
        counter[0].add(1);
        found
    }

    /// The disk's limits have a request wait.
    pub(crate) fn throttled(&self) {
        self.throttled[0].add(1);
    }

    /// It has waited for `time`.
    pub(crate) fn waited(&self, time: Duration) {
        self.throttled_ns[0].add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// A worker was asked to carry a request out.
    #[inline]
    pub(crate) fn sent_to_worker(&self, op: Op) {
        self.at_workers[Kind::from(op) as usize].add(1);
    }
}

fn latency_bucket(time: Duration) -> usize {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let bits = u64::BITS - (nanos >> LATENCY_SHIFT).leading_zeros();
    (bits as usize).min(LATENCY_BUCKETS - 1)
}

fn depth_bucket(depth: u16) -> usize {
    (u16::BITS - depth.leading_zeros()) as usize
}

impl DiskStats {
    /// The bound of a latency bucket: what is counted there took less. `None` for the last.
    pub fn latency_bound(bucket: usize) -> Option<Duration> {
        let bound = Duration::from_nanos(1 << (LATENCY_SHIFT as usize + bucket.min(LATENCY_BUCKETS)));
        (bucket + 1 < LATENCY_BUCKETS).then_some(bound)
    }

    /// The requests of a kind.
    pub fn requests_of(&self, kind: Kind) -> u64 {
        self.requests[kind as usize]
    }

    /// The bytes of a kind.
    pub fn bytes_of(&self, kind: Kind) -> u64 {
        self.bytes[kind as usize]
    }
}

#[cfg(test)]
mod tests;
