//! The operations in the middle of which the power fails, and what they begin with.

#![allow(unreachable_pub, missing_docs, reason = "shared by test binaries only")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::Rng as _;
use vmstrata_disk::index::{IndexOptions, build};
use vmstrata_disk::merge::{Direction, Merge, MergeOptions, MergeRange, Removal, ranges_of};
use vmstrata_disk::snapshot::{self, PrepareOptions, RevertOptions, SnapshotInfo};
use vmstrata_disk::{Disk, OpenOptions, Resources};
use vmstrata_store::FaultPlan;
use vmstrata_types::LayerIndex;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{pattern, write};
use crate::common::ledger::{Step, steps, take};
use crate::common::stock::{path_str, qemu_img};
use crate::common::traced::MARKS;
use crate::common::{open, random};

/// What a child finds its orders in: "OPERATION SEED DIRECTORY".
pub const ORDERS: &str = "VMSTRATA_TEST_POWER_ORDERS";
pub const SIZE: u64 = 300 << 10;
pub const CLUSTER: u64 = 4096;
/// What takes the place of a layer.
pub const DRAFT: &str = ".web.qcow2.part";
/// The steps of a guest during a merge.
pub const STEPS: usize = 40;
/// What a child says when the operation has ended; less are the ends of steps, twice, and one for each that has begun.
pub const DONE: u64 = 1 << 32;

pub fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

/// Files whose every change is a system call of its own.
pub fn resources() -> Arc<Resources> {
    FaultyFiles::new(&FaultPlan::new()).usual_resources()
}

/// `web.qcow2` with s0, s1 and s2, and `data.qcow2` without.
pub fn make(dir: &Path, seed: u64) {
    let mut random = random("power", seed);
    let path = |name: &str| dir.join(name);
    // By a stock tool: such a layer's index lies beside it.
    for name in ["web.qcow2", "data.qcow2"] {
        let options = format!("cluster_size={CLUSTER}");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, path_str(&path(name)), &SIZE.to_string()]);
    }
    for number in 0..4 {
        let disk = open(&path("web.qcow2"));
        for _ in 0..12 {
            let at = random.random_range(0..SIZE / 1024 - 16) * 1024;
            let len = random.random_range(1..16) * 1024;
            write(&disk, at, &pattern(&mut random, len)).unwrap();
        }
        disk.close().unwrap();
        drop(disk);
        if number < 3 {
            take_snapshot(&[path("web.qcow2")], &format!("s{number}"), &resources()).unwrap();
        }
    }
    std::fs::write(path(MARKS), []).unwrap();
    std::fs::create_dir(path("vms")).unwrap();
}

pub fn take_snapshot(disks: &[PathBuf], name: &str, resources: &Arc<Resources>) -> vmstrata_disk::Result<()> {
    let (open, options) = (OpenOptions::default(), PrepareOptions::default());
    snapshot::create(disks, &named(name), &open, &options, resources).map(drop)
}

pub fn range(first: u16, last: u16) -> MergeRange {
    MergeRange { first: LayerIndex::new(first), last: LayerIndex::new(last) }
}

/// The layers that a merge of this name drops.
pub fn dropped(operation: &str) -> Option<MergeRange> {
    match operation.rsplit_once('-')?.1 {
        "frozen" => Some(range(1, 1)),
        // Into s0, which takes the place of s2.
        "commit" => Some(range(0, 1)),
        "active" => Some(range(1, 2)),
        "flat" => Some(range(0, 2)),
        _ => None,
    }
}

/// The snapshot whose layer an operation of this name replaces, before it drops the snapshot.
pub fn replaced(operation: &str) -> Option<&str> {
    operation.strip_prefix("live-replace-")
}

/// How a merge of this name drops them.
pub fn how(operation: &str) -> MergeOptions {
    let direction = if operation.ends_with("-commit") { Direction::Commit } else { Direction::Stream };
    MergeOptions { removal: Removal::All, direction, ..MergeOptions::default() }
}

pub fn operate(operation: &str, seed: u64, dir: &Path, say: &(dyn Fn(u64) + Sync)) {
    let (web, resources) = (dir.join("web.qcow2"), resources());
    let open = OpenOptions { allow_backing: vec![dir.to_owned()], ..OpenOptions::default() };
    if let Some(name) = replaced(operation) {
        let disk = Disk::open(&web, &open, &resources).unwrap();
        let [old, new] = ["", "-onto"].map(|suffix| dir.join(format!("web.{name}{suffix}.qcow2")));
        return under_guest(&disk, seed, say, || {
            disk.replace_layer(&old, &dir.join(DRAFT), &new).unwrap();
            let range = ranges_of(&web, &[name.to_owned()], &open).unwrap()[0];
            Merge::of_disk(&disk, range, &how(operation)).unwrap().run().unwrap();
        });
    }
    if let Some(range) = dropped(operation) {
        let options = how(operation);
        if operation.starts_with("live") {
            let disk = Disk::open(&web, &open, &resources).unwrap();
            return merge_under_guest(&disk, range, &options, seed, say);
        }
        Merge::new(&web, range, &options, &resources).unwrap().run().unwrap();
        return;
    }
    match operation {
        "revert" => drop(snapshot::revert(&web, "s0", &RevertOptions::default(), &resources).unwrap()),
        "keep" => {
            let options = RevertOptions { keep: Some(dir.join("old.qcow2")), ..RevertOptions::default() };
            snapshot::revert(&web, "s0", &options, &resources).unwrap();
        }
        "clone" => drop(snapshot::clone(&web, "s1", &dir.join("clone.qcow2"), &open).unwrap()),
        "elsewhere" => drop(snapshot::clone(&web, "s1", &dir.join("vms/clone.qcow2"), &open).unwrap()),
        "group" => take_snapshot(&[web, dir.join("data.qcow2")], "s3", &resources).unwrap(),
        "open" => Disk::open(&web, &open, &resources).unwrap().close().unwrap(),
        "index" => drop(build(&web, &IndexOptions::default()).unwrap()),
        _ => unreachable!("{operation}"),
    }
}

pub fn guest_steps(seed: u64) -> Vec<Step> {
    steps(&mut random("guest", seed), STEPS, SIZE, CLUSTER)
}

/// A guest goes on while the layers are dropped, and after that.
pub fn merge_under_guest(
    disk: &Arc<Disk>,
    range: MergeRange,
    options: &MergeOptions,
    seed: u64,
    say: &(dyn Fn(u64) + Sync),
) {
    under_guest(disk, seed, say, || drop(Merge::of_disk(disk, range, options).unwrap().run().unwrap()));
}

fn under_guest(disk: &Arc<Disk>, seed: u64, say: &(dyn Fn(u64) + Sync), work: impl FnOnce()) {
    let steps = guest_steps(seed);
    let merged = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (number, step) in steps.iter().enumerate() {
                say(2 * number as u64 + 1);
                take(disk, step).unwrap();
                say(2 * number as u64 + 2);
                // The merge gets its turn: it has more to do.
                std::thread::yield_now();
            }
            merged.store(true, Ordering::Relaxed);
        });
        work();
    });
    assert!(merged.into_inner());
    disk.close().unwrap();
}
