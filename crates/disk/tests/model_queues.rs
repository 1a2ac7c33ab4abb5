//! Several threads, each with its own queue, on one disk: against flat arrays where their ranges are disjoint, and by
//! the order of requests where they overlap.

use crate::common;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::flat::{SECTOR, assert_reads, assert_same, pattern, read};
use crate::common::io::Client;
use crate::common::shape::{LayerShape, make};
use crate::common::{for_seeds, random, scratch, stock};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{Disk, Op, OpenOptions, ResourceOptions, Resources};
use vmstrata_store::CacheMode;

const THREADS: usize = 3;
/// The unit in which threads own the disk: smaller than most clusters, so that they meet in every cluster.
const BLOCK: u64 = 4096;

fn open(path: &Path, cache: CacheMode, metadata_cache_bytes: u64) -> Arc<Disk> {
    let resources =
        Resources::new(ResourceOptions { metadata_cache_bytes, workers: 3, ..ResourceOptions::default() });
    Disk::open(path, &OpenOptions { cache, ..OpenOptions::default() }, &resources).expect("opens")
}

/// A thread that owns every `THREADS`-th block.
struct Owner {
    client: Client,
    random: SmallRng,
    me: u64,
    cluster: u64,
    /// The whole disk; only this thread's blocks are right.
    model: Vec<u8>,
    /// Requests under way: block, and for a read what it must give.
    under_way: HashMap<u64, (u64, Option<Vec<u8>>)>,
}

impl Owner {
    fn push_some(&mut self) {
        let blocks = self.model.len() as u64 / BLOCK;
        let block = self.random.random_range(0..blocks) / THREADS as u64 * THREADS as u64 + self.me;
        if block >= blocks || self.under_way.values().any(|(busy, _)| *busy == block) {
            return;
        }
        let first = self.random.random_range(0..8);
        let len = self.random.random_range(1..=8 - first) * SECTOR;
        let at = block * BLOCK + first * SECTOR;
        let range = at as usize..(at + len) as usize;
        let mut expected = None;
        let token = match self.random.random_range(0..20) {
            0..9 => {
                let bytes = pattern(&mut self.random, len as usize);
                self.model[range].copy_from_slice(&bytes);
                let fua = self.random.random_ratio(1, 30);
                self.client.push(Op::Write { fua }, at, len, Some(&bytes))
            }
            9..11 => {
                self.model[range].fill(0);
                let unmap = self.random.random();
                self.client.push(Op::WriteZeroes { unmap, fua: false }, at, len, None)
            }
            11 if self.cluster <= BLOCK => {
                self.model[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(0);
                self.client.push(Op::Discard, block * BLOCK, BLOCK, None)
            }
            12 => self.client.push(Op::Flush, 0, 0, None),
            13 => self.client.push(Op::Prefetch, at, len, None),
            _ => {
                expected = Some(self.model[range].to_vec());
                self.client.push(Op::Read, at, len, None)
            }
        };
        self.under_way.insert(token, (block, expected));
    }

    fn run(mut self, requests: usize) -> Vec<u8> {
        let mut pushed = 0;
        while pushed < requests || self.client.in_flight() > 0 {
            while pushed < requests && self.client.in_flight() < 16 {
                self.push_some();
                pushed += 1;
            }
            self.client.submit();
            for done in self.client.wait() {
                let (block, expected) = self.under_way.remove(&done.token).expect("ends once");
                done.result.expect("no faults here");
                if let Some(expected) = expected {
                    assert_same(&done.bytes, &expected, block * BLOCK, "a read through a queue");
                }
            }
        }
        self.model
    }
}

fn disjoint(layers: &[LayerShape], cache: CacheMode, metadata_cache_bytes: u64, dir: &Path, seed: u64) {
    let mut random = random("disjoint", seed);
    let mut made = make(dir, layers, &mut random);
    let disk = open(&made.top, cache, metadata_cache_bytes);
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS as u64)
            .map(|me| {
                let owner = Owner {
                    client: Client::new(&disk, 16),
                    random: common::random("owner", seed * 10 + me),
                    me,
                    cluster: made.cluster,
                    model: made.model.clone(),
                    under_way: HashMap::new(),
                };
                scope.spawn(move || owner.run(700))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread fails")).collect()
    });
    for (number, block) in made.model.chunks_mut(BLOCK as usize).enumerate() {
        let at = number * BLOCK as usize;
        block.copy_from_slice(&models[number % THREADS][at..at + block.len()]);
    }
    assert_reads(&disk, &made.model, "after all threads");
    disk.close().expect("closes");
    drop(disk);
    stock::assert_clean(&made.top);
    assert_same(&stock::content(&made.top, "qcow2"), &made.model, 0, "as qemu-img reads it");
}

#[test]
fn threads_that_share_clusters_do_not_disturb_each_other() {
    for_seeds(2, |seed| {
        for bits in [9, 12, 14, 16] {
            let dir = scratch();
            let size = if bits == 9 { 1 << 20 } else { 3 << 20 };
            let base = LayerShape { compressed: Some("zlib"), ..LayerShape::qcow2(15, size) };
            let snapshots = u32::from(seed % 2 == 0);
            let active = LayerShape { snapshots, subclusters: bits == 14, ..LayerShape::qcow2(bits, size) };
            disjoint(&[base, active], CacheMode::Host, 0, dir.path(), seed * 100 + u64::from(bits));
        }
    });
}

#[test]
fn threads_on_direct_io_do_not_disturb_each_other() {
    for_seeds(1, |seed| {
        for bits in [9, 12, 16] {
            let dir = tempfile::tempdir().expect("a directory");
            let layers = [LayerShape::qcow2(16, 2 << 20), LayerShape::qcow2(bits, 2 << 20)];
            disjoint(&layers, CacheMode::Direct, 1 << 20, dir.path(), seed * 100 + u64::from(bits));
        }
    });
}

/// A change of one sector, between two ticks of a clock that all threads share.
#[derive(Clone, Copy, Debug)]
struct Change {
    began: u64,
    ended: u64,
    /// What all bytes but the first eight are; 0 for zeros.
    mark: u64,
}

/// A sector that says which request wrote it.
fn marked(mark: u64) -> Vec<u8> {
    mark.to_le_bytes().repeat(SECTOR as usize / 8)
}

/// Writes and clears of random clusters, in rounds; returns what was done to each sector.
fn overlap(disk: &Arc<Disk>, seed: u64, me: u64, clock: &AtomicU64, requests: usize) -> Vec<(u64, Change)> {
    let mut random = random("overlap", seed * 10 + me);
    let mut client = Client::new(disk, 8);
    let mut log = Vec::new();
    let mut under_way: HashMap<u64, (u64, u64, u64, u64)> = HashMap::new();
    let sectors = disk.size() / SECTOR;
    let mut pushed = 0;
    while pushed < requests || client.in_flight() > 0 {
        while pushed < requests && client.in_flight() < 8 {
            let first = random.random_range(0..sectors);
            let count = random.random_range(1..=24).min(sectors - first);
            let mark = 1 + (me << 48 | seed << 32 | pushed as u64);
            let began = clock.fetch_add(1, Ordering::SeqCst);
            let (at, len) = (first * SECTOR, count * SECTOR);
            let (token, mark) = match random.random_range(0..10) {
                0 => (client.push(Op::WriteZeroes { unmap: true, fua: false }, at, len, None), 0),
                1 => (client.push(Op::WriteZeroes { unmap: false, fua: false }, at, len, None), 0),
                2 => (client.push(Op::Flush, 0, 0, None), u64::MAX),
                _ => {
                    let bytes = marked(mark).repeat(count as usize);
                    (client.push(Op::Write { fua: false }, at, len, Some(&bytes)), mark)
                }
            };
            under_way.insert(token, (first, count, began, mark));
            pushed += 1;
        }
        for done in client.wait() {
            done.result.expect("no faults here");
            let ended = clock.fetch_add(1, Ordering::SeqCst);
            let (first, count, began, mark) = under_way.remove(&done.token).expect("ends once");
            if mark != u64::MAX {
                log.extend((first..first + count).map(|sector| (sector, Change { began, ended, mark })));
            }
        }
    }
    log
}

/// After overlapping requests of several threads, each sector holds one of them, whole, and none that another one
/// replaced after it had ended.
#[test]
fn overlapping_requests_leave_each_sector_to_one_of_them() {
    for_seeds(3, |seed| {
        for bits in [9, 12, 16] {
            let dir = scratch();
            let base = LayerShape::qcow2(16, 256 << 10);
            let active = LayerShape { operations: 0, ..LayerShape::qcow2(bits, 256 << 10) };
            let made = make(dir.path(), &[base, active], &mut random("overlap disk", seed));
            let disk = open(&made.top, CacheMode::Host, 0);
            let clock = AtomicU64::new(1);
            let logs: Vec<_> = std::thread::scope(|scope| {
                let (disk, clock) = (&disk, &clock);
                let run = |me| scope.spawn(move || overlap(disk, seed, me, clock, 400));
                let threads: Vec<_> = (0..THREADS as u64).map(run).collect();
                threads.into_iter().flat_map(|thread| thread.join().expect("no thread fails")).collect()
            });
            let mut changes: HashMap<u64, Vec<Change>> = HashMap::new();
            for (sector, change) in logs {
                changes.entry(sector).or_default().push(change);
            }
            let bytes = read(&disk, 0, disk.size() as usize).expect("reads");
            for (sector, found) in bytes.chunks(SECTOR as usize).enumerate() {
                let of_sector = changes.get(&(sector as u64)).map_or(&[][..], Vec::as_slice);
                assert_last(sector, found, of_sector, &made.model[sector * 512..sector * 512 + 512]);
            }
            disk.close().expect("closes");
            drop(disk);
            stock::assert_clean(&made.top);
            assert_same(&stock::content(&made.top, "qcow2"), &bytes, 0, "as qemu-img reads it");
        }
    });
}

fn assert_last(sector: usize, found: &[u8], changes: &[Change], before: &[u8]) {
    if changes.is_empty() {
        assert_eq!(found, before, "sector {sector} changed by itself");
        return;
    }
    let mark = u64::from_le_bytes(found[..8].try_into().expect("eight bytes"));
    assert_eq!(found, marked(mark), "sector {sector} is torn");
    let replaced = |change: &Change| changes.iter().any(|later| later.began > change.ended);
    let may_be = changes.iter().any(|change| change.mark == mark && !replaced(change));
    assert!(may_be, "sector {sector} holds {mark:#x}, which was replaced: {changes:x?}");
}
