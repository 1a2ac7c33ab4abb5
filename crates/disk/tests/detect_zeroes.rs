//! Writes of zeros that come through a queue, by `detect-zeroes`: stock tools and the host's count of blocks are the oracles.

use crate::common;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{assert_reads, assert_same};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::{for_seeds, random, scratch};
use rand::Rng as _;
use vmstrata_disk::{DetectZeroes, Disk, Op, OpenOptions, ResourceOptions, Resources};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const CLUSTER: u64 = 64 << 10;

fn open(path: &Path, detect_zeroes: DetectZeroes) -> Arc<Disk> {
    let options = OpenOptions { detect_zeroes, ..OpenOptions::default() };
    Disk::open(path, &options, &Resources::new(ResourceOptions::default())).unwrap()
}

/// A disk of 8 MiB; with `options` it is qcow2, else raw.
fn create(dir: &Path, options: Option<&str>, backing: Option<&Path>) -> PathBuf {
    let path = dir.join(if backing.is_some() { "disk" } else { "base" });
    let size = SIZE.to_string();
    let mut args = vec!["create", "-q"];
    args.extend(options.map_or(vec!["-f", "raw"], |options| vec!["-f", "qcow2", "-o", options]));
    args.extend(backing.iter().flat_map(|path| ["-b", path_str(path), "-F", "qcow2"]));
    qemu_img(&[&args[..], &[path_str(&path), &size]].concat());
    path
}

fn put(client: &mut Client, op: Op, at: u64, bytes: &[u8]) {
    client.push(op, at, bytes.len() as u64, Some(bytes));
    client.drain().into_iter().for_each(|done| done.result.unwrap());
}

const WRITE: Op = Op::Write { fua: false };

fn close(client: Client, disk: Arc<Disk>) {
    drop(client);
    disk.close().unwrap();
}

#[test]
fn whole_clusters_of_zeros_are_marked_and_with_unmap_their_space_is_given_back() {
    use DetectZeroes::{Off, On, Unmap};
    for (options, how, is_given_back) in [
        (Some("compat=1.1"), Off, false),
        (Some("compat=1.1"), On, false),
        (Some("compat=1.1"), Unmap, true),
        (Some("compat=0.10"), Unmap, true),
        (None, On, false),
        (None, Unmap, true),
    ] {
        let what = format!("{options:?}, {how:?}");
        let dir = scratch();
        let path = create(dir.path(), options, None);
        let disk = open(&path, how);
        let mut client = Client::new(&disk, 8);
        put(&mut client, WRITE, 0, &vec![7; 4 * MIB as usize]);
        put(&mut client, WRITE, MIB, &vec![0; 2 * MIB as usize]);
        put(&mut client, Op::Write { fua: true }, 6 * MIB, &vec![0; MIB as usize]);
        close(client, disk);
        let format = if options.is_some() { "qcow2" } else { "raw" };
        let mut model = vec![7; 4 * MIB as usize];
        model[MIB as usize..3 * MIB as usize].fill(0);
        model.resize(SIZE as usize, 0);
        assert_same(&content(&path, format), &model, 0, &what);
        let on_host = path.metadata().unwrap().blocks() * 512;
        assert_eq!(on_host < 3 * MIB, is_given_back, "{what}: {on_host}");
        if options.is_some() {
            assert_clean(&path);
            // Zeros that were never there get no cluster.
            let end = path.metadata().unwrap().len();
            assert_eq!(end > 5 * MIB, how == Off, "{what}: {end}");
        }
    }
}

#[test]
fn zeros_hide_what_lies_below() {
    for version in ["compat=1.1", "compat=0.10"] {
        let dir = scratch();
        let base = create(dir.path(), Some("compat=1.1"), None);
        common::stock::qemu_io(&base, &["write -q -P 9 0 8M".to_owned()]);
        let path = create(dir.path(), Some(version), Some(&base));
        let disk = open(&path, DetectZeroes::Unmap);
        let mut client = Client::new(&disk, 8);
        put(&mut client, WRITE, MIB - 512, &vec![0; 2 * MIB as usize]);
        let mut model = vec![9; SIZE as usize];
        model[MIB as usize - 512..3 * MIB as usize - 512].fill(0);
        assert_reads(&disk, &model, version);
        close(client, disk);
        assert_same(&content(&path, "qcow2"), &model, 0, version);
        assert_clean(&path);
        let on_host = path.metadata().unwrap().blocks() * 512;
        assert_eq!(on_host < MIB, version == "compat=1.1", "{version}: {on_host}");
    }
}

/// Also parts of clusters, and clusters that are zeros but for a byte.
#[test]
fn what_is_written_reads_as_a_flat_array_does() {
    for_seeds(6, |seed| {
        let mut random = random("detect zeroes", seed);
        let how = [DetectZeroes::On, DetectZeroes::Unmap][seed as usize % 2];
        let options = [Some("compat=1.1"), Some("compat=0.10"), None][seed as usize / 2];
        let dir = scratch();
        let path = create(dir.path(), options, None);
        let disk = open(&path, how);
        let mut client = Client::new(&disk, 8);
        let mut model = vec![0; SIZE as usize];
        for _ in 0..150 {
            let start = random.random_range(0..SIZE / 512) * 512;
            let start = if random.random() { start / CLUSTER * CLUSTER } else { start };
            let len = (random.random_range(1..256) * 512).min(SIZE - start);
            let mut bytes = vec![if random.random() { 0 } else { random.random() }; len as usize];
            if random.random_ratio(1, 4) {
                bytes[random.random_range(0..len as usize)] = 5;
            }
            put(&mut client, WRITE, start, &bytes);
            model[start as usize..(start + len) as usize].copy_from_slice(&bytes);
        }
        assert_reads(&disk, &model, &format!("seed {seed}"));
        close(client, disk);
        let format = if options.is_some() { "qcow2" } else { "raw" };
        assert_same(&content(&path, format), &model, 0, &format!("seed {seed}"));
        if options.is_some() {
            assert_clean(&path);
        }
    });
}
