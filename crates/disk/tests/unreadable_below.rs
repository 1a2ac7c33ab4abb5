//! A cluster of a layer below that cannot be read, under one that the guest wrote in part: that cluster's rest is lost, and
//! nothing else may be.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::faulty::FaultyFiles;
use common::flat::{assert_reads, assert_same, pattern, range, read, write, zero};
use common::stock::{assert_clean, assert_safe, content, path_str, qemu_img};
use common::{open_read_only, random, scratch, small_resources};
use rand::rngs::SmallRng;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, ErrorKind, OpenOptions, Resources};
use vmstrata_store::FaultPlan;

const CLUSTER: usize = 64 << 10;
const PART: usize = 4096;
const CLUSTERS: usize = 16;
const SIZE: usize = CLUSTERS * CLUSTER;
/// The cluster whose entry in the base is damaged.
const BAD: usize = 5;

/// An empty overlay on a base with one damaged entry.
struct Made {
    dir: tempfile::TempDir,
    top: PathBuf,
    base: PathBuf,
    /// The base as it was before it was damaged.
    sound: Vec<u8>,
    model: Vec<u8>,
    random: SmallRng,
}

fn made(seed: u64) -> Made {
    let (dir, mut random) = (scratch(), random("unreadable below", seed));
    let model = pattern(&mut random, SIZE);
    let path = |name: &str| dir.path().join(name);
    let (raw, base, top) = (path("raw"), path("base"), path("top"));
    std::fs::write(&raw, &model).unwrap();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&base)]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", path_str(&top)]);
    let sound = std::fs::read(&base).unwrap();
    let word = |at: usize| u64::from_be_bytes(sound[at..at + 8].try_into().unwrap()) & 0x00FF_FFFF_FFFF_FE00;
    let entry = word(word(40) as usize) as usize + BAD * 8;
    let mut damaged = sound.clone();
    // No multiple of the cluster size.
    damaged[entry..entry + 8].copy_from_slice(&(1 << 63 | word(entry) | 0x200).to_be_bytes());
    std::fs::write(&base, damaged).unwrap();
    Made { dir, top, base, sound, model, random }
}

impl Made {
    /// None of what lies below is at hand: first writes are put off, and nobody copies before it is asked for.
    fn open(&self) -> Arc<Disk> {
        self.open_with(&FaultyFiles::new(&FaultPlan::new()).resources())
    }

    fn open_with(&self, resources: &Arc<Resources>) -> Arc<Disk> {
        Disk::open(&self.top, &OpenOptions::default(), resources).unwrap()
    }

    fn write(&mut self, disk: &Disk, at: usize, len: usize) {
        let bytes = pattern(&mut self.random, len);
        write(disk, at as u64, &bytes).unwrap();
        self.model[at..at + len].copy_from_slice(&bytes);
    }

    /// Writes a part of the bad cluster, and of some before and after it.
    fn write_parts(&mut self, disk: &Disk) {
        for cluster in [3, BAD, 7, 8, 9] {
            self.write(disk, cluster * CLUSTER + cluster * PART, PART);
        }
    }

    /// Everything that can be read is right; of the bad cluster this is what the guest wrote.
    fn assert_reads_rest(&self, disk: &Disk) {
        let bad = BAD * CLUSTER;
        for (at, len) in [(0, bad), (bad + BAD * PART, PART), (bad + CLUSTER, SIZE - bad - CLUSTER)] {
            assert_same(
                &read(disk, at as u64, len).unwrap(),
                &self.model[at..at + len],
                at as u64,
                "in part",
            );
        }
        read(disk, bad as u64, PART).unwrap_err();
    }
}

fn assert_names_base(error: &vmstrata_disk::Error, base: &Path) {
    assert!(matches!(error.kind(), ErrorKind::Entry { .. }), "{error}");
    assert!(error.to_string().contains(path_str(base)), "{error}");
}

/// What a guest can do to be rid of it.
const WAYS: [fn(&mut Made, &Disk); 4] = [
    |made, disk| made.write(disk, BAD * CLUSTER, CLUSTER),
    // Begins with a cluster without an entry, and ends within one.
    |made, disk| made.write(disk, (BAD - 1) * CLUSTER + PART, 3 * CLUSTER),
    |made, disk| {
        disk.write_zeroes(range((BAD * CLUSTER) as u64, CLUSTER as u64), false).unwrap();
        zero(&mut made.model, (BAD * CLUSTER) as u64, CLUSTER as u64);
    },
    |made, disk| {
        disk.discard(range((BAD * CLUSTER) as u64, CLUSTER as u64)).unwrap();
        zero(&mut made.model, (BAD * CLUSTER) as u64, CLUSTER as u64);
    },
];

#[test]
fn all_else_reaches_stable_storage_and_the_guest_can_be_rid_of_it() {
    for (seed, be_rid_of_it) in WAYS.iter().enumerate() {
        let mut made = made(seed as u64);
        let disk = made.open();
        made.write_parts(&disk);
        for _ in 0..2 {
            assert_names_base(&disk.flush().unwrap_err(), &made.base);
        }
        let copy = made.top.with_file_name("copy");
        std::fs::copy(&made.top, &copy).unwrap();
        let stored = open_read_only(&copy);
        for at in [3, 7, 8, 9].map(|cluster| cluster * CLUSTER) {
            let found = read(&stored, at as u64, CLUSTER).unwrap();
            assert_same(&found, &made.model[at..at + CLUSTER], at as u64, "on stable storage");
        }
        drop(stored);
        made.assert_reads_rest(&disk);
        let info = SnapshotInfo { name: "state".into(), ..SnapshotInfo::default() };
        assert_names_base(&disk.snapshot(&info).unwrap_err(), &made.base);
        be_rid_of_it(&mut made, &disk);
        disk.flush().unwrap();
        disk.snapshot(&info).unwrap();
        assert_reads(&disk, &made.model, "rid of it");
        disk.close().unwrap();
        drop(disk);
        assert_clean(&made.top);
        assert_same(&content(&made.top, "qcow2"), &made.model, 0, "as qemu-img reads it");
    }
}

#[test]
fn a_disk_that_has_it_is_opened_again_and_has_everything() {
    let mut made = made(10);
    let journals = made.dir.path().join("journals");
    let resources = || FaultyFiles::new(&FaultPlan::new()).resources_with(Some(journals.clone()));
    let disk = made.open_with(&resources());
    made.write_parts(&disk);
    assert_names_base(&disk.close().unwrap_err(), &made.base);
    drop(disk);
    for _ in 0..2 {
        let disk = made.open_with(&resources());
        made.assert_reads_rest(&disk);
        // It goes on, and what it does is as safe as ever.
        made.write(&disk, 11 * CLUSTER + PART, PART);
        made.write(&disk, BAD * CLUSTER + BAD * PART, PART);
        assert_names_base(&disk.flush().unwrap_err(), &made.base);
        made.write(&disk, 12 * CLUSTER, CLUSTER);
        // As if it were killed.
        drop(disk);
    }
    std::fs::write(&made.base, &made.sound).unwrap();
    let disk = made.open_with(&small_resources(Some(&journals)));
    assert_reads(&disk, &made.model, "mended");
    disk.close().unwrap();
    drop(disk);
    assert_eq!(std::fs::read_dir(&journals).unwrap().count(), 0, "journals are left");
    // What a killed process claimed is leaked.
    assert_safe(&made.top);
    assert_same(&content(&made.top, "qcow2"), &made.model, 0, "as qemu-img reads it");
}
