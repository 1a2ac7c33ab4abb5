//! What a timed run does: kind of access, size, depth, time, and the positions that follow from it; and a request of a trace.

use std::time::Duration;

use anyhow::{Result, ensure};
use vmstrata_migrate::follow::Kind;
use vmstrata_types::GuestRange;

use crate::chain::pattern::mix;

/// What the requests of a run do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads at random block positions.
    RandomRead,
    /// Reads from somewhere on, wrapping around at the end.
    SequentialRead,
    /// Writes at random block positions, as the given round of this client.
    RandomWrite {
        /// Told apart when the data is checked.
        round: u16,
    },
    /// One write into each 64 KiB of the disk, in random order, until there is none left.
    FirstWrite {
        /// Told apart when the data is checked.
        round: u16,
    },
    /// Reads and writes in turn at random block positions; the writes stay near the start.
    ReadWrite {
        /// Told apart when the data is checked.
        round: u16,
        /// Bytes at the disk's start that are written to.
        within: u64,
    },
    /// Of a random order of all blocks, which [`in_random_order`] gives, `count` a round: writes those of this one.
    Share {
        /// Told apart when the data is checked.
        round: u16,
        /// Blocks of each round.
        count: u64,
    },
}

/// The block at `place` in a random order of `blocks` blocks, which is always the same.
pub(super) fn in_random_order(place: u64, blocks: u64) -> u64 {
    // Feistel rounds are a permutation of all numbers of an even number of bits; those that are no blocks lead on to one that is.
    let half = (u64::BITS - (blocks - 1).leading_zeros()).div_ceil(2);
    let mask = (1 << half) - 1;
    let mut number = place;
    loop {
        for round in 0..4 {
            let (left, right) = (number >> half, number & mask);
            number = right << half | (left ^ (mix(right << 8 | round) & mask));
        }
        if number < blocks {
            return number;
        }
    }
}

/// What one request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Read,
    /// As this round of the client.
    Write(u16),
}

/// Unit of [`Access::FirstWrite`]: the default cluster size.
const CLUSTER: u64 = 64 << 10;
/// Steps through any smaller power of two and most other counts, visiting all; it is prime.
const STRIDE: u64 = 2_654_435_761;

/// One timed run.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What requests do.
    pub access: Access,
    /// Whether each write is on stable storage when it ends.
    pub fua: bool,
    /// Bytes of a request, a multiple of 512.
    pub block: usize,
    /// Requests in flight.
    pub depth: usize,
    /// How long new requests are started.
    pub time: Duration,
    /// Seed of the positions.
    pub seed: u64,
}

/// A request of a trace.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Since the trace began.
    pub at: Duration,
    /// Where.
    pub range: GuestRange,
    /// What it does.
    pub kind: Kind,
}

/// What a run achieved.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Requests completed.
    pub requests: u64,
    /// From the first request's start to the last one's completion.
    pub elapsed: Duration,
    /// For writes: which blocks have been written, by block number.
    pub written: Vec<bool>,
}

impl Outcome {
    /// Requests per second.
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// Sees every request of a run; the time it takes is the client's.
pub trait Watch {
    /// The request of `slot` is about to start.
    fn started(&mut self, slot: usize);
    /// The request of `slot` has completed.
    fn completed(&mut self, slot: usize);
    /// Whether new requests are to be started.
    fn goes_on(&self) -> bool;
}

/// Looks at nothing, and costs nothing.
impl Watch for () {
    #[inline]
    fn started(&mut self, _slot: usize) {}
    #[inline]
    fn completed(&mut self, _slot: usize) {}
    #[inline]
    fn goes_on(&self) -> bool {
        true
    }
}

/// The state of one run.
pub(super) struct Run<'a> {
    pub(super) load: &'a Load,
    blocks: u64,
    issued: u64,
    pub(super) requests: u64,
    pub(super) written: Vec<bool>,
}

impl<'a> Run<'a> {
    pub(super) fn new(load: &'a Load, capacity: u64) -> Result<Self> {
        let blocks = capacity / load.block as u64;
        ensure!(blocks > 0, "the disk is smaller than a block");
        let written = match load.access {
            Access::RandomRead | Access::SequentialRead => Vec::new(),
            _ => vec![false; blocks as usize],
        };
        Ok(Self { load, blocks, issued: 0, requests: 0, written })
    }

    /// What the next request does, and where; `None` when there is none left.
    pub(super) fn next(&mut self) -> Option<(Turn, u64)> {
        let turn = match self.load.access {
            Access::SequentialRead | Access::RandomRead => Turn::Read,
            Access::ReadWrite { .. } if self.issued.is_multiple_of(2) => Turn::Read,
            Access::RandomWrite { round }
            | Access::FirstWrite { round }
            | Access::ReadWrite { round, .. }
            | Access::Share { round, .. } => Turn::Write(round),
        };
        Some((turn, self.next_position(turn)?))
    }

    fn next_position(&mut self, turn: Turn) -> Option<u64> {
        let issued = self.issued;
        self.issued += 1;
        let block = self.load.block as u64;
        match self.load.access {
            Access::SequentialRead => Some(self.random(0).wrapping_add(issued) % self.blocks * block),
            Access::ReadWrite { within, .. } if turn != Turn::Read => {
                Some(self.random(issued) % (within / block).clamp(1, self.blocks) * block)
            }
            Access::RandomRead | Access::RandomWrite { .. } | Access::ReadWrite { .. } => {
                Some(self.random(issued) % self.blocks * block)
            }
            Access::Share { round, count } => {
                let place = u64::from(round) * count + issued;
                let is_there = issued < count && place < self.blocks;
                is_there.then(|| in_random_order(place, self.blocks) * block)
            }
            Access::FirstWrite { .. } => {
                let clusters = self.blocks * block / CLUSTER;
                let cluster = issued.wrapping_mul(STRIDE) % clusters.max(1);
                let within = self.random(issued) % (CLUSTER / block) * block;
                (issued < clusters).then_some(cluster * CLUSTER + within)
            }
        }
    }

    fn random(&self, index: u64) -> u64 {
        mix(self.load.seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_positions_are_blocks_of_the_disk_and_reach_all_of_it() {
        let load = Load {
            access: Access::RandomRead,
            fua: false,
            block: 4096,
            depth: 1,
            time: Duration::ZERO,
            seed: 1,
        };
        let mut run = Run::new(&load, 64 * 4096 + 512).unwrap();
        let mut seen = [false; 64];
        for _ in 0..2_000 {
            let (turn, at) = run.next().unwrap();
            assert!(turn == Turn::Read && at.is_multiple_of(4096));
            seen[(at / 4096) as usize] = true;
        }
        assert!(seen.iter().all(|seen| *seen));
    }

    #[test]
    fn reads_go_everywhere_and_writes_where_they_may() {
        let access = Access::ReadWrite { round: 3, within: 16 * 4096 };
        let load = Load { access, fua: false, block: 4096, depth: 1, time: Duration::ZERO, seed: 1 };
        let mut run = Run::new(&load, 64 * 4096).unwrap();
        let turns: Vec<(Turn, u64)> = (0..1_000).map(|_| run.next().unwrap()).collect();
        let (writes, reads): (Vec<_>, Vec<_>) =
            turns.into_iter().partition(|(turn, _)| *turn == Turn::Write(3));
        assert_eq!((writes.len(), reads.len()), (500, 500));
        assert!(writes.iter().all(|(_, at)| *at < 16 * 4096));
        assert!(reads.iter().any(|(_, at)| *at >= 48 * 4096));
    }

    #[test]
    fn shares_make_up_the_disk_in_random_order() {
        for blocks in [1_u64, 2, 255, 256, 257, 1000] {
            let count = blocks.div_ceil(3);
            let share = |round| {
                let access = Access::Share { round, count };
                let load = Load { access, fua: false, block: 4096, depth: 1, time: Duration::ZERO, seed: 1 };
                let mut run = Run::new(&load, blocks * 4096).unwrap();
                std::iter::from_fn(|| run.next()).map(|(_, at)| at / 4096).collect::<Vec<_>>()
            };
            let mut all: Vec<u64> = (0..3).flat_map(share).collect();
            assert!(blocks < 100 || !all.is_sorted());
            all.sort_unstable();
            assert_eq!(all, (0..blocks).collect::<Vec<_>>());
        }
    }

    #[test]
    fn first_writes_touch_each_cluster_once() {
        let access = Access::FirstWrite { round: 0 };
        let load = Load { access, fua: false, block: 4096, depth: 1, time: Duration::ZERO, seed: 1 };
        let mut run = Run::new(&load, 1000 * CLUSTER).unwrap();
        let mut clusters: Vec<u64> = std::iter::from_fn(|| run.next()).map(|(_, at)| at / CLUSTER).collect();
        assert!(!clusters.is_sorted(), "the order is random");
        clusters.sort_unstable();
        assert_eq!(clusters, (0..1000).collect::<Vec<_>>());
    }
}
