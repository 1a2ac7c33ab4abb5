//! Images of every shape, made and filled by stock tools, with what they must read as.

use std::path::{Path, PathBuf};

use rand::Rng as _;
use rand::rngs::SmallRng;

use super::flat::{SECTOR, pattern, repeat, some_range, zero};
use super::stock::{path_str, qemu_img, qemu_io, try_qemu_io};

/// How one layer is made.
#[derive(Clone, Debug)]
pub struct LayerShape {
    pub raw: bool,
    pub cluster_bits: u32,
    pub version: u32,
    /// Extended L2 entries; for version 3 and clusters of 16 KiB or more.
    pub subclusters: bool,
    pub refcount_bits: u32,
    /// Bytes; a raw layer's need not be whole sectors.
    pub size: u64,
    /// Compression type of compressed clusters, and whether to write some.
    pub compressed: Option<&'static str>,
    pub preallocation: &'static str,
    /// Internal snapshots taken while it is filled.
    pub snapshots: u32,
    /// Lazy refcounts, and the dirty bit as a killed QEMU leaves it.
    pub left_dirty: bool,
    /// Writes, zero-writes and discards by stock tools.
    pub operations: u32,
}

impl LayerShape {
    /// Version 3, 16-bit refcounts, a few writes.
    pub fn qcow2(cluster_bits: u32, size: u64) -> Self {
        Self {
            raw: false,
            cluster_bits,
            version: 3,
            subclusters: false,
            refcount_bits: 16,
            size,
            compressed: None,
            preallocation: "off",
            snapshots: 0,
            left_dirty: false,
            operations: 12,
        }
    }

    pub fn raw(size: u64) -> Self {
        Self { raw: true, ..Self::qcow2(16, size) }
    }

    fn options(&self) -> String {
        let compat = if self.version == 2 { "0.10" } else { "1.1" };
        let mut options = format!("cluster_size={},compat={compat}", 1 << self.cluster_bits);
        if self.version > 2 {
            options += &format!(",refcount_bits={}", self.refcount_bits);
            options += if self.left_dirty { ",lazy_refcounts=on" } else { "" };
            options += if self.subclusters { ",extended_l2=on" } else { "" };
        }
        if let Some(kind) = self.compressed.filter(|kind| *kind != "zlib") {
            options += &format!(",compression_type={kind}");
        }
        options + &format!(",preallocation={}", self.preallocation)
    }
}

/// A chain on disk, and what its active layer must read as.
pub struct Made {
    pub top: PathBuf,
    pub is_raw: bool,
    pub version: u32,
    /// Bytes of a cluster, or of a subcluster: what a discard takes.
    pub cluster: u64,
    pub has_backing: bool,
    pub model: Vec<u8>,
    /// Name and content of the active layer's internal snapshots.
    pub snapshots: Vec<(String, Vec<u8>)>,
}

/// Makes a chain of `layers`, base first, in `dir`.
pub fn make(dir: &Path, layers: &[LayerShape], random: &mut SmallRng) -> Made {
    let mut model: Vec<u8> = Vec::new();
    let mut below: Option<(String, &str)> = None;
    let mut top = PathBuf::new();
    let mut snapshots = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        let name = format!("layer{number}");
        top = dir.join(&name);
        if layer.raw {
            assert_eq!(number, 0, "only the base is raw");
            model = raw_content(layer.size, random);
            std::fs::write(&top, &model).expect("written");
            model.resize(model.len().next_multiple_of(SECTOR as usize), 0);
            below = Some((name, "raw"));
            continue;
        }
        create(&top, layer, below.as_ref());
        model.resize(layer.size as usize, 0);
        snapshots = fill(dir, &top, layer, below.is_some(), &mut model, random);
        below = Some((name, "qcow2"));
    }
    let last = layers.last().expect("a chain has a layer");
    Made {
        top,
        is_raw: last.raw,
        version: last.version,
        cluster: match last.raw {
            true => SECTOR,
            false => (1 << last.cluster_bits) / if last.subclusters { 32 } else { 1 },
        },
        has_backing: layers.len() > 1,
        model,
        snapshots,
    }
}

/// Runs of data and holes.
fn raw_content(size: u64, random: &mut SmallRng) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    for _ in 0..8 {
        let at = random.random_range(0..size as usize);
        let len = random.random_range(1..=size as usize / 8 + 1).min(size as usize - at);
        bytes[at..at + len].copy_from_slice(&pattern(random, len));
    }
    bytes
}

fn create(path: &Path, layer: &LayerShape, below: Option<&(String, &str)>) {
    let (options, size) = (layer.options(), layer.size.to_string());
    let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    if let Some((name, format)) = below {
        args.extend(["-b", name, "-F", format]);
    }
    args.extend([path_str(path), &size]);
    qemu_img(&args);
}

/// Writes to a layer with `qemu-io`, and to the model.
fn fill(
    dir: &Path,
    path: &Path,
    layer: &LayerShape,
    has_backing: bool,
    model: &mut [u8],
    random: &mut SmallRng,
) -> Vec<(String, Vec<u8>)> {
    let mut snapshots = Vec::new();
    for round in 0..=layer.snapshots {
        // Stock tools refuse to compress over clusters that are there already.
        let mut commands = if round == 0 { compressed(dir, layer, model, random) } else { Vec::new() };
        for number in 0..layer.operations {
            let patterns = dir.join(format!("pattern{number}"));
            commands.push(stock_operation(layer, has_backing, &patterns, model, random));
        }
        if round < layer.snapshots {
            qemu_io(path, &commands);
            let name = format!("snapshot{round}");
            qemu_img(&["snapshot", "-c", &name, path_str(path)]);
            snapshots.push((name, model.to_vec()));
        } else if layer.left_dirty {
            commands.extend(["flush".to_owned(), "abort".to_owned()]);
            let output = try_qemu_io(path, &[], &commands);
            assert!(!output.status.success(), "qemu-io died");
        } else if !commands.is_empty() {
            qemu_io(path, &commands);
        }
    }
    snapshots
}

/// Writes every third cluster or so compressed: whole clusters, but for the disk's last one.
fn compressed(dir: &Path, layer: &LayerShape, model: &mut [u8], random: &mut SmallRng) -> Vec<String> {
    let cluster = 1u64 << layer.cluster_bits;
    let mut commands = Vec::new();
    let clusters = layer.size.div_ceil(cluster);
    for number in (0..clusters).filter(|_| layer.compressed.is_some()) {
        if random.random_range(0..clusters) < (clusters / 3).min(40) {
            let at = number * cluster;
            let patterns = dir.join(format!("compressed{number}"));
            let len = cluster.min(layer.size - at);
            commands.push(format!("write -q -c {}", fill_pattern(&patterns, at, len, model, random)));
        }
    }
    commands
}

/// Makes a file of a pattern, puts that in the model, and returns the arguments that write it.
fn fill_pattern(patterns: &Path, at: u64, len: u64, model: &mut [u8], random: &mut SmallRng) -> String {
    let unit = pattern(random, 61);
    std::fs::write(patterns, &unit).expect("written");
    model[at as usize..(at + len) as usize].copy_from_slice(&repeat(&unit, len as usize));
    format!("-s {} {at} {len}", path_str(patterns))
}

fn stock_operation(
    layer: &LayerShape,
    has_backing: bool,
    patterns: &Path,
    model: &mut [u8],
    random: &mut SmallRng,
) -> String {
    let cluster = 1 << layer.cluster_bits;
    let (at, len) = some_range(random, layer.size, cluster);
    let choice = random.random_range(0..10);
    if choice < 8 {
        return format!("write -q {}", fill_pattern(patterns, at, len, model, random));
    }
    // Whether a version 2 discard shows what is below depends on who does it: leave that to other tests.
    if choice == 9 && !(layer.version == 2 && has_backing) && layer.snapshots == 0 {
        let at = at - at % cluster;
        let len = cluster.min(layer.size - at);
        zero(model, at, len);
        return format!("discard -q {at} {len}");
    }
    zero(model, at, len);
    format!("write -q -z {at} {len}")
}
