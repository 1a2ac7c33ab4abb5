//! First writes to parts of clusters: what lies below is not read for them unless the host has it in memory, and what they leave
//! out is there whoever asks.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::faulty::FaultyFiles;
use common::flat::{assert_reads, assert_same, pattern, read, write};
use common::killed::is_killed;
use common::stock::{assert_clean, assert_safe, content, path_str, qemu_img};
use common::{for_seeds, open, random, scratch, small_resources};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, ErrorKind, OpenOptions, snapshot_together};
use vmstrata_store::{Effect, Fault, FaultPlan, Operation, OperationKind, Record, When};

const CLUSTER: usize = 64 << 10;
const PART: usize = 4096;
const CLUSTERS: usize = 32;
const SIZE: usize = CLUSTERS * CLUSTER;

/// An empty overlay on a full base.
struct Made {
    dir: tempfile::TempDir,
    top: PathBuf,
    model: Vec<u8>,
    random: SmallRng,
}

fn made(seed: u64) -> Made {
    let (dir, mut random) = (scratch(), random("put off", seed));
    let model = pattern(&mut random, SIZE);
    std::fs::write(dir.path().join("base"), &model).unwrap();
    let top = dir.path().join("top");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", path_str(&top)]);
    Made { dir, top, model, random }
}

impl Made {
    /// Opens the disk with files that fail as `plan` says.
    fn open(&self, plan: &Arc<FaultPlan>) -> Arc<Disk> {
        Disk::open(&self.top, &OpenOptions::default(), &FaultyFiles::new(plan).resources()).unwrap()
    }

    fn write(&mut self, disk: &Disk, at: usize, len: usize) -> vmstrata_disk::Result<()> {
        let bytes = pattern(&mut self.random, len);
        write(disk, at as u64, &bytes)?;
        self.model[at..at + len].copy_from_slice(&bytes);
        Ok(())
    }

    /// The image has it all, though the disk is open.
    fn assert_on_disk(&self) {
        let copy = self.top.with_file_name("copy");
        std::fs::copy(&self.top, &copy).unwrap();
        assert_safe(&copy);
        assert_same(&content(&copy, "qcow2"), &self.model, 0, "as qemu-img reads it");
    }
}

/// Runs `work`; returns the reads it made.
fn reads(plan: &FaultPlan, work: impl FnOnce()) -> u64 {
    let before = plan.count(Some(OperationKind::Read));
    work();
    plan.count(Some(OperationKind::Read)) - before
}

#[test]
fn nothing_is_read_for_a_first_write_until_a_flush() {
    let plan = FaultPlan::new();
    let mut made = made(1);
    let disk = made.open(&plan);
    // The page of entries, the L2 table, claimed clusters.
    made.write(&disk, 0, PART).unwrap();
    let read_then = reads(&plan, || {
        for cluster in 1..20 {
            made.write(&disk, cluster * CLUSTER + cluster % 16 * PART, PART).unwrap();
        }
    });
    assert_eq!(read_then, 0, "copied up at once");
    assert_reads(&disk, &made.model, "in part");
    assert_ne!(reads(&plan, || disk.flush().unwrap()), 0, "nothing was copied up");
    assert_eq!(reads(&plan, || disk.flush().unwrap()), 0, "copied up twice");
    assert_reads(&disk, &made.model, "whole");
    made.assert_on_disk();
}

/// Runs `work`; returns the bytes of the longest write it made.
fn longest_write(plan: &FaultPlan, work: impl FnOnce()) -> usize {
    let before = plan.log().len();
    work();
    let len = |record: &Record| match &record.operation {
        Operation::Write { bytes, .. } => bytes.len(),
        _ => 0,
    };
    plan.log()[before..].iter().map(len).max().unwrap_or(0)
}

/// The page cache keeps what was written at once in one piece.
#[test]
fn a_new_cluster_is_written_all_at_once() {
    let plan = FaultPlan::recording();
    let mut made = made(10);
    let disk = made.open(&plan);
    // The L2 table is there from now on.
    made.write(&disk, 0, PART).unwrap();
    let longest = longest_write(&plan, || made.write(&disk, 3 * CLUSTER + PART, PART).unwrap());
    assert_eq!(longest, CLUSTER);
    assert_reads(&disk, &made.model, "in part");
    disk.flush().unwrap();
    made.assert_on_disk();
}

#[test]
fn an_empty_disk_is_not_filled_with_zeros() {
    let (dir, plan) = (scratch(), FaultPlan::recording());
    let path = dir.path().join("empty");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1G"]);
    let disk = Disk::open(&path, &OpenOptions::default(), &FaultyFiles::new(&plan).resources()).unwrap();
    write(&disk, 0, &[1; PART]).unwrap();
    let longest = longest_write(&plan, || write(&disk, (5 * CLUSTER + PART) as u64, &[2; PART]).unwrap());
    assert_eq!(longest, PART);
    disk.close().unwrap();
}

#[test]
fn what_the_guest_writes_itself_is_never_copied() {
    let plan = FaultPlan::new();
    let mut made = made(2);
    let disk = made.open(&plan);
    made.write(&disk, 0, PART).unwrap();
    disk.flush().unwrap();
    let copied = reads(&plan, || {
        for cluster in 1..CLUSTERS {
            // Backwards, and some of it twice.
            for part in (0..16).rev().chain([3, 9]) {
                made.write(&disk, cluster * CLUSTER + part * PART, PART).unwrap();
            }
        }
        disk.flush().unwrap();
    });
    assert_eq!(copied, 0);
    assert_reads(&disk, &made.model, "all written");
    disk.close().unwrap();
    drop(disk);
    assert_clean(&made.top);
    assert_same(&content(&made.top, "qcow2"), &made.model, 0, "as qemu-img reads it");
}

#[test]
fn a_flush_that_cannot_copy_fails_loses_nothing_and_can_be_tried_again() {
    for kind in [OperationKind::Read, OperationKind::Write] {
        let plan = FaultPlan::new();
        let mut made = made(3);
        let disk = made.open(&plan);
        made.write(&disk, 0, PART).unwrap();
        for cluster in 1..20 {
            made.write(&disk, cluster * CLUSTER, 3 * PART).unwrap();
        }
        plan.add(Fault { kind: Some(kind), store: None, when: When::From(7), effect: Effect::Fail(28) });
        disk.flush().unwrap_err();
        // A host that is full says so when something is written from now on, not when it is flushed.
        let error = made.write(&disk, 25 * CLUSTER, PART).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
        plan.clear();
        assert_reads(&disk, &made.model, "after a flush that failed");
        disk.flush().unwrap();
        made.write(&disk, 26 * CLUSTER, PART).unwrap();
        assert_reads(&disk, &made.model, "after one that did not");
        disk.close().unwrap();
        drop(disk);
        // What was allocated for the write that failed could not be given back.
        assert_safe(&made.top);
        assert_same(&content(&made.top, "qcow2"), &made.model, 0, "as qemu-img reads it");
    }
}

#[test]
fn what_the_host_has_in_memory_is_copied_up_at_once() {
    let plan = FaultPlan::recording();
    plan.read_now();
    let mut made = made(50);
    let disk = made.open(&plan);
    // The map's page and the base's file are there from then on.
    made.write(&disk, 0, PART).unwrap();
    disk.flush().unwrap();
    let longest = longest_write(&plan, || {
        for cluster in 1..20 {
            made.write(&disk, cluster * CLUSTER + cluster % 16 * PART, PART).unwrap();
        }
    });
    assert_eq!(longest, CLUSTER);
    assert_reads(&disk, &made.model, "copied up");
    assert_eq!(reads(&plan, || disk.flush().unwrap()), 0, "something was left to copy");
    made.assert_on_disk();
}

#[test]
fn nor_is_it_put_off_right_after_a_snapshot() {
    let plan = FaultPlan::recording();
    plan.read_now();
    let mut made = made(51);
    let disk = made.open(&plan);
    for cluster in (0..CLUSTERS).step_by(2) {
        made.write(&disk, cluster * CLUSTER, PART).unwrap();
    }
    let mut states = Vec::new();
    for name in ["first", "second", "third"] {
        let info = SnapshotInfo { name: name.into(), ..SnapshotInfo::default() };
        let taken = snapshot_together(&[&disk], &info).unwrap();
        assert!(disk.is_finalizing(), "the map of the layers is the provisional one");
        states.push((taken[0].layer.clone(), made.model.clone()));
        let longest = longest_write(&plan, || {
            for cluster in (0..CLUSTERS).step_by(states.len()) {
                made.write(&disk, cluster * CLUSTER + cluster % 16 * PART, PART).unwrap();
            }
        });
        assert_eq!(longest, CLUSTER);
        assert_eq!(reads(&plan, || disk.flush().unwrap()), 0, "something was left to copy");
        assert_reads(&disk, &made.model, "copied up");
    }
    disk.close().unwrap();
    for (layer, model) in states {
        assert_same(&content(&layer, "qcow2"), &model, 0, "a snapshot as qemu-img reads it");
    }
    made.assert_on_disk();
}

/// Zeros, discards, writes of odd lengths, flushes and snapshots among writes of parts.
#[test]
fn whoever_needs_a_cluster_whole_finds_it_whole() {
    for_seeds(6, |seed| {
        let mut made = made(10 + seed);
        let plan = FaultPlan::new();
        if seed % 2 == 1 {
            plan.read_now();
        }
        let files = FaultyFiles::new(&plan);
        let open = |top: &std::path::Path| {
            Disk::open(top, &OpenOptions::default(), &files.usual_resources()).expect("the disk opens")
        };
        let mut disk = open(&made.top);
        let mut states: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        for step in 0..400 {
            let cluster = made.random.random_range(0..CLUSTERS) * CLUSTER;
            let at = cluster + made.random.random_range(0..16) * PART;
            let len = (made.random.random_range(1..6) * PART).min(SIZE - at);
            match made.random.random_range(0..40) {
                0 => disk.flush().unwrap(),
                1 => {
                    disk.write_zeroes(common::flat::range(at as u64, len as u64), step % 3 == 0).unwrap();
                    made.model[at..at + len].fill(0);
                }
                2 => {
                    let odd = at + 512;
                    made.write(&disk, odd, len.min(SIZE - odd).min(PART + 1024)).unwrap();
                }
                3 if step % 5 == 0 => {
                    let info = SnapshotInfo { name: format!("s{step}"), ..SnapshotInfo::default() };
                    states.push((disk.snapshot(&info).unwrap().layer, made.model.clone()));
                }
                4 => {
                    disk.write_zeroes(common::flat::range(cluster as u64, CLUSTER as u64), true).unwrap();
                    made.model[cluster..cluster + CLUSTER].fill(0);
                }
                5 => {
                    disk.close().unwrap();
                    drop(disk);
                    assert_clean(&made.top);
                    disk = open(&made.top);
                }
                6..9 => {
                    let found = read(&disk, cluster as u64, CLUSTER).unwrap();
                    assert_same(&found, &made.model[cluster..][..CLUSTER], cluster as u64, "in passing");
                }
                _ => made.write(&disk, at, len).unwrap(),
            }
        }
        assert_reads(&disk, &made.model, "at the end");
        disk.close().unwrap();
        drop(disk);
        states.push((made.top.clone(), made.model.clone()));
        for (layer, model) in &states {
            assert_clean(layer);
            assert_same(&content(layer, "qcow2"), model, 0, "as qemu-img reads it");
        }
    });
}

/// Writers, flushes and snapshots at once: no part of anyone's write is lost.
#[test]
fn parts_written_while_others_copy_up_are_not_lost() {
    const WRITERS: usize = 3;
    let made = made(20);
    // None of what lies below can be read without waiting: all of it is put off.
    let files = FaultyFiles::new(&FaultPlan::new());
    let disk = Disk::open(&made.top, &OpenOptions::default(), &files.usual_resources()).unwrap();
    let stop = AtomicBool::new(false);
    let written: Vec<BTreeSet<(usize, u8)>> = std::thread::scope(|scope| {
        let (disk, stop) = (&disk, &stop);
        let writers: Vec<_> = (0..WRITERS)
            .map(|me| {
                scope.spawn(move || {
                    let mut random = random("race", me as u64);
                    let mut newest = std::collections::BTreeMap::new();
                    for round in 1..=6000u32 {
                        // Each has parts of its own in every cluster.
                        let part = random.random_range(0..SIZE / PART / WRITERS) * WRITERS + me;
                        let value = (round % 251) as u8;
                        write(disk, (part * PART) as u64, &[value; PART]).unwrap();
                        newest.insert(part, value);
                    }
                    newest.into_iter().collect()
                })
            })
            .collect();
        scope.spawn(move || {
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                disk.flush().unwrap();
                number += 1;
                let info = SnapshotInfo { name: format!("r{number}"), ..SnapshotInfo::default() };
                drop(disk.snapshot(&info).unwrap());
            }
        });
        let written = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        written
    });
    let mut model = made.model.clone();
    for &(part, value) in written.iter().flatten() {
        model[part * PART..][..PART].fill(value);
    }
    assert_reads(&disk, &model, "after the race");
    disk.close().unwrap();
    drop(disk);
    assert_clean(&made.top);
    assert_same(&content(&made.top, "qcow2"), &model, 0, "as qemu-img reads it");
}

const ORDERS: &str = "VMSTRATA_TEST_DEFERRED";

/// Writes a part of each cluster, all parts of some, and is killed.
#[test]
#[ignore = "the process that another test starts and kills"]
fn child_that_writes_parts() {
    let Ok(top) = std::env::var(ORDERS) else { return };
    let top = PathBuf::from(top);
    let journals = top.with_file_name("journals");
    let resources = FaultyFiles::new(&FaultPlan::new()).resources_with(Some(journals));
    let disk = Disk::open(&top, &OpenOptions::default(), &resources).unwrap();
    for (at, len) in parts_of_child() {
        write(&disk, at as u64, &vec![7; len]).unwrap();
    }
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

fn parts_of_child() -> impl Iterator<Item = (usize, usize)> {
    let one = |cluster: usize| (cluster * CLUSTER + cluster % 16 * PART, PART);
    let all = |cluster: usize| (0..16).map(move |part| (cluster * CLUSTER + part * PART, PART));
    (0..CLUSTERS).map(one).chain(all(3)).chain(all(CLUSTERS - 1))
}

#[test]
fn what_was_written_in_part_survives_a_killed_process() {
    let mut made = made(30);
    assert!(is_killed("child_that_writes_parts", ORDERS, path_str(&made.top).to_owned()));
    assert_safe(&made.top);
    for (at, len) in parts_of_child() {
        made.model[at..at + len].fill(7);
    }
    let resources = small_resources(Some(&made.dir.path().join("journals")));
    let disk = Disk::open(&made.top, &OpenOptions::default(), &resources).unwrap();
    assert_reads(&disk, &made.model, "taken up");
    // In the image by now: the journal it came from is gone.
    made.assert_on_disk();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&made.top);
}

/// All files of a directory, for a test that wants them back.
struct Saved(Vec<(PathBuf, Vec<u8>)>);

impl Saved {
    fn of(dirs: &[&Path]) -> Self {
        let files = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).unwrap());
        let files = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        Self(files.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect())
    }

    fn put_back(&self) {
        self.0.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    }
}

/// Whoever takes a journal up can be stopped at any write. The next one finds what was written, whole or in part.
#[test]
fn a_journal_that_was_half_taken_up_is_taken_up_again() {
    let mut made = made(31);
    assert!(is_killed("child_that_writes_parts", ORDERS, path_str(&made.top).to_owned()));
    for (at, len) in parts_of_child() {
        made.model[at..at + len].fill(7);
    }
    let journals = made.dir.path().join("journals");
    let saved = Saved::of(&[made.dir.path(), &journals]);
    for bytes in [0, 8, 64] {
        for nth in 0.. {
            saved.put_back();
            let plan = FaultPlan::new();
            let kind = Some(OperationKind::Write);
            plan.add(Fault {
                kind,
                store: None,
                when: When::Nth(nth),
                effect: Effect::Tear { bytes, errno: 28 },
            });
            let resources = FaultyFiles::new(&plan).resources_with(Some(journals.clone()));
            drop(Disk::open(&made.top, &OpenOptions::default(), &resources));
            let resources = small_resources(Some(&journals));
            let disk = Disk::open(&made.top, &OpenOptions::default(), &resources).unwrap();
            assert_reads(&disk, &made.model, &format!("after write {nth} was cut at {bytes} bytes"));
            disk.close().unwrap();
            drop(disk);
            assert_safe(&made.top);
            if plan.count(kind) <= nth {
                break;
            }
        }
    }
}

/// What memory says of a cluster that is written in part is no entry of the format: an image that has it is damaged there.
#[test]
fn an_image_that_looks_written_in_part_is_damaged() {
    let mut made = made(40);
    let disk = open(&made.top);
    made.write(&disk, 0, CLUSTER).unwrap();
    disk.close().unwrap();
    drop(disk);
    let mut image = std::fs::read(&made.top).unwrap();
    let word = |at: usize, image: &[u8]| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let l2_table = word(word(40, &image) as usize, &image) as usize & 0x00FF_FFFF_FFFF_FE00;
    let host = word(l2_table, &image) & 0x00FF_FFFF_FFFF_FE00;
    image[l2_table..l2_table + 8].copy_from_slice(&(1 << 61 | host | 0b11).to_be_bytes());
    std::fs::write(&made.top, &image).unwrap();
    let disk = open(&made.top);
    let error = read(&disk, 0, PART).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Entry { .. }), "{error}");
    made.write(&disk, 4 * PART, PART).unwrap_err();
    read(&disk, CLUSTER as u64, PART).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_eq!(std::fs::read(&made.top).unwrap()[l2_table..], image[l2_table..], "the evidence is there");
}
