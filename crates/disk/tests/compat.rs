//! Both ways between stock tools and us: what they write we read, what we write they read, and both say the same of
//! where it is.

use crate::common;
use std::path::Path;

use crate::common::flat::{assert_reads, assert_same, pattern, range, some_range, write, zero};
use crate::common::ledger::{steps, take};
use crate::common::shape::{LayerShape, make};
use crate::common::stock::{Mapped, path_str, qemu_img};
use crate::common::{for_seeds, open, open_read_only, random, scratch, stock};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{CreateOptions, Disk, Extent, ExtentKind, Format, create};
use vmstrata_qcow2::RefcountOrder;
use vmstrata_types::ClusterBits;

/// What `qemu-img map` and extents must agree on, byte range by byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    zero: bool,
    /// Layer, counted from the active one, and place in its file; of data only.
    data: Option<(u64, Option<u64>)>,
}

fn of_stock(line: &Mapped) -> (u64, u64, Said) {
    let data = (line.data || line.offset.is_some()).then_some((line.depth, line.offset));
    (line.start, line.len, Said { zero: line.zero, data })
}

fn of_ours(extent: &Extent, top: u64) -> (u64, u64, Said) {
    let depth = extent.layer.map(|layer| top - u64::from(layer.get()));
    let data = match extent.kind {
        ExtentKind::Data => Some((depth.expect("a layer"), extent.host.map(|host| host.get()))),
        ExtentKind::Compressed => Some((depth.expect("a layer"), None)),
        ExtentKind::Zero | ExtentKind::Hole => None,
    };
    (extent.range.start.get(), extent.range.len, Said { zero: extent.kind.reads_zero(), data })
}

/// Cuts runs at the borders of both lists and compares piece by piece.
fn assert_maps_agree(disk: &Disk, path: &Path, format: &str, size: u64) {
    let top = disk.layers().len() as u64 - 1;
    let extents = disk.extents_by_place(range(0, disk.size()), usize::MAX).expect("maps");
    let ours: Vec<_> = extents.iter().map(|extent| of_ours(extent, top)).collect();
    let stock: Vec<_> = stock::map(path, format).iter().map(of_stock).collect();
    let mut borders: Vec<u64> = ours.iter().chain(&stock).map(|(start, ..)| *start).collect();
    borders.sort_unstable();
    borders.dedup();
    for at in borders.into_iter().filter(|at| *at < size) {
        let find = |list: &[(u64, u64, Said)]| {
            let (start, _, said) =
                *list.iter().find(|(start, len, _)| (*start..start + len).contains(&at)).expect("whole");
            let data = said.data.map(|(depth, place)| (depth, place.map(|place| place + at - start)));
            Said { data, ..said }
        };
        let (ours, stock) = (find(&ours), find(&stock));
        // Stock tools also look for holes in the file: what the tables call data they may call zeros.
        let agree = ours == stock || stock.zero && (ours.zero || ours.data == stock.data);
        assert!(agree, "at {at:#x} of {}: ours says {ours:?}, stock {stock:?}", path.display());
    }
}

#[test]
fn images_of_stock_tools_read_and_map_as_they_say() {
    for_seeds(1, |seed| {
        for bits in [9, 10, 12, 14, 16, 18, 21] {
            for (version, compressed, subclusters) in [
                (2, None, false),
                (2, Some("zlib"), false),
                (3, None, false),
                (3, Some("zlib"), false),
                (3, Some("zstd"), false),
                (3, None, true),
                (3, Some("zlib"), true),
            ] {
                if subclusters && bits < 14 {
                    continue;
                }
                for backing in ["none", "qcow2", "raw", "longer", "shorter"] {
                    let mut random = random(backing, seed * 100_000 + u64::from(bits * 100 + version));
                    let size = (8 << bits).clamp(96 << 10, 8 << 20) + 1024;
                    let plain = LayerShape::qcow2(bits, size);
                    let operations = if subclusters { 25 } else { 9 };
                    let layer = LayerShape { version, compressed, subclusters, operations, ..plain };
                    let below = match backing {
                        "none" => vec![],
                        "raw" => vec![LayerShape::raw(size - 700)],
                        "longer" => vec![LayerShape::qcow2(13, size + 70_000 / 512 * 512)],
                        "shorter" => vec![LayerShape::qcow2(13, size / 2 / 512 * 512)],
                        "qcow2" if subclusters => {
                            let bits = random.random_range(14..=17);
                            vec![LayerShape { subclusters, ..LayerShape::qcow2(bits, size) }]
                        }
                        _ => vec![LayerShape::qcow2(random.random_range(9..=17), size)],
                    };
                    let dir = scratch();
                    let layers = [below, vec![layer]].concat();
                    let made = make(dir.path(), &layers, &mut random);
                    let disk = open_read_only(&made.top);
                    let what =
                        format!("bits {bits}, version {version}, {compressed:?}, {subclusters}, {backing}");
                    assert_reads(&disk, &made.model, &what);
                    assert_maps_agree(&disk, &made.top, "qcow2", size);
                }
            }
        }
    });
}

/// An image made by us, with or without a backing file, used by us.
fn ours(
    dir: &Path,
    bits: u32,
    (version, subclusters): (u32, bool),
    backing: Option<Format>,
    random: &mut SmallRng,
) -> (std::path::PathBuf, Vec<u8>) {
    let size = (8 << bits).clamp(96 << 10, 8 << 20) + 1024;
    let mut model = vec![0; size as usize];
    if let Some(format) = backing {
        let base = match format {
            Format::Raw => LayerShape::raw(size / 2 + 13),
            Format::Qcow2 => LayerShape::qcow2(14, size + 4096),
        };
        let made = make(dir, &[base], random);
        model = made.model;
        model.resize(size as usize, 0);
    }
    let path = dir.join("ours");
    let options = CreateOptions {
        size: Some(size),
        cluster_bits: ClusterBits::new(bits).expect("allowed"),
        version,
        subclusters,
        refcount_order: RefcountOrder::new(if version == 2 { 4 } else { random.random_range(0..=6) })
            .expect("allowed"),
        backing: backing.map(|format| ("layer0".into(), format)),
        ..CreateOptions::default()
    };
    create(&path, &options).expect("creates");
    let disk = open(&path);
    for _ in 0..25 {
        let (at, len) = some_range(random, size, 1 << bits);
        match random.random_range(0..6) {
            0 => {
                disk.write_zeroes(range(at, len), random.random()).expect("writes zeros");
                zero(&mut model, at, len);
            }
            1 if version == 3 => {
                let at = at >> bits << bits;
                let len = (1u64 << bits).min(size - at);
                disk.discard(range(at, len)).expect("discards");
                zero(&mut model, at, len);
            }
            _ => {
                let bytes = pattern(random, len as usize);
                write(&disk, at, &bytes).expect("writes");
                model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
            }
        }
    }
    disk.close().expect("closes");
    (path, model)
}

#[test]
fn our_images_read_and_map_as_we_say() {
    for_seeds(1, |seed| {
        for bits in 9..=21 {
            for (version, subclusters) in [(2, false), (3, false), (3, true)] {
                if subclusters && bits < 14 {
                    continue;
                }
                for backing in [None, Some(Format::Qcow2), Some(Format::Raw)] {
                    let dir = scratch();
                    let mut random = random("ours", seed * 100_000 + u64::from(bits * 100 + version));
                    let (path, model) = ours(dir.path(), bits, (version, subclusters), backing, &mut random);
                    stock::assert_clean(&path);
                    let raw = dir.path().join("model");
                    std::fs::write(&raw, &model).expect("written");
                    let same = ["compare", "-q", "-f", "raw", "-F", "qcow2", path_str(&raw), path_str(&path)];
                    qemu_img(&same);
                    assert_maps_agree(&open_read_only(&path), &path, "qcow2", model.len() as u64);
                }
            }
        }
    });
}

/// What is done to each of the clusters below: a place in the cluster and a length, in eighths of a subcluster.
const OPERATIONS: [(&str, u64, u64); 10] = [
    ("write", 11, 3),
    ("write", 16, 8),
    ("write", 20, 29),
    ("write", 0, 256),
    ("zero", 11, 3),
    ("zero", 16, 8),
    ("zero", 20, 29),
    ("zero", 0, 256),
    ("unmap", 0, 256),
    ("discard", 0, 256),
];

/// Clusters of each kind: unallocated, in part, whole; plain zeros, zeros with a cluster, zeros in part, data and zeros; compressed, the
/// disk's last one.
fn every_kind(cluster: u64) -> Vec<String> {
    let sub = cluster / 32;
    let at = |number: u64, sub_number: u64| number * cluster + sub_number * sub;
    let part = |number: u64| (at(number, 2), 2 * sub + sub / 2);
    let ((one, len), (four, _), (five, _)) = (part(1), part(4), part(5));
    vec![
        format!("write -q -c -P 9 {} {}", at(7, 0), cluster - 512),
        format!("write -q -P 1 {one} {len}"),
        format!("write -q -P 2 {} {cluster}", at(2, 0)),
        format!("write -q -z -u {} {cluster}", at(3, 0)),
        format!("write -q -P 3 {} {cluster}", at(4, 0)),
        format!("write -q -z {} {cluster}", at(4, 0)),
        format!("write -q -P 4 {four} {len}"),
        format!("write -q -z -u {five} {}", 2 * sub),
        format!("write -q -P 5 {} {cluster}", at(6, 0)),
        format!("write -q -z {} {}", at(6, 1), 4 * sub),
    ]
}

/// By us and by stock tools: each operation on each kind of cluster, of each size, over backing files of three lengths.
#[test]
fn every_operation_on_every_kind_of_subclusters_reads_as_it_must() {
    let dir = scratch();
    for bits in 14..=21 {
        for (turn, (operation, first, len)) in OPERATIONS.into_iter().enumerate() {
            let cluster = 1u64 << bits;
            let size = 8 * cluster - 512;
            let below = [0, size / 2, size + cluster][(turn + bits as usize) % 3];
            let what = format!("{operation} {first} {len}, clusters of 2^{bits}, {below} bytes below");
            let base = vec![0x77; below as usize];
            std::fs::write(dir.path().join("base"), &base).expect("written");
            let path = |name: &str| dir.path().join(name);
            let (ours, stocks) = (path("ours"), path("stocks"));
            let options = format!("extended_l2=on,cluster_size={cluster}");
            let text = size.to_string();
            let mut create = vec!["create", "-q", "-f", "qcow2", "-o", &options, path_str(&ours), &text];
            create.extend(if below > 0 { &["-b", "base", "-F", "raw"][..] } else { &[] });
            qemu_img(&create);
            stock::qemu_io(&ours, &every_kind(cluster));
            std::fs::copy(&ours, &stocks).expect("copied");
            let mut model = stock::content(&ours, "qcow2");
            let disk = open(&ours);
            let mut commands = Vec::new();
            for number in 0..8 {
                let at = number * cluster + first * cluster / 256;
                let len = (len * cluster / 256).min(size - at);
                let fill = if operation == "write" { 0x42 } else { 0 };
                model[at as usize..(at + len) as usize].fill(fill);
                let (done, command) = match operation {
                    "write" => (write(&disk, at, &vec![fill; len as usize]), "write -q -P 0x42"),
                    "zero" => (disk.write_zeroes(range(at, len), false), "write -q -z"),
                    "unmap" => (disk.write_zeroes(range(at, len), true), "write -q -z -u"),
                    _ => (disk.discard(range(at, len)), "discard -q"),
                };
                done.unwrap_or_else(|error| panic!("{what}: {error}"));
                commands.push(format!("{command} {at} {len}"));
            }
            assert_reads(&disk, &model, &what);
            disk.close().expect("closes");
            drop(disk);
            stock::qemu_io(&stocks, &commands);
            for path in [&ours, &stocks] {
                stock::assert_clean(path);
                let disk = open_read_only(path);
                assert_reads(&disk, &model, &what);
                assert_maps_agree(&disk, path, "qcow2", size);
            }
            qemu_img(&["compare", "-q", path_str(&ours), path_str(&stocks)]);
            for name in ["ours", "stocks"] {
                std::fs::remove_file(path(name)).expect("removed");
            }
        }
    }
}

/// Turns: they write, we write, they write again, and so on, on one image with an internal snapshot between.
#[test]
fn an_image_goes_back_and_forth_between_stock_tools_and_us() {
    for_seeds(4, |seed| {
        let dir = scratch();
        let mut random = random("turns", seed);
        let subclusters = seed % 2 == 1;
        let bits = random.random_range(if subclusters { 14..=17 } else { 9..=16 });
        let top = LayerShape { subclusters, ..LayerShape::qcow2(bits, 1 << 20) };
        let made = make(dir.path(), &[LayerShape::qcow2(14, 1 << 20), top], &mut random);
        let mut model = made.model;
        for turn in 0..5u8 {
            let (at, len) = some_range(&mut random, model.len() as u64, made.cluster);
            stock::qemu_io(&made.top, &[format!("write -q -P {} {at} {len}", turn + 1)]);
            model[at as usize..(at + len) as usize].fill(turn + 1);
            if turn == 2 {
                qemu_img(&["snapshot", "-c", "middle", path_str(&made.top)]);
            }
            let disk = open(&made.top);
            assert_reads(&disk, &model, "after their turn");
            for step in steps(&mut random, 20, model.len() as u64, made.cluster) {
                take(&disk, &step).expect("no faults here");
            }
            model = common::flat::read(&disk, 0, model.len()).expect("reads");
            disk.close().expect("closes");
            drop(disk);
            stock::assert_clean(&made.top);
            assert_same(&stock::content(&made.top, "qcow2"), &model, 0, "after our turn");
        }
    });
}

/// Persistent dirty bitmaps do not follow our writes: after one of our sessions stock tools must not believe them.
#[test]
fn persistent_bitmaps_are_not_believed_after_our_writes() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "4M"]);
    qemu_img(&["bitmap", "--add", path_str(&path), "dirty"]);
    assert!(qemu_img(&["info", path_str(&path)]).contains("bitmaps"));
    let disk = open(&path);
    write(&disk, 0, &[0x11; 65536]).expect("writes");
    disk.close().expect("closes");
    drop(disk);
    let info = qemu_img(&["info", path_str(&path)]);
    assert!(info.contains("name: dirty") && info.contains("in-use"), "{info}");
    qemu_img(&["check", path_str(&path)]);
    qemu_img(&["bitmap", "--remove", path_str(&path), "dirty"]);
    qemu_img(&["check", path_str(&path)]);
}
