//! Random operations on disks of every shape, against a flat array of bytes; at the end stock tools check the image
//! and read it.

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::flat::{assert_reads, assert_same, pattern, range, read, some_range, write, zero};
use crate::common::shape::{LayerShape, Made, make};
use crate::common::{for_seeds, random, scratch, stock};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{Disk, Format, OpenOptions, ResourceOptions, Resources};
use vmstrata_store::CacheMode;

/// How a disk is used during a run.
#[derive(Clone, Copy, Debug)]
struct Use {
    operations: u32,
    cache: CacheMode,
    metadata_cache_bytes: u64,
    /// Whether the disk is dropped without being closed, as a killed process leaves it, now and then.
    kills: bool,
}

impl Default for Use {
    fn default() -> Self {
        Self { operations: 120, cache: CacheMode::Host, metadata_cache_bytes: 1 << 20, kills: false }
    }
}

struct Run {
    made: Made,
    used: Use,
    journal_dir: PathBuf,
    disk: Option<Arc<Disk>>,
    random: SmallRng,
}

impl Run {
    fn start(made: Made, used: Use, journal_dir: PathBuf, random: SmallRng) -> Self {
        let mut run = Self { made, used, journal_dir, disk: None, random };
        run.open();
        run
    }

    fn open(&mut self) {
        let resources = Resources::new(ResourceOptions {
            metadata_cache_bytes: self.used.metadata_cache_bytes,
            max_open_files: 2,
            workers: 1,
            journal_dir: Some(self.journal_dir.clone()),
        });
        // A raw disk must be named as one: its guest may write anything to its start.
        let format = self.made.is_raw.then_some(Format::Raw);
        let options = OpenOptions { cache: self.used.cache, format, ..OpenOptions::default() };
        self.disk = Some(Disk::open(&self.made.top, &options, &resources).expect("opens"));
    }

    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("open")
    }

    fn step(&mut self) {
        let size = self.made.model.len() as u64;
        let (at, len) = some_range(&mut self.random, size, self.made.cluster.max(4096));
        match self.random.random_range(0..100) {
            0..40 => {
                let bytes = pattern(&mut self.random, len as usize);
                write(self.disk(), at, &bytes).expect("writes");
                self.made.model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
            }
            40..50 => {
                let unmap = self.random.random();
                self.disk().write_zeroes(range(at, len), unmap).expect("writes zeros");
                zero(&mut self.made.model, at, len);
            }
            50..60 => self.discard(at, len),
            60..90 => {
                let found = read(self.disk(), at, len as usize).expect("reads");
                assert_same(&found, &self.made.model[at as usize..(at + len) as usize], at, "a read");
            }
            90..94 => self.disk().flush().expect("flushes"),
            94..97 => self.assert_extents(),
            _ => self.reopen(),
        }
    }

    /// Whole clusters must read as zeros, where the image can say so; all else is as it was.
    fn discard(&mut self, at: u64, len: u64) {
        self.disk().discard(range(at, len)).expect("discards");
        let (cluster, size) = (self.made.cluster, self.made.model.len() as u64);
        let end = at + len;
        let whole = at.next_multiple_of(cluster)..if end == size { end } else { end / cluster * cluster };
        if whole.is_empty() {
            return;
        }
        if self.made.version == 2 && self.made.has_backing {
            let found = read(self.disk(), whole.start, (whole.end - whole.start) as usize).expect("reads");
            let old = &mut self.made.model[whole.start as usize..whole.end as usize];
            assert!(
                found.iter().zip(&*old).all(|(found, old)| found == old || *found == 0),
                "a discard made things up"
            );
            old.copy_from_slice(&found);
            return;
        }
        zero(&mut self.made.model, whole.start, whole.end - whole.start);
    }

    /// What extents call zeros reads as zeros, and extents cover the range without gaps.
    fn assert_extents(&mut self) {
        let size = self.made.model.len() as u64;
        let (at, len) = some_range(&mut self.random, size, self.made.cluster.max(4096));
        let limit = self.random.random_range(1..50);
        let extents = self.disk().extents(range(at, len), limit).expect("maps");
        assert!(extents.len() <= limit && !extents.is_empty());
        let mut next = at;
        for extent in &extents {
            assert_eq!(extent.range.start.get(), next, "a gap between extents");
            assert!(extent.range.len > 0);
            next += extent.range.len;
            let bytes = &self.made.model[extent.range.start.get() as usize..next as usize];
            assert!(
                !extent.kind.reads_zero() || bytes.iter().all(|&byte| byte == 0),
                "{extent:?} is not zeros"
            );
        }
        assert!(next == at + len || extents.len() == limit, "extents end early");
    }

    fn reopen(&mut self) {
        let kill = self.used.kills && self.random.random_ratio(2, 3);
        if !kill {
            self.disk().close().expect("closes");
        }
        self.disk = None;
        if !kill && !self.made.is_raw && !self.used.kills && self.random.random_ratio(1, 4) {
            stock::assert_clean(&self.made.top);
        }
        self.open();
        assert_reads(self.disk(), &self.made.model, if kill { "after a kill" } else { "after a close" });
    }

    fn finish(mut self) {
        assert_reads(self.disk(), &self.made.model, "at the end");
        self.disk().close().expect("closes");
        self.disk = None;
        if self.made.is_raw {
            let mut bytes = std::fs::read(&self.made.top).expect("reads");
            bytes.resize(self.made.model.len(), 0);
            assert_same(&bytes, &self.made.model, 0, "the raw file");
            return;
        }
        if self.used.kills {
            stock::assert_safe(&self.made.top);
        } else {
            stock::assert_clean(&self.made.top);
        }
        assert_same(&stock::content(&self.made.top, "qcow2"), &self.made.model, 0, "as qemu-img reads it");
        for (name, model) in &self.made.snapshots {
            assert_same(&stock::snapshot_content(&self.made.top, name), model, 0, "an internal snapshot");
        }
    }
}

/// Makes a chain, uses it, and has stock tools look at it.
fn run(layers: &[LayerShape], used: Use, mut random: SmallRng) {
    let dir = scratch();
    let made = make(dir.path(), layers, &mut random);
    let mut run = Run::start(made, used, dir.path().join("journals"), random);
    for _ in 0..used.operations {
        run.step();
    }
    run.finish();
}

/// A size of a disk that is small and yet has many clusters, at random not a whole number of them.
fn some_size(random: &mut SmallRng, cluster_bits: u32) -> u64 {
    let clusters = random.random_range(5..64);
    let size = (clusters << cluster_bits).clamp(64 << 10, 10 << 20);
    if random.random() { size } else { size - random.random_range(1..=64) * 512 }
}

const ALL_BITS: std::ops::RangeInclusive<u32> = 9..=21;

#[test]
fn every_cluster_size_and_version_reads_what_was_written() {
    for_seeds(1, |seed| {
        for bits in ALL_BITS {
            for version in [2, 3] {
                let mut random = random("cluster sizes", seed * 1000 + u64::from(bits * 10 + version));
                let size = some_size(&mut random, bits);
                run(&[LayerShape { version, ..LayerShape::qcow2(bits, size) }], Use::default(), random);
            }
        }
    });
}

#[test]
fn subclusters_read_what_was_written() {
    for_seeds(2, |seed| {
        for bits in 14..=21 {
            let mut random = random("subclusters", seed * 1000 + u64::from(bits));
            let size = some_size(&mut random, bits);
            let snapshots = u32::from(random.random_ratio(1, 3));
            let compressed = random.random_ratio(1, 3).then_some("zlib");
            let top =
                LayerShape { subclusters: true, snapshots, compressed, ..LayerShape::qcow2(bits, size) };
            let base = LayerShape { subclusters: random.random(), ..LayerShape::qcow2(16, size) };
            let layers = if random.random() { vec![top] } else { vec![base, top] };
            let used = Use { kills: random.random(), operations: 200, ..Use::default() };
            run(&layers, used, random);
        }
    });
}

#[test]
fn every_refcount_width_stays_right() {
    for_seeds(1, |seed| {
        for order in 0..=6 {
            for bits in [9, 12, 16] {
                let mut random = random("refcounts", seed * 1000 + u64::from(bits * 10 + order));
                // Small clusters and wide refcounts: the refcount table must grow.
                let size = if bits == 9 { 5 << 20 } else { some_size(&mut random, bits) };
                let layer = LayerShape { refcount_bits: 1 << order, ..LayerShape::qcow2(bits, size) };
                run(&[layer], Use::default(), random);
            }
        }
    });
}

/// Layers of random cluster sizes, versions and sizes, with subclusters or without.
fn some_chain(random: &mut SmallRng, depth: usize, raw_base: bool) -> Vec<LayerShape> {
    let mut layers: Vec<LayerShape> = Vec::new();
    for _ in 0..depth {
        let bits = random.random_range(9..=18);
        let size = some_size(random, random_bits(bits));
        let version = if random.random_ratio(1, 4) { 2 } else { 3 };
        let subclusters = version == 3 && bits >= 14 && random.random();
        layers.push(LayerShape { version, subclusters, ..LayerShape::qcow2(bits, size) });
    }
    if raw_base {
        layers[0] = LayerShape::raw(random.random_range(100_000..4_000_000));
    }
    layers
}

fn random_bits(bits: u32) -> u32 {
    bits.max(14)
}

#[test]
fn chains_of_mixed_clusters_and_sizes_read_through_every_layer() {
    for_seeds(20, |seed| {
        let mut random = random("chains", seed);
        let depth = random.random_range(2..=6);
        let layers = some_chain(&mut random, depth, seed % 2 == 1);
        run(&layers, Use::default(), random);
    });
}

#[test]
fn a_raw_disk_is_written_in_place() {
    for_seeds(4, |seed| {
        let mut random = random("raw", seed);
        let size = random.random_range(1000..3_000_000);
        run(&[LayerShape::raw(size)], Use::default(), random);
    });
}

#[test]
fn compressed_clusters_read_and_are_replaced() {
    for_seeds(2, |seed| {
        for kind in ["zlib", "zstd"] {
            for bits in [9, 12, 16, 17] {
                for active in [false, true] {
                    let mut random = random("compressed", seed * 100 + u64::from(bits));
                    let size = some_size(&mut random, bits.max(14));
                    let layer = LayerShape {
                        compressed: Some(kind),
                        operations: 40,
                        ..LayerShape::qcow2(bits, size)
                    };
                    let above = LayerShape::qcow2(random.random_range(9..=16), size);
                    let layers = if active { vec![layer] } else { vec![layer, above] };
                    run(&layers, Use::default(), random);
                }
            }
        }
    });
}

#[test]
fn internal_snapshots_keep_their_content() {
    for_seeds(2, |seed| {
        for bits in [9, 10, 12, 16] {
            let mut random = random("snapshots", seed * 100 + u64::from(bits));
            let size = some_size(&mut random, bits.max(14));
            let compressed = random.random::<bool>().then_some("zlib");
            let layer = LayerShape { snapshots: 2, compressed, ..LayerShape::qcow2(bits, size) };
            let base = LayerShape::qcow2(14, size);
            let layers = if random.random() { vec![layer] } else { vec![base, layer] };
            run(&layers, Use::default(), random);
        }
    });
}

#[test]
fn preallocated_images_are_written_in_place() {
    for_seeds(1, |seed| {
        for preallocation in ["metadata", "falloc", "full"] {
            for bits in [9, 12, 16] {
                let mut random = random("preallocated", seed * 100 + u64::from(bits));
                let size = some_size(&mut random, bits.max(12));
                run(&[LayerShape { preallocation, ..LayerShape::qcow2(bits, size) }], Use::default(), random);
            }
        }
    });
}

#[test]
fn an_image_that_a_killed_qemu_left_dirty_is_repaired_and_used() {
    for_seeds(2, |seed| {
        for bits in [9, 12, 16] {
            let mut random = random("dirty", seed * 100 + u64::from(bits));
            let size = some_size(&mut random, bits.max(14));
            run(&[LayerShape { left_dirty: true, ..LayerShape::qcow2(bits, size) }], Use::default(), random);
        }
    });
}

#[test]
fn the_smallest_metadata_cache_still_answers_rightly() {
    for_seeds(3, |seed| {
        let random = random("evictions", seed);
        // 512-byte clusters: a page covers 256 KiB, so this disk has many more pages than the cache.
        let layers = vec![LayerShape::qcow2(9, 24 << 20), LayerShape::qcow2(9, 20 << 20)];
        run(&layers, Use { metadata_cache_bytes: 0, operations: 300, ..Use::default() }, random);
    });
}

#[test]
fn what_completed_is_there_after_a_kill() {
    for_seeds(12, |seed| {
        let mut random = random("kills", seed);
        let depth = random.random_range(1..=3);
        let mut layers = some_chain(&mut random, depth, seed % 3 == 2);
        if depth == 1 {
            layers =
                vec![LayerShape { snapshots: 1, ..LayerShape::qcow2(random.random_range(9..=16), 3 << 20) }];
        }
        run(&layers, Use { kills: true, operations: 150, ..Use::default() }, random);
    });
}

/// A zero entry keeps its cluster: taking it up from the journal must not free that.
#[test]
fn a_cluster_that_a_zero_entry_keeps_survives_a_kill() {
    let dir = scratch();
    let layer = LayerShape { operations: 0, ..LayerShape::qcow2(16, 1 << 20) };
    let random = random("kept", 0);
    let made = make(dir.path(), &[layer], &mut random.clone());
    let mut run = Run::start(made, Use::default(), dir.path().join("journals"), random);
    write(run.disk(), 0, &[0x11; 65536]).expect("writes");
    run.disk().flush().expect("flushes");
    run.disk().write_zeroes(range(0, 65536), false).expect("writes zeros");
    run.disk = None;
    run.open();
    run.disk().close().expect("closes");
    run.disk = None;
    stock::assert_safe(&run.made.top);
    run.open();
    write(run.disk(), 65536, &[0x22; 65536]).expect("writes");
    write(run.disk(), 0, &[0x33; 512]).expect("writes");
    run.made.model[..512].fill(0x33);
    run.made.model[65536..131_072].fill(0x22);
    run.used.kills = true;
    run.finish();
}

/// On a file system with direct I/O, whatever the scratch directory is on.
#[test]
fn direct_io_of_any_alignment_reads_what_was_written() {
    for_seeds(2, |seed| {
        for bits in [9, 12, 16] {
            let mut random = random("direct", seed * 100 + u64::from(bits));
            let dir = tempfile::tempdir().expect("a directory");
            let size = some_size(&mut random, bits.max(14));
            let top = LayerShape { subclusters: bits == 16 && seed == 1, ..LayerShape::qcow2(bits, size) };
            let layers = [LayerShape::qcow2(16, size), top];
            let made = make(dir.path(), &layers, &mut random);
            let used = Use { cache: CacheMode::Direct, operations: 60, ..Use::default() };
            let mut run = Run::start(made, used, dir.path().join("journals"), random);
            for _ in 0..used.operations {
                run.step();
            }
            run.finish();
        }
    });
}
