//! What each sector of a disk may hold after failures and crashes: the write-log rule.
//!
//! A sector may hold any value from the one it had at the last completed flush to the newest. A request that
//! failed may have written any of its sectors, or none.

use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{Disk, Error};

use super::flat::{SECTOR, pattern, range, read, some_range, write};

/// Something to do with a disk.
#[derive(Clone)]
pub enum Step {
    Write { at: u64, bytes: Vec<u8> },
    Zeroes { at: u64, len: u64, unmap: bool },
    Discard { at: u64, len: u64 },
    Read { at: u64, len: u64 },
    Flush,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Write { at, bytes } => write!(f, "write of {} bytes at {at:#x}", bytes.len()),
            Self::Zeroes { at, len, unmap } => write!(f, "zeros ({unmap}) over {len} bytes at {at:#x}"),
            Self::Discard { at, len } => write!(f, "discard of {len} bytes at {at:#x}"),
            Self::Read { at, len } => write!(f, "read of {len} bytes at {at:#x}"),
            Self::Flush => f.write_str("flush"),
        }
    }
}

impl Step {
    pub fn changes_disk(&self) -> bool {
        self.changed().is_some()
    }

    /// The bytes that it changes.
    fn changed(&self) -> Option<std::ops::Range<u64>> {
        match self {
            Self::Write { at, bytes } => Some(*at..*at + bytes.len() as u64),
            Self::Zeroes { at, len, .. } | Self::Discard { at, len } => Some(*at..*at + *len),
            Self::Read { .. } | Self::Flush => None,
        }
    }

    fn changes_same(&self, other: &Self) -> bool {
        let pair = self.changed().zip(other.changed());
        pair.is_some_and(|(one, other)| one.start < other.end && other.start < one.end)
    }
}

/// A workload: allocations, copy-on-write, zeros, discards and what reuses their clusters, flushes.
pub fn steps(random: &mut SmallRng, count: usize, size: u64, cluster: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    while steps.len() < count {
        let (at, len) = some_range(random, size, cluster);
        // Most of the work goes to one part of the disk, so that clusters come and go.
        let at = if random.random_ratio(2, 3) { at % (size / 4) / SECTOR * SECTOR } else { at };
        let len = len.min(8 * cluster).min(size - at);
        steps.push(match random.random_range(0..20) {
            0..9 => Step::Write { at, bytes: pattern(random, len as usize) },
            9..11 => Step::Zeroes { at, len, unmap: random.random() },
            11..14 => Step::Discard {
                at: at / cluster * cluster,
                len: len.next_multiple_of(cluster).min(size - at / cluster * cluster),
            },
            14..16 => Step::Read { at, len },
            _ => Step::Flush,
        });
    }
    steps
}

/// Splits a workload into batches of steps that may end in any order: no two of a batch change the same bytes, and a flush
/// is the first of its batch, as it covers what ended before it began.
pub fn batches(steps: Vec<Step>, len_max: usize) -> Vec<Vec<Step>> {
    let mut batches: Vec<Vec<Step>> = Vec::new();
    for step in steps {
        let joins = |batch: &&mut Vec<Step>| {
            batch.len() < len_max
                && !matches!(step, Step::Flush)
                && !batch.iter().any(|other| step.changes_same(other))
        };
        match batches.last_mut().filter(joins) {
            Some(batch) => batch.push(step),
            None => batches.push(vec![step]),
        }
    }
    batches
}

/// Threads of a striped workload.
pub const THREADS: u64 = 3;
/// The unit in which those threads own the disk.
pub const BLOCK: u64 = 4096;

/// A workload on every `THREADS`-th block: threads meet in clusters and in tables, never in a sector.
pub fn striped(seed: u64, me: u64, count: usize, size: u64) -> Vec<Step> {
    let mut random = super::random("striped", seed * 10 + me);
    let step = |_| {
        let block = random.random_range(0..size / BLOCK / THREADS) * THREADS + me;
        let (at, len) = (block * BLOCK + random.random_range(0..4) * 512, random.random_range(1..=4) * 512);
        match random.random_range(0..10) {
            0 => Step::Flush,
            1 => Step::Zeroes { at, len, unmap: random.random() },
            _ => Step::Write { at, bytes: pattern(&mut random, len as usize) },
        }
    };
    (0..count).map(step).collect()
}

/// Does a step; a read is compared by the caller's ledger.
pub fn take(disk: &Disk, step: &Step) -> Result<Option<Vec<u8>>, Error> {
    match step {
        Step::Write { at, bytes } => write(disk, *at, bytes).map(|()| None),
        Step::Zeroes { at, len, unmap } => disk.write_zeroes(range(*at, *len), *unmap).map(|()| None),
        Step::Discard { at, len } => disk.discard(range(*at, *len)).map(|()| None),
        Step::Read { at, len } => read(disk, *at, *len as usize).map(Some),
        Step::Flush => disk.flush().map(|()| None),
    }
}

/// One value of one sector.
#[derive(Clone, Copy, Debug)]
struct Value {
    /// The step that wrote it, counted from 1; 0 for what was there before.
    step: usize,
    digest: u32,
    /// Whether it is known to have replaced the value before it.
    certain: bool,
}

/// See the module documentation.
#[derive(Clone)]
pub struct Ledger {
    sectors: Vec<Vec<Value>>,
    cluster: u64,
}

fn digest(sector: &[u8]) -> u32 {
    crc32c::crc32c(sector)
}

impl Ledger {
    /// The disk's content before the first step; discards clear whole clusters of this size.
    pub fn new(content: &[u8], cluster: u64) -> Self {
        let first = |sector: &[u8]| vec![Value { step: 0, digest: digest(sector), certain: true }];
        Self { sectors: content.chunks(SECTOR as usize).map(first).collect(), cluster }
    }

    /// Discards clear whole clusters of this size from now on.
    pub fn set_cluster(&mut self, cluster: u64) {
        self.cluster = cluster;
    }

    pub fn size(&self) -> u64 {
        self.sectors.len() as u64 * SECTOR
    }

    /// Enters what a step changed, or may have.
    pub fn enter(&mut self, number: usize, step: &Step, succeeded: bool) {
        match step {
            Step::Write { at, bytes } => self.put(number, *at, bytes, succeeded),
            Step::Zeroes { at, len, .. } => self.put(number, *at, &vec![0; *len as usize], succeeded),
            Step::Discard { at, len } => {
                let start = at.next_multiple_of(self.cluster);
                let end =
                    if at + len == self.size() { at + len } else { (at + len) / self.cluster * self.cluster };
                if start < end {
                    self.put(number, start, &vec![0; (end - start) as usize], succeeded);
                }
            }
            Step::Read { .. } | Step::Flush => {}
        }
    }

    fn put(&mut self, step: usize, at: u64, bytes: &[u8], certain: bool) {
        let first = (at / SECTOR) as usize;
        for (number, sector) in bytes.chunks(SECTOR as usize).enumerate() {
            self.sectors[first + number].push(Value { step, digest: digest(sector), certain });
        }
    }

    /// Makes sure that `bytes`, at `at`, hold in every sector a value that it had at some time from step `flushed`
    /// (inclusive) to step `last` (inclusive, and possibly only begun).
    pub fn check(&self, at: u64, bytes: &[u8], flushed: usize, last: usize) -> Result<(), String> {
        let first = (at / SECTOR) as usize;
        for (number, found) in bytes.chunks(SECTOR as usize).enumerate() {
            let values = &self.sectors[first + number];
            let oldest = values.iter().rposition(|value| value.certain && value.step <= flushed).unwrap_or(0);
            let allowed = values[oldest..].iter().filter(|value| value.step <= last);
            if !allowed.clone().any(|value| value.digest == digest(found)) {
                let ever = values.iter().find(|value| value.digest == digest(found)).map(|value| value.step);
                let offset = (first + number) as u64 * SECTOR;
                return Err(format!(
                    "sector at {offset:#x} holds the value of step {ever:?} ({:x?}), not one of {:?}",
                    &found[..8],
                    allowed.map(|value| value.step).collect::<Vec<_>>()
                ));
            }
        }
        Ok(())
    }
}
