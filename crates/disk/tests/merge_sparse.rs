//! Merging keeps what is sparse sparse: holes of layers' files and clusters of zeros take no room in what they are copied into,
//! and read as before, for us and for stock tools.

use crate::common;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::common::{open, scratch};
use vmstrata_disk::merge::{Direction, Merge, MergeOptions, MergeRange, Merged, Removal};
use vmstrata_disk::{ResourceOptions, Resources};
use vmstrata_types::LayerIndex;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// Tables, and clusters on their way.
const SLACK: u64 = MIB;

/// Bytes that the host has for a file, as `du` counts them.
fn on_host(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

/// Whether the disk is served meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Road {
    Files,
    Live,
}

fn merge(road: Road, disk: &Path, layers: [u16; 2], direction: Direction) -> Merged {
    let range = MergeRange { first: LayerIndex::new(layers[0]), last: LayerIndex::new(layers[1]) };
    let options =
        MergeOptions { removal: Removal::All, beyond_own: true, direction, ..MergeOptions::default() };
    match road {
        Road::Files => {
            let resources = Resources::new(ResourceOptions::default());
            Merge::new(disk, range, &options, &resources).unwrap().run().unwrap()
        }
        Road::Live => {
            let disk = open(disk);
            let merged = Merge::of_disk(&disk, range, &options).unwrap().run().unwrap();
            disk.close().unwrap();
            merged
        }
    }
}

fn create(path: &Path, options: &str, backing: Option<&Path>) {
    let size = SIZE.to_string();
    let mut args = vec!["create", "-q", "-f", "qcow2", "-o", options];
    let backing = backing
        .map(|file| (path_str(file), if file.extension().unwrap() == "raw" { "raw" } else { "qcow2" }));
    args.extend(backing.iter().flat_map(|(file, format)| ["-b", file, "-F", format]));
    qemu_img(&[&args[..], &[path_str(path), &size]].concat());
}

fn write(path: &Path, pattern: u8, start: u64, len: u64) {
    qemu_io(path, &[format!("write -q -P {pattern} {start} {len}")]);
}

/// Makes holes of a file's zeros.
fn dig(path: &Path) {
    assert!(Command::new("fallocate").arg("-d").arg(path).status().unwrap().success());
}

/// A base of which most is zeros that the tables call data, and 1 MiB is not.
fn sparse_base(dir: &Path, kind: &str) -> PathBuf {
    let path = dir.join(if kind == "raw" { "base.raw" } else { "base.qcow2" });
    match kind {
        "raw" => std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap(),
        "written" | "dug" => {
            create(&path, "compat=1.1", None);
            write(&path, 0, 0, SIZE / 2);
        }
        preallocated => create(&path, preallocated, None),
    }
    let command = format!("write -q -P 1 {MIB} {MIB}");
    let format = if kind == "raw" { "raw" } else { "qcow2" };
    common::stock::try_qemu_io(&path, &["-f", format], &[command]);
    if kind == "dug" {
        dig(&path);
    }
    path
}

#[test]
fn a_flattened_disk_takes_no_more_room_than_its_data() {
    let kinds = ["preallocation=metadata", "preallocation=metadata,cluster_size=2M", "raw", "written", "dug"];
    for (kind, road) in kinds.into_iter().flat_map(|kind| [(kind, Road::Files), (kind, Road::Live)]) {
        let what = format!("{kind}, {road:?}");
        let dir = scratch();
        let (base, disk) = (sparse_base(dir.path(), kind), dir.path().join("disk.qcow2"));
        create(&disk, if kind == "written" { "compat=0.10" } else { "compat=1.1" }, Some(&base));
        write(&disk, 2, 3 * MIB, MIB);
        let before = content(&disk, "qcow2");
        let merged = merge(road, &disk, [0, 0], Direction::Stream);
        assert_eq!(merged.copied_bytes, MIB, "{what}");
        assert!(on_host(&disk) <= 2 * MIB + SLACK, "{what}: {}", on_host(&disk));
        assert!(content(&disk, "qcow2") == before, "{what}");
        assert_clean(&disk);
    }
}

/// Data everywhere, zeros over it in the layer that goes or stays.
fn zeros_over_data(dir: &Path, version: &str, is_dug: bool) -> [PathBuf; 4] {
    let files = ["base", "low", "middle", "disk"].map(|name| dir.join(format!("{name}.qcow2")));
    let [base, low, middle, disk] = &files;
    create(base, "compat=1.1", None);
    write(base, 9, 0, 8 * MIB);
    create(low, version, Some(base));
    write(low, 8, 4 * MIB, 8 * MIB);
    create(middle, version, Some(low));
    write(middle, 0, 2 * MIB, 12 * MIB);
    write(middle, 7, 3 * MIB + 4096, 100_000);
    if is_dug {
        dig(middle);
    }
    create(disk, version, Some(middle));
    write(disk, 6, 5 * MIB, MIB);
    files
}

#[test]
fn zeros_that_hide_data_below_are_copied_up_as_zero_clusters() {
    for (version, is_dug, road) in [
        ("compat=1.1", false, Road::Files),
        ("compat=1.1", true, Road::Files),
        ("compat=1.1", true, Road::Live),
        ("compat=0.10", false, Road::Files),
        ("compat=0.10", true, Road::Live),
    ] {
        let what = format!("{version}, dug: {is_dug}, {road:?}");
        let dir = scratch();
        let [.., disk] = zeros_over_data(dir.path(), version, is_dug);
        let before = content(&disk, "qcow2");
        let merged = merge(road, &disk, [2, 2], Direction::Stream);
        // Version 2 has no zero clusters: what lies over data below has to be written.
        let hides = if version == "compat=0.10" { 9 * MIB } else { 128 << 10 };
        assert_eq!(merged.copied_bytes, hides, "{what}");
        assert!(on_host(&disk) <= MIB + hides + SLACK, "{what}: {}", on_host(&disk));
        assert!(content(&disk, "qcow2") == before, "{what}");
        assert_clean(&disk);
    }
}

#[test]
fn zeros_that_are_written_down_give_room_back() {
    for (version, is_dug, road) in [
        ("compat=1.1", false, Road::Files),
        ("compat=1.1", true, Road::Files),
        ("compat=1.1", false, Road::Live),
        ("compat=1.1", true, Road::Live),
        ("compat=0.10", true, Road::Files),
    ] {
        let what = format!("{version}, dug: {is_dug}, {road:?}");
        let dir = scratch();
        let [_, _, middle, disk] = zeros_over_data(dir.path(), version, is_dug);
        let states = [&middle, &disk].map(|file| content(file, "qcow2"));
        let merged = merge(road, &disk, [1, 1], Direction::Commit);
        assert!(merged.is_commit, "{what}");
        assert_eq!(merged.copied_bytes, 128 << 10, "{what}");
        // What nothing lies below goes; the rest of version 2 has no other way than stored zeros.
        let left = if version == "compat=0.10" { 6 * MIB } else { 128 << 10 };
        assert!(on_host(&middle) <= left + SLACK, "{what}: {}", on_host(&middle));
        for (file, before) in [&middle, &disk].into_iter().zip(states) {
            assert!(content(file, "qcow2") == before, "{what}: {}", file.display());
            assert_clean(file);
        }
    }
}
