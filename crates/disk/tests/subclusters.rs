//! Disks whose active layer has subclusters: a write costs what it writes, also after a snapshot.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, pattern, range, read, write};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::common::{open, random, scratch, small_resources};
use vmstrata_disk::index::{IndexOptions, IndexVerdict, VerifiedFile, verify};
use vmstrata_disk::merge::{Action, Direction, Merge, MergeFault, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::stats::Kind;
use vmstrata_disk::{CreateOptions, Disk, Format, Op, OpenOptions, create, snapshot_together};
use vmstrata_store::{FaultPlan, OperationKind};
use vmstrata_types::{ClusterBits, LayerIndex};

const CLUSTER: u64 = 128 << 10;
const SUBCLUSTER: u64 = 4096;
const SIZE: u64 = 8 * CLUSTER;

/// An empty overlay with subclusters on a full raw base, and what it reads as.
fn made(dir: &Path) -> (PathBuf, Vec<u8>) {
    let model = pattern(&mut random("subclusters", 0), SIZE as usize);
    std::fs::write(dir.join("base"), &model).unwrap();
    let options = CreateOptions {
        cluster_bits: ClusterBits::from_size(CLUSTER).unwrap(),
        subclusters: true,
        backing: Some(("base".into(), Format::Raw)),
        ..CreateOptions::default()
    };
    let top = dir.join("disk.qcow2");
    create(&top, &options).unwrap();
    (top, model)
}

/// Writes to the disk and to what it must read as.
fn put(disk: &Disk, model: &mut [u8], at: u64, len: u64, fill: u8) {
    let bytes = vec![fill; len as usize];
    write(disk, at, &bytes).unwrap();
    model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
}

fn bytes_on_host(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

#[test]
fn a_small_write_into_a_cluster_that_is_there_costs_its_own_bytes() {
    let dir = scratch();
    let (top, mut model) = made(dir.path());
    let disk = open(&top);
    assert_eq!(disk.cluster_bits().size(), SUBCLUSTER, "what a guest should discard");
    put(&disk, &mut model, CLUSTER + SUBCLUSTER, SUBCLUSTER, 1);
    disk.flush().unwrap();
    let before = bytes_on_host(&top);
    for (number, subcluster) in [(2, 3), (3, 9), (4, 30)] {
        put(&disk, &mut model, CLUSTER + subcluster * SUBCLUSTER, SUBCLUSTER, number);
    }
    disk.flush().unwrap();
    assert_eq!(bytes_on_host(&top) - before, 3 * SUBCLUSTER);
    // Of a part of a subcluster the rest is copied up.
    put(&disk, &mut model, CLUSTER + 20 * SUBCLUSTER + 512, 512, 5);
    disk.flush().unwrap();
    assert_eq!(bytes_on_host(&top) - before, 4 * SUBCLUSTER);
    disk.discard(range(CLUSTER + 3 * SUBCLUSTER, SUBCLUSTER)).unwrap();
    model[(CLUSTER + 3 * SUBCLUSTER) as usize..][..SUBCLUSTER as usize].fill(0);
    assert_reads(&disk, &model, "before it is closed");
    disk.close().unwrap();
    drop(disk);
    assert_clean(&top);
    assert!(content(&top, "qcow2") == model);
}

#[test]
fn snapshots_of_a_disk_with_subclusters_have_them_too() {
    let dir = scratch();
    let (top, mut model) = made(dir.path());
    let disk = open(&top);
    let mut states = Vec::new();
    for name in ["one", "two", "three"] {
        let fill = states.len() as u8 + 1;
        for cluster in 0..SIZE / CLUSTER {
            put(&disk, &mut model, cluster * CLUSTER + u64::from(fill) * 3 * SUBCLUSTER, SUBCLUSTER, fill);
        }
        let info = SnapshotInfo { name: name.into(), ..SnapshotInfo::default() };
        let taken = snapshot_together(&[&disk], &info).unwrap();
        states.push((taken[0].layer.clone(), model.clone()));
        assert_reads(&disk, &model, name);
    }
    put(&disk, &mut model, 0, SUBCLUSTER / 2, 9);
    assert!(read(&disk, 0, 512).unwrap() == [9; 512]);
    disk.close().unwrap();
    drop(disk);
    states.push((top, model));
    for (layer, model) in &states {
        assert_clean(layer);
        assert!(content(layer, "qcow2") == *model, "{}", layer.display());
        let header = std::fs::read(layer).unwrap();
        assert_eq!(header[79] & 16, 16, "{} has extended entries", layer.display());
    }
    let verified = verify(&states[3].0, &IndexOptions::default()).unwrap();
    let is_good = |file: &&VerifiedFile| matches!(file.verdict, IndexVerdict::Good { .. });
    assert_eq!(verified.iter().filter(is_good).count(), 3, "{verified:?}");
}

/// Two guest clusters, each with a subcluster of its own in one host cluster that counts twice: as dense layers have them.
fn dense(dir: &Path) -> (PathBuf, Vec<u8>) {
    let path = dir.join("dense");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "extended_l2=on,cluster_size=128k",
        path_str(&path),
        "1M",
    ]);
    qemu_io(&path, &["write -q -P 1 0 4k".to_owned(), "write -q -P 3 512k 4k".to_owned()]);
    let mut bytes = std::fs::read(&path).unwrap();
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let offset = |bytes: &[u8], at| (word(bytes, at) & 0x00ff_ffff_ffff_fe00) as usize;
    let table = offset(&bytes, offset(&bytes, 40));
    let (host, block) = (offset(&bytes, table), offset(&bytes, offset(&bytes, 48)));
    // Neither has the copied flag; the second uses subclusters 1 and 3.
    for (entry, states) in [(table, 1u64), (table + 16, 0b1010)] {
        bytes[entry..entry + 8].copy_from_slice(&(host as u64).to_be_bytes());
        bytes[entry + 8..entry + 16].copy_from_slice(&states.to_be_bytes());
    }
    bytes[block + host / CLUSTER as usize * 2 + 1] = 2;
    bytes[host + SUBCLUSTER as usize..][..3 * SUBCLUSTER as usize].fill(2);
    std::fs::write(&path, bytes).unwrap();
    let mut model = vec![0; 1 << 20];
    model[..SUBCLUSTER as usize].fill(1);
    for subcluster in [1, 3] {
        model[(CLUSTER + subcluster * SUBCLUSTER) as usize..][..SUBCLUSTER as usize].fill(2);
    }
    model[512 << 10..][..SUBCLUSTER as usize].fill(3);
    (path, model)
}

/// One is copied on write, the other let go of, by a process that is killed and by its successor.
#[test]
fn guest_clusters_that_share_a_host_cluster_are_told_apart() {
    for is_killed in [false, true] {
        let dir = scratch();
        let (path, mut model) = dense(dir.path());
        assert_clean(&path);
        assert!(content(&path, "qcow2") == model);
        let resources = || small_resources(Some(dir.path()));
        let disk = Disk::open(&path, &OpenOptions::default(), &resources()).unwrap();
        assert_reads(&disk, &model, "as it was made");
        put(&disk, &mut model, 8 * SUBCLUSTER, SUBCLUSTER / 2, 7);
        // A part of a cluster that others use: its entry changes, and where it leads does not.
        disk.write_zeroes(range(CLUSTER + 3 * SUBCLUSTER, SUBCLUSTER), true).unwrap();
        model[(CLUSTER + 3 * SUBCLUSTER) as usize..][..SUBCLUSTER as usize].fill(0);
        disk.discard(range(512 << 10, SUBCLUSTER)).unwrap();
        model[512 << 10..][..SUBCLUSTER as usize].fill(0);
        assert_reads(&disk, &model, "after writes");
        if !is_killed {
            disk.close().unwrap();
        }
        drop(disk);
        let disk = Disk::open(&path, &OpenOptions::default(), &resources()).unwrap();
        assert_reads(&disk, &model, "opened again");
        put(&disk, &mut model, CLUSTER, SUBCLUSTER, 8);
        assert_reads(&disk, &model, "after a write to the other");
        disk.close().unwrap();
        drop(disk);
        assert_clean(&path);
        assert!(content(&path, "qcow2") == model, "killed: {is_killed}");
    }
}

/// A full base, an image on it whose guest clusters share a host cluster, and an empty overlay on that; with what it reads as.
fn dense_chain(dir: &Path) -> ([PathBuf; 3], Vec<u8>) {
    let (middle, mut model) = dense(dir);
    let (base, top) = (dir.join("base.qcow2"), dir.join("top.qcow2"));
    create(&base, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
    let content = pattern(&mut random("below shared clusters", 0), 1 << 20);
    let disk = open(&base);
    write(&disk, 0, &content).unwrap();
    disk.close().unwrap();
    drop(disk);
    for (own, below) in model.chunks_mut(4096).zip(content.chunks(4096)) {
        if own[0] == 0 {
            own.copy_from_slice(below);
        }
    }
    qemu_img(&["rebase", "-u", "-b", "base.qcow2", "-F", "qcow2", path_str(&middle)]);
    let options = CreateOptions {
        cluster_bits: ClusterBits::from_size(CLUSTER).unwrap(),
        subclusters: true,
        backing: Some(("dense".into(), Format::Qcow2)),
        ..CreateOptions::default()
    };
    create(&top, &options).unwrap();
    ([base, middle, top], model)
}

fn dropping(layer: u16, direction: Direction) -> (MergeRange, MergeOptions) {
    let layer = LayerIndex::new(layer);
    let options =
        MergeOptions { removal: Removal::All, beyond_own: true, direction, ..MergeOptions::default() };
    (MergeRange { first: layer, last: layer }, options)
}

/// Both are copied, so nothing is left where a disk in use has known them to be.
#[test]
fn guest_clusters_that_share_a_host_cluster_are_merged_under_a_disk_in_use() {
    for is_cancelled in [true, false] {
        let dir = scratch();
        let ([_, middle, top], model) = dense_chain(dir.path());
        let disk = open(&top);
        assert_reads(&disk, &model, "before");
        let (range, options) = dropping(0, Direction::Stream);
        let mut job = Merge::of_disk(&disk, range, &options).unwrap();
        while let Some(action) = job.select().filter(|action| !is_cancelled || *action != Action::Relink) {
            job.apply(action).unwrap();
            assert_reads(&disk, &model, "meanwhile");
        }
        drop(job);
        assert_reads(&disk, &model, "afterwards");
        disk.close().unwrap();
        drop(disk);
        for layer in [&middle, &top] {
            assert_clean(layer);
            assert!(content(layer, "qcow2") == model, "{}", layer.display());
        }
    }
}

/// A stock reader may know where they lie.
#[test]
fn a_shared_cluster_that_shows_in_part_is_not_committed_into() {
    let dir = scratch();
    let ([_, middle, top], mut model) = dense_chain(dir.path());
    let disk = open(&top);
    put(&disk, &mut model, CLUSTER + 3 * SUBCLUSTER, SUBCLUSTER, 9);
    disk.close().unwrap();
    drop(disk);
    let disk = dir.path().join("disk");
    let backing = Some(("top.qcow2".into(), Format::Qcow2));
    create(&disk, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    let resources = small_resources(None);
    let (range, options) = dropping(1, Direction::Commit);
    let refused = Merge::new(&disk, range, &options, &resources).map(drop).unwrap_err();
    assert!(matches!(refused.fault(), Some(MergeFault::NoCommit { .. })), "{refused}");
    assert_clean(&middle);
    let (range, options) = dropping(1, Direction::Auto);
    assert!(!Merge::new(&disk, range, &options, &resources).unwrap().run().unwrap().is_commit);
    for layer in [&top, &disk] {
        assert_clean(layer);
        assert!(content(layer, "qcow2") == model, "{}", layer.display());
    }
}

/// Copying up asks for no entry while one is locked: its page may have gone meanwhile.
#[test]
fn parts_of_subclusters_are_written_while_pages_of_entries_come_and_go() {
    const STEP: u64 = 4 << 20;
    const PAGES: u64 = 256;
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    let cluster_bits = ClusterBits::from_size(16 << 10).unwrap();
    let options = CreateOptions {
        size: Some(PAGES * STEP),
        cluster_bits,
        subclusters: true,
        ..CreateOptions::default()
    };
    create(&path, &options).unwrap();
    let disk = Disk::open(&path, &OpenOptions::default(), &small_resources(Some(dir.path()))).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..8 {
                    for page in (thread..PAGES).step_by(4) {
                        write(disk, page * STEP + round * 512 + 100, &[round as u8 + 1; 100]).unwrap();
                    }
                }
            });
        }
    });
    for page in 0..PAGES {
        let model: Vec<u8> = (0..8 * 512)
            .map(|at| if (100..200).contains(&(at % 512)) { (at / 512) as u8 + 1 } else { 0 })
            .collect();
        assert!(read(&disk, page * STEP, model.len()).unwrap() == model, "{page}");
    }
    disk.close().unwrap();
}

#[test]
fn first_writes_of_a_batch_are_one_write_each_and_one_of_the_journal() {
    const BATCH: u64 = 8;
    let dir = scratch();
    let (top, mut model) = made(dir.path());
    let plan = FaultPlan::recording();
    plan.read_now();
    let resources = FaultyFiles::new(&plan).resources_with(Some(dir.path().join("journals")));
    let disk = Disk::open(&top, &OpenOptions::default(), &resources).unwrap();
    let mut client = Client::new(&disk, 32);
    let written = || plan.count(Some(OperationKind::Write));
    // A write that took a processor's turn sends those of the next moment to workers: so not each time.
    let batches = (SIZE / SUBCLUSTER) / BATCH;
    let has_one = (0..batches).any(|batch| {
        let (before, at_workers) = (written(), disk.stats().at_workers[Kind::Write as usize]);
        for number in batch * BATCH..(batch + 1) * BATCH {
            let (at, fill) = (number * SUBCLUSTER, [number as u8; SUBCLUSTER as usize]);
            client.push(Op::Write { fua: false }, at, SUBCLUSTER, Some(&fill));
            model[at as usize..][..SUBCLUSTER as usize].copy_from_slice(&fill);
        }
        assert!(client.drain().iter().all(|done| done.result.is_ok()));
        let at_workers = disk.stats().at_workers[Kind::Write as usize] - at_workers;
        at_workers == 0 && written() - before == BATCH + 1
    });
    assert!(has_one, "no batch is written so");
    assert_reads(&disk, &model, "after all");
    drop(client);
    disk.close().unwrap();
    drop(disk);
    assert_clean(&top);
}
