//! A cluster of a layer below that cannot be read: a guest's write of a part of it fails, and nothing else is lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{assert_reads, assert_same, pattern, range, read, write, zero};
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::{random, scratch, small_resources};
use rand::rngs::SmallRng;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, ErrorKind, OpenOptions};

const CLUSTER: usize = 64 << 10;
const PART: usize = 4096;
const CLUSTERS: usize = 16;
const SIZE: usize = CLUSTERS * CLUSTER;
/// The cluster whose entry in the base is damaged.
const BAD: usize = 5;

/// An empty overlay on a base with one damaged entry.
struct Made {
    _dir: tempfile::TempDir,
    top: PathBuf,
    base: PathBuf,
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
    Made { _dir: dir, top, base, model, random }
}

impl Made {
    fn open(&self) -> Arc<Disk> {
        Disk::open(&self.top, &OpenOptions::default(), &small_resources(None)).unwrap()
    }

    fn write(&mut self, disk: &Disk, at: usize, len: usize) {
        let bytes = pattern(&mut self.random, len);
        write(disk, at as u64, &bytes).unwrap();
        self.model[at..at + len].copy_from_slice(&bytes);
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
fn a_write_of_a_part_fails_alone_and_the_guest_can_be_rid_of_the_cluster() {
    for (seed, be_rid_of_it) in WAYS.iter().enumerate() {
        let mut made = made(seed as u64);
        let disk = made.open();
        for cluster in [3, 7, 8, 9] {
            made.write(&disk, cluster * CLUSTER + cluster * PART, PART);
            assert_names_base(&write(&disk, (BAD * CLUSTER) as u64, &[7; PART]).unwrap_err(), &made.base);
        }
        disk.flush().unwrap();
        disk.snapshot(&SnapshotInfo { name: "state".into(), ..SnapshotInfo::default() }).unwrap();
        // The new overlay has subclusters: nothing is copied up.
        made.write(&disk, BAD * CLUSTER + PART, PART);
        assert_names_base(&read(&disk, (BAD * CLUSTER) as u64, PART).unwrap_err(), &made.base);
        be_rid_of_it(&mut made, &disk);
        disk.flush().unwrap();
        assert_reads(&disk, &made.model, "rid of it");
        disk.close().unwrap();
        drop(disk);
        assert_clean(&made.top);
        assert_same(&content(&made.top, "qcow2"), &made.model, 0, "as qemu-img reads it");
    }
}
