//! The map against a slow walk: for every sector of a chain, layer by layer from the top, straight from the tables in
//! the files.

use std::path::Path;

use crate::common::flat::{SECTOR, range, write};
use crate::common::shape::{LayerShape, make};
use crate::common::{for_seeds, random, scratch};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{Disk, ExtentKind, OpenOptions, ResourceOptions, Resources};

/// A layer's file in memory, read without any help from the engine.
struct Walked {
    bytes: Vec<u8>,
    raw: bool,
    size: u64,
    bits: u32,
    version: u32,
    has_subclusters: bool,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// What a layer says of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Nothing,
    Zero,
    Compressed,
    Data(u64),
}

impl Walked {
    fn read(path: &Path, raw: bool) -> Self {
        let bytes = std::fs::read(path).expect("reads");
        if raw {
            let size = (bytes.len() as u64).next_multiple_of(SECTOR);
            return Self { bytes, raw, size, bits: 0, version: 0, has_subclusters: false };
        }
        let (version, bits, size) = (half(&bytes, 4), half(&bytes, 20), word(&bytes, 24));
        let has_subclusters = version > 2 && word(&bytes, 72) >> 4 & 1 == 1;
        Self { bytes, raw, size, bits, version, has_subclusters }
    }

    fn answer(&self, at: u64) -> Answer {
        if self.raw {
            return Answer::Data(at);
        }
        let entry_bits = if self.has_subclusters { 4 } else { 3 };
        let l2_bits = self.bits - entry_bits;
        let mask = 0x00ff_ffff_ffff_fe00u64;
        let l1 = word(&self.bytes, 40) + (at >> (self.bits + l2_bits)) * 8;
        let table = word(&self.bytes, l1 as usize) & mask;
        if table == 0 {
            return Answer::Nothing;
        }
        let index = at >> self.bits & ((1 << l2_bits) - 1);
        let place = (table + (index << entry_bits)) as usize;
        let entry = word(&self.bytes, place);
        let states = if self.has_subclusters { word(&self.bytes, place + 8) } else { 0 };
        let states = states >> (at >> (self.bits - 5) & 31);
        if entry >> 62 & 1 == 1 {
            Answer::Compressed
        } else if self.has_subclusters && states >> 32 & 1 == 1 {
            Answer::Zero
        } else if self.has_subclusters && states & 1 == 0 {
            Answer::Nothing
        } else if self.version > 2 && entry & 1 == 1 {
            Answer::Zero
        } else if entry & mask == 0 {
            Answer::Nothing
        } else {
            Answer::Data((entry & mask) + (at & ((1 << self.bits) - 1)))
        }
    }
}

/// The first layer from the top that says something, unless a layer above it ends before the sector.
fn walk(layers: &[Walked], at: u64) -> (Option<usize>, Answer) {
    for (depth, layer) in layers.iter().enumerate().rev() {
        if at >= layer.size {
            break;
        }
        match layer.answer(at) {
            Answer::Nothing => {}
            answer => return (Some(depth), answer),
        }
    }
    (None, Answer::Nothing)
}

fn assert_map(disk: &Disk, layers: &[Walked]) {
    let size = layers.last().expect("a layer").size;
    let mut at = 0;
    for extent in disk.extents_by_place(range(0, size), usize::MAX).expect("maps") {
        assert_eq!(extent.range.start.get(), at, "a gap");
        while at < extent.range.end().get() {
            let (layer, answer) = walk(layers, at);
            let host = extent.host.map(|host| host.get() + at - extent.range.start.get());
            let found = match extent.kind {
                ExtentKind::Data => Answer::Data(host.expect("data is somewhere")),
                ExtentKind::Compressed => Answer::Compressed,
                // Of a raw layer: a hole in its file, or past its end.
                ExtentKind::Zero if layers[extent.layer.expect("a layer").index()].raw => Answer::Data(at),
                ExtentKind::Zero => Answer::Zero,
                ExtentKind::Hole => Answer::Nothing,
            };
            let found = (extent.layer.map(|layer| layer.index()), found);
            assert_eq!(found, (layer, answer), "sector at {at:#x}: the map is first");
            at += SECTOR;
        }
    }
    assert_eq!(at, size);
}

fn some_layers(random: &mut SmallRng, depth: usize, bits: std::ops::RangeInclusive<u32>) -> Vec<LayerShape> {
    let mut layers: Vec<LayerShape> = (0..depth)
        .map(|_| {
            let bits = random.random_range(bits.clone());
            let size = random.random_range(200..1500) * 512;
            let version = if random.random_ratio(1, 4) { 2 } else { 3 };
            let compressed = random.random_ratio(1, 3).then_some("zlib");
            let subclusters = version == 3 && bits >= 14 && random.random();
            let operations = if subclusters { 15 } else { 5 };
            LayerShape { version, compressed, subclusters, operations, ..LayerShape::qcow2(bits, size) }
        })
        .collect();
    if random.random() {
        layers[0] = LayerShape::raw(random.random_range(1000..700_000));
    }
    layers
}

fn check(depth: usize, bits: std::ops::RangeInclusive<u32>, metadata_cache_bytes: u64, mut random: SmallRng) {
    let dir = scratch();
    let shapes = some_layers(&mut random, depth, bits);
    let made = make(dir.path(), &shapes, &mut random);
    let read = |number: usize| Walked::read(&dir.path().join(format!("layer{number}")), shapes[number].raw);
    let resources = || {
        Resources::new(ResourceOptions {
            metadata_cache_bytes,
            max_open_files: 3,
            ..ResourceOptions::default()
        })
    };
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = Disk::open(&made.top, &options, &resources()).expect("opens");
    assert_map(&disk, &(0..depth).map(read).collect::<Vec<_>>());
    drop(disk);
    if made.is_raw {
        return;
    }
    // The same with an active layer on top, some of it committed.
    let disk = Disk::open(&made.top, &OpenOptions::default(), &resources()).expect("opens");
    write(&disk, 0, &[0x77; 512]).expect("writes");
    disk.write_zeroes(range(100 * 512, 30 * 512), true).expect("writes zeros");
    disk.flush().expect("flushes");
    assert_map(&disk, &(0..depth).map(read).collect::<Vec<_>>());
    disk.close().expect("closes");
}

#[test]
fn short_chains_map_as_a_walk_finds_them() {
    for_seeds(20, |seed| {
        let mut random = random("short", seed);
        let depth = random.random_range(1..=6);
        check(depth, 9..=17, 0, random);
    });
}

/// Long chains are read at once, by several threads, when they are opened.
#[test]
fn long_chains_map_as_a_walk_finds_them() {
    for_seeds(4, |seed| check(20, 9..=16, 8 << 20, random("long", seed)));
}

/// Too little cache for reading ahead: pages are made and made again.
#[test]
fn long_chains_of_large_clusters_map_as_a_walk_finds_them() {
    for_seeds(2, |seed| check(18, 16..=21, 0, random("large", seed)));
}
