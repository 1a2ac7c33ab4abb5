//! Chains to make indices of: files of vmstrata's making (which have room for a link) and stock ones, written by stock
//! tools, with mixed sizes, cluster sizes and versions.

#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(unreachable_pub, missing_docs, reason = "shared by test binaries only")]

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rand::Rng as _;
use rand::rngs::SmallRng;
use tempfile::TempDir;
use vmstrata_disk::index::{IndexOptions, IndexOutcome, IndexVerdict, build, remove, verify};
use vmstrata_disk::{CreateOptions, Format, create};
use vmstrata_qcow2::Header;
use vmstrata_qcow2::index::{IndexLink, PAGE_LEN, Root, link_place};
use vmstrata_types::{ClusterBits, HostOffset};

use crate::common::flat::write;
use crate::common::stock::{assert_clean, path_str, qemu_img, qemu_io};
use crate::common::{open, patiently, random, scratch};

/// A chain on disk: `base`, `1`, `2`, ...; the last is the active layer.
pub struct Chain {
    pub dir: TempDir,
    pub files: Vec<PathBuf>,
    formats: Vec<Format>,
}

/// How a layer's file is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    Ours,
    Stock,
    /// By stock tools, version 2.
    Old,
    /// By stock tools, with extended L2 entries.
    Subclusters,
    Raw,
}

pub const CLUSTER: usize = 512;
/// Bytes of the disks that [`five_layers`] makes: two leaves.
pub const SIZE: usize = 1024 * CLUSTER;

/// Layers 0 to 4, each with clusters of its own and some that hide others, with indices of 0 to 3; and what 4 reads as.
pub fn five_layers() -> (Chain, Vec<u8>) {
    let parts = [(10, 40), (30, 60), (500, 530), (50, 55)].map(|(from, to)| from * CLUSTER..to * CLUSTER);
    let made = Chain::with_content(&[Maker::Ours; 5], SIZE as u64, &parts, 5);
    made.0.build();
    assert_eq!(made.0.verify(), ["good"; 4]);
    made
}

impl Chain {
    pub fn new() -> Self {
        Self { dir: scratch(), files: Vec::new(), formats: Vec::new() }
    }

    /// `count` layers of our making, each with one write of 64 KiB at its own place and one at a common place.
    pub fn ours(count: usize) -> Self {
        let mut chain = Self::new();
        for number in 0..count {
            chain.add(Maker::Ours, 64 << 20, ClusterBits::DEFAULT);
            chain.write(
                number,
                &[&format!("write -P {} {}k 64k", number + 1, number * 64), "write -P 7 32M 64k"],
            );
        }
        chain
    }

    /// Layers of small clusters, each with bytes of its own: the first everywhere, all others in `parts` of the disk. With
    /// what the newest reads as.
    pub fn with_content(makers: &[Maker], size: u64, parts: &[Range<usize>], seed: u64) -> (Self, Vec<u8>) {
        let (mut chain, mut random) = (Self::new(), random("content", seed));
        let mut model = vec![0; size as usize];
        for (number, maker) in makers.iter().enumerate() {
            let path = chain.add(*maker, size, ClusterBits::MIN);
            let part = number.checked_sub(1).map_or(0..model.len(), |number| parts[number].clone());
            random.fill(&mut model[part.clone()]);
            let disk = open(&path);
            write(&disk, part.start as u64, &model[part]).expect("writes");
            disk.close().expect("closes");
        }
        (chain, model)
    }

    pub fn add(&mut self, maker: Maker, size: u64, bits: ClusterBits) -> PathBuf {
        let path = self.dir.path().join(self.files.len().to_string());
        let below = self.files.last().map(|below| below.file_name().expect("a name").to_owned());
        match maker {
            Maker::Ours => {
                let format = *self.formats.last().unwrap_or(&Format::Qcow2);
                let backing = below.map(|below| (PathBuf::from(below), format));
                let options = CreateOptions {
                    size: Some(size),
                    cluster_bits: bits,
                    backing,
                    ..CreateOptions::default()
                };
                create(&path, &options).expect("creates");
            }
            Maker::Stock | Maker::Old | Maker::Subclusters => {
                let compat = if maker == Maker::Old { "0.10" } else { "1.1" };
                let extended = if maker == Maker::Subclusters { "on" } else { "off" };
                let options = format!("cluster_size={},compat={compat},extended_l2={extended}", bits.size());
                let (size, below) =
                    (size.to_string(), below.map(|below| below.into_string().expect("UTF-8")));
                let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &options];
                let format = self.formats.last().unwrap_or(&Format::Qcow2).to_string();
                if let Some(below) = &below {
                    args.extend(["-b", below, "-F", &format]);
                }
                args.extend([path_str(&path), &size]);
                qemu_img(&args);
            }
            Maker::Raw => std::fs::write(&path, vec![0x5a; size as usize]).expect("written"),
        }
        self.formats.push(if maker == Maker::Raw { Format::Raw } else { Format::Qcow2 });
        self.files.push(path.clone());
        path
    }

    pub fn write(&self, number: usize, commands: &[&str]) {
        let commands: Vec<String> = commands.iter().map(|&command| command.to_owned()).collect();
        qemu_io(&self.files[number], &commands);
    }

    pub fn top(&self) -> &Path {
        self.files.last().expect("a layer")
    }

    pub fn sidecar(&self, number: usize) -> PathBuf {
        PathBuf::from(format!("{}.vmsx", self.files[number].display()))
    }

    /// Builds what is missing; every layer must then have an index or need none.
    pub fn build(&self) -> Vec<&'static str> {
        let built = build(self.top(), &IndexOptions::default()).expect("builds");
        built
            .layers
            .iter()
            .map(|layer| match &layer.outcome {
                IndexOutcome::Kept(_) => "kept",
                IndexOutcome::Built { sidecar: false, .. } => "file",
                IndexOutcome::Built { sidecar: true, .. } => "sidecar",
                IndexOutcome::NotNeeded => "none",
                IndexOutcome::Failed(error) => panic!("{}: {error}", layer.path.display()),
            })
            .collect()
    }

    pub fn verify(&self) -> Vec<&'static str> {
        let verified = verify(self.top(), &IndexOptions::default()).expect("verifies");
        verified.iter().map(|file| name_of(&file.verdict)).collect()
    }

    pub fn remove(&self) {
        let dropped = || remove(self.top(), &IndexOptions::default()).expect("removes").into_iter();
        patiently(|| dropped().try_for_each(|layer| layer.in_file.and(layer.sidecar).map(drop)))
            .expect("every index goes");
    }

    /// Every qcow2 file is clean for stock tools.
    pub fn assert_clean(&self) {
        for (file, format) in self.files.iter().zip(&self.formats) {
            if *format == Format::Qcow2 {
                assert_clean(file);
            }
        }
    }
}

pub fn name_of(verdict: &IndexVerdict) -> &'static str {
    match verdict {
        IndexVerdict::Good { .. } => "good",
        IndexVerdict::NotNeeded => "none",
        IndexVerdict::Missing => "missing",
        IndexVerdict::Stale { .. } => "stale",
        IndexVerdict::Damaged { .. } => "damaged",
        IndexVerdict::Wrong { at, .. } => panic!("an index says something wrong at {at:#x}"),
    }
}

/// A chain of random makers, sizes and cluster sizes, each layer with random writes.
pub fn random_chain(random: &mut SmallRng, layers: usize) -> Chain {
    let mut chain = Chain::new();
    for number in 0..layers {
        let maker = match random.random_range(0..8) {
            0 if number == 0 => Maker::Raw,
            0 | 1 => Maker::Stock,
            2 => Maker::Old,
            3 | 4 => Maker::Subclusters,
            _ => Maker::Ours,
        };
        let smallest = if maker == Maker::Subclusters { 14 } else { 9 };
        let bits = ClusterBits::new(random.random_range(smallest..=17)).expect("in range");
        let size = random.random_range(200..40_000) * 512;
        chain.add(maker, size, bits);
        if maker == Maker::Raw {
            continue;
        }
        let commands: Vec<String> =
            (0..random.random_range(0..6)).map(|_| some_write(random, size)).collect();
        qemu_io(&chain.files[number], &commands);
    }
    chain
}

fn some_write(random: &mut SmallRng, size: u64) -> String {
    let start = random.random_range(0..size / 512) * 512;
    let len = (random.random_range(1..200) * 512).min(size - start);
    match random.random_range(0..4) {
        0 => format!("write -q -z {start} {len}"),
        1 => format!("discard -q {start} {len}"),
        _ => format!("write -q -P {} {start} {len}", random.random_range(1..255)),
    }
}

/// Damages a file, and mends it again.
pub struct Damage {
    file: File,
    bytes: Vec<u8>,
    modified: SystemTime,
    /// Whether the file keeps its time of change, so that only checksums can notice.
    hidden: bool,
}

impl Damage {
    pub fn of(path: &Path, hidden: bool) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("opens");
        let modified = file.metadata().and_then(|data| data.modified()).expect("exists");
        Self { file, bytes: std::fs::read(path).expect("reads"), modified, hidden }
    }

    /// How long the file is.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Makes one bit of the byte at `at` another, for good.
    pub fn flip(&self, at: u64) {
        self.put(at, &[self.bytes[at as usize] ^ (1 << (at % 8))]);
        self.put_time();
    }

    /// Calls `look` while one bit of the byte at `at` is another.
    pub fn flipped<T>(&self, at: u64, look: impl FnOnce() -> T) -> T {
        self.flip(at);
        let seen = look();
        self.put(at, &[self.bytes[at as usize]]);
        self.mend_time();
        seen
    }

    /// Calls `look` while the file ends at `len`.
    pub fn cut<T>(&self, len: u64, look: impl FnOnce() -> T) -> T {
        self.file.set_len(len).expect("cuts");
        self.put_time();
        let seen = look();
        self.put(0, &self.bytes);
        self.mend_time();
        seen
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).expect("writes");
    }

    fn put_time(&self) {
        let time = if self.hidden { self.modified } else { self.modified + Duration::from_secs(1) };
        self.file.set_modified(time).expect("sets");
    }

    fn mend_time(&self) {
        self.file.set_modified(self.modified).expect("sets");
    }
}

/// Bytes 88 to 95 of a version 3 header.
pub fn autoclear(path: &Path) -> u64 {
    let mut bits = [0; 8];
    File::open(path).and_then(|file| file.read_exact_at(&mut bits, 88)).expect("reads");
    u64::from_be_bytes(bits)
}

/// The root of a file that has an index in it, and where the link to it lies.
pub fn root_of(path: &Path) -> (Root, HostOffset) {
    let bytes = std::fs::read(path).expect("reads");
    let header = Header::parse(&bytes, bytes.len() as u64).expect("a header");
    let place = link_place(&bytes[..512], &header).expect("room");
    let link = IndexLink::parse(&bytes[place.get() as usize..][..IndexLink::LEN]).expect("a link");
    let page = bytes[link.root.get() as usize..][..PAGE_LEN].try_into().expect("a page");
    (Root::parse(page, link.root).expect("a root").0, place)
}
