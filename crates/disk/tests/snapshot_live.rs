//! Snapshots of a disk that is being written: each holds what had completed, nothing that came after, and every file
//! stays one that stock tools find clean.

use crate::common;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::flat::{assert_reads, assert_same, pattern, read, some_range, write};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::{for_seeds, open, open_read_only, random, scratch, small_resources};
use rand::Rng as _;
use vmstrata_disk::snapshot::{SnapshotInfo, list};
use vmstrata_disk::stats::Kind;
use vmstrata_disk::{CreateOptions, Disk, Op, OpenOptions, ResourceOptions, Resources, snapshot_together};

const SIZE: u64 = 8 << 20;

fn disk_in(dir: &Path, format: &str, options: &[&str]) -> PathBuf {
    let path = dir.join("disk.img");
    let size = SIZE.to_string();
    qemu_img(&[&["create", "-q", "-f", format][..], options, &[path_str(&path), &size]].concat());
    path
}

fn named(name: impl std::fmt::Display) -> SnapshotInfo {
    SnapshotInfo { name: name.to_string(), ..SnapshotInfo::default() }
}

#[test]
fn a_snapshot_holds_what_was_written_before_it() {
    for (format, options) in [
        ("qcow2", &["-o", "cluster_size=64k"][..]),
        ("qcow2", &["-o", "cluster_size=4k"]),
        ("qcow2", &["-o", "cluster_size=512"]),
        ("qcow2", &["-o", "compat=0.10"]),
        ("raw", &[]),
    ] {
        let dir = scratch();
        let path = disk_in(dir.path(), format, options);
        let disk = if format == "raw" {
            let options = OpenOptions { format: Some(vmstrata_disk::Format::Raw), ..OpenOptions::default() };
            common::open_with(&path, &options)
        } else {
            open(&path)
        };
        let mut random = random("before", 1);
        let mut model = vec![0; SIZE as usize];
        let mut states = Vec::new();
        for step in 0..6 {
            for _ in 0..20 {
                let (at, len) = some_range(&mut random, SIZE, 64 << 10);
                let bytes = pattern(&mut random, len as usize);
                write(&disk, at, &bytes).unwrap();
                model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
            }
            let taken = disk.snapshot(&named(step)).unwrap();
            assert_reads(&disk, &model, &format!("{format} {options:?}, after snapshot {step}"));
            states.push((taken.layer, model.clone()));
        }
        let (at, bytes) = (12345 * 512 % SIZE, pattern(&mut random, 70_000));
        write(&disk, at, &bytes).unwrap();
        model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        assert_eq!(disk.layers().len(), 7);
        disk.close().unwrap();
        drop(disk);
        let frozen_format = |number: usize| if number == 0 { format } else { "qcow2" };
        for (number, (layer, model)) in states.iter().enumerate() {
            assert_same(&content(layer, frozen_format(number)), model, 0, &format!("snapshot {number}"));
            if frozen_format(number) == "qcow2" {
                assert_clean(layer);
                assert_reads(&open_read_only(layer), model, "through the index");
            }
        }
        assert_clean(&path);
        assert_same(&content(&path, "qcow2"), &model, 0, "the disk");
        assert_eq!(list(&path, &OpenOptions::default()).unwrap().len(), 6);
        assert_reads(&open(&path), &model, "opened again");
    }
}

/// The older state could not be named any more.
#[test]
fn a_name_that_the_chain_has_is_refused_whatever_its_file_is_called() {
    let dir = scratch();
    let path = disk_in(dir.path(), "raw", &[]);
    let raw = OpenOptions { format: Some(vmstrata_disk::Format::Raw), ..OpenOptions::default() };
    let disk = common::open_with(&path, &raw);
    let layer = disk.snapshot(&named("mon")).unwrap().layer;
    disk.snapshot(&named("tue")).unwrap();
    // Its file would be another one now, as the disk is no raw file any more.
    let refused = |disk: &Disk| {
        let error = disk.snapshot(&named("mon")).unwrap_err();
        assert!(error.to_string().contains("has a snapshot \"mon\" already"), "{error}");
        assert!(error.to_string().contains(layer.to_str().unwrap()), "{error}");
    };
    refused(&disk);
    disk.close().unwrap();
    drop(disk);
    let disk = open(&path);
    refused(&disk);
    disk.snapshot(&named("wed")).unwrap();
    refused(&disk);
    assert_eq!(disk.layers().len(), 4);
}

/// Random histories against flat arrays: writes, zeros, discards, flushes, snapshots, and opening again.
#[test]
fn random_histories_read_as_flat_arrays_do() {
    for_seeds(4, |seed| {
        let dir = scratch();
        let cluster = ["512", "4k", "64k", "2M"][seed as usize % 4];
        let path = disk_in(dir.path(), "qcow2", &["-o", &format!("cluster_size={cluster}")]);
        let mut random = random("histories", seed);
        let mut model = vec![0; SIZE as usize];
        let mut states: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        let mut disk = open(&path);
        for step in 0..200 {
            let (at, len) = some_range(&mut random, SIZE, 64 << 10);
            match random.random_range(0..20) {
                0..=10 => {
                    let bytes = pattern(&mut random, len as usize);
                    write(&disk, at, &bytes).unwrap();
                    model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
                }
                11..=13 => {
                    disk.write_zeroes(common::flat::range(at, len), random.random()).unwrap();
                    model[at as usize..(at + len) as usize].fill(0);
                }
                14 => disk.flush().unwrap(),
                15 => {
                    disk.close().unwrap();
                    drop(disk);
                    disk = open(&path);
                }
                _ => states.push((disk.snapshot(&named(step)).unwrap().layer, model.clone())),
            }
            assert_same(
                &read(&disk, at, len as usize).unwrap(),
                &model[at as usize..(at + len) as usize],
                at,
                &format!("seed {seed}, step {step}"),
            );
        }
        assert_reads(&disk, &model, "at the end");
        disk.close().unwrap();
        drop(disk);
        for (layer, model) in &states {
            assert_clean(layer);
            assert_reads(&open_read_only(layer), model, &format!("seed {seed}, {}", layer.display()));
        }
        assert_clean(&path);
        assert_same(&content(&path, "qcow2"), &model, 0, "by stock tools");
    });
}

/// Each writer numbers its writes and writes each number in two places, one after the other has completed: in every
/// snapshot the second place must not be ahead of the first, nor either behind what had completed before.
#[test]
fn writers_are_cut_between_two_of_their_writes() {
    const WRITERS: u64 = 3;
    const STRIDE: u64 = 1 << 20;
    let dir = scratch();
    let path = disk_in(dir.path(), "qcow2", &[]);
    let disk = open(&path);
    let completed: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let mut states: Vec<(PathBuf, Vec<u64>)> = Vec::new();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (disk, completed, stop) = (&disk, &completed[writer as usize], &stop);
            scope.spawn(move || {
                let mut client = (writer == 0).then(|| Client::new(disk, 8));
                for number in 1u64.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let block = number.to_le_bytes().repeat(512);
                    for place in [0, 512 << 10] {
                        let at = writer * STRIDE + place + number % 7 * 4096;
                        // A block by its own place too, so that old clusters are copied up and new ones made.
                        put(disk, client.as_mut(), at, &block);
                        put(disk, client.as_mut(), writer * STRIDE + place + 65536, &block);
                    }
                    completed.store(number, Ordering::SeqCst);
                }
            });
        }
        for step in 0..40 {
            let before: Vec<u64> = completed.iter().map(|count| count.load(Ordering::SeqCst)).collect();
            let taken = disk.snapshot(&named(step)).unwrap();
            states.push((taken.layer, before));
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        stop.store(true, Ordering::Relaxed);
    });
    disk.close().unwrap();
    drop(disk);
    for (layer, before) in states {
        let snapshot = open_read_only(&layer);
        for (writer, before) in (0..).zip(before) {
            let number = |place: u64| {
                let bytes = read(&snapshot, writer * STRIDE + place + 65536, 4096).unwrap();
                let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert_eq!(bytes, number.to_le_bytes().repeat(512), "a torn block");
                number
            };
            let (first, second) = (number(0), number(512 << 10));
            let what = format!("{}: writer {writer} at {first} and {second}", layer.display());
            assert!(first == second || first == second + 1, "{what}");
            assert!(second >= before, "{what}, had completed {before}");
        }
        assert_clean(&layer);
    }
    assert_clean(&path);
}

/// Neither for a table nor for the page of entries: whoever writes then would wait for a worker at each snapshot.
#[test]
fn first_writes_after_a_snapshot_need_no_worker() {
    const SIZE: u64 = 96 << 20;
    // Not in memory, where the kernel does not say whether a read would wait.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    let size = Some(SIZE);
    vmstrata_disk::create(&path, &CreateOptions { size, ..CreateOptions::default() }).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    let mut model = vec![0; SIZE as usize];
    let mut client = Client::new(&disk, 16);
    let mut random = random("first writes", 1);
    // A write that took a processor's turn, as on a busy machine, sends those of the next moment to workers: so not each time.
    let mut without = 0;
    for step in 0..40 {
        let before = disk.stats().at_workers[Kind::Write as usize];
        // Several pages of one table, and the clusters of several claims.
        for _ in 0..200 {
            let at = random.random_range(0..SIZE / 4096) * 4096;
            let bytes = pattern(&mut random, 4096);
            put(&disk, Some(&mut client), at, &bytes);
            model[at as usize..][..4096].copy_from_slice(&bytes);
        }
        let at_workers = disk.stats().at_workers[Kind::Write as usize] - before;
        // A disk that was just opened reads its refcounts first.
        without += u32::from(at_workers == 0 && step > 0);
        if without == 3 {
            break;
        }
        disk.snapshot(&named(step)).unwrap();
    }
    assert_eq!(without, 3, "after nearly every snapshot a write needs a worker");
    assert_reads(&disk, &model, "after all");
    drop(client);
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
}

/// Each number is written to one disk, and to the other when that has completed.
#[test]
fn disks_of_a_group_are_cut_at_one_instant() {
    let dir = scratch();
    let disks = ["one", "other"].map(|name| {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        open(&disk_in(&dir, "qcow2", &[]))
    });
    let stop = AtomicBool::new(false);
    let mut layers = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 1u64;
            while !stop.load(Ordering::Relaxed) {
                for disk in &disks {
                    write(disk, number % 5 * 65536, &number.to_le_bytes().repeat(64)).unwrap();
                    write(disk, 1 << 20, &number.to_le_bytes().repeat(64)).unwrap();
                }
                number += 1;
            }
        });
        for step in 0..25 {
            let order = if step % 2 == 0 { [&*disks[0], &*disks[1]] } else { [&*disks[1], &*disks[0]] };
            let taken = snapshot_together(&order, &named(step)).unwrap();
            let first = step % 2;
            layers.push([taken[first].layer.clone(), taken[1 - first].layer.clone()]);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
    });
    for pair in layers {
        let [one, other] = pair.each_ref().map(|layer| {
            let bytes = read(&open_read_only(layer), 1 << 20, 8).unwrap();
            u64::from_le_bytes(bytes.try_into().unwrap())
        });
        assert!(one == other || one == other + 1, "{one} and {other}");
    }
}

fn put(disk: &Arc<Disk>, client: Option<&mut Client>, at: u64, bytes: &[u8]) {
    match client {
        None => write(disk, at, bytes).unwrap(),
        Some(client) => {
            client.push(Op::Write { fua: false }, at, bytes.len() as u64, Some(bytes));
            assert!(client.drain().iter().all(|done| done.result.is_ok()));
        }
    }
}

#[test]
fn the_frozen_layer_can_be_read_by_others_while_the_disk_goes_on() {
    let dir = scratch();
    let path = disk_in(dir.path(), "qcow2", &[]);
    let disk = open(&path);
    write(&disk, 0, &[7; 4096]).unwrap();
    let layer = disk.snapshot(&named("shared")).unwrap().layer;
    write(&disk, 0, &[8; 4096]).unwrap();
    assert_eq!(content(&layer, "qcow2")[..4096], [7; 4096]);
    assert_eq!(read(&open_read_only(&layer), 0, 4096).unwrap(), [7; 4096]);
    let resources = Resources::new(ResourceOptions::default());
    let refused = Disk::open(&layer, &OpenOptions::default(), &resources).unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    assert_eq!(read(&disk, 0, 4096).unwrap(), [8; 4096]);
}

/// Whether the layer at `path` says that it has an index.
fn is_indexed(path: &Path) -> bool {
    let sidecar = format!("{}.vmsx", path.display());
    Path::new(&sidecar).exists() || std::fs::read(path).unwrap()[92] & 0x80 != 0
}

/// A snapshot is answered when it is on stable storage. What is left to do then is done by whoever comes next, once.
#[test]
fn what_a_snapshot_leaves_to_do_is_done_before_anything_else_changes() {
    for next in ["finalize", "snapshot", "close", "nothing"] {
        let dir = scratch();
        let path = disk_in(dir.path(), "qcow2", &[]);
        let disk = open(&path);
        write(&disk, 0, &[7; 4096]).unwrap();
        let taken = snapshot_together(&[&disk], &named("one")).unwrap();
        let layer = &taken[0].layer;
        assert!(disk.is_finalizing(), "before {next}");
        // Others may use it at once.
        assert_clean(layer);
        assert_eq!(content(layer, "qcow2")[..4096], [7; 4096]);
        assert_eq!(read(&open_read_only(layer), 0, 4096).unwrap(), [7; 4096]);
        write(&disk, 0, &[8; 4096]).unwrap();
        disk.flush().unwrap();
        assert_eq!(read(&disk, 0, 4096).unwrap(), [8; 4096]);
        match next {
            "finalize" => disk.finalize().unwrap(),
            "snapshot" => _ = snapshot_together(&[&disk], &named("two")).unwrap(),
            "close" => disk.close().unwrap(),
            _ => {}
        }
        assert_eq!(is_indexed(layer), next != "nothing", "after {next}");
        assert_eq!(disk.finalize_failures(), 0);
        assert_eq!(disk.is_finalizing(), matches!(next, "snapshot" | "nothing"), "after {next}");
        drop(disk);
        assert_eq!(read(&open(&path), 0, 4096).unwrap(), [8; 4096]);
    }
}

#[test]
fn a_layer_that_was_replaced_gets_no_index_and_the_disk_goes_on() {
    let dir = scratch();
    let path = disk_in(dir.path(), "qcow2", &[]);
    let disk = open(&path);
    write(&disk, 0, &[7; 4096]).unwrap();
    let layer = snapshot_together(&[&disk], &named("one")).unwrap().remove(0).layer;
    std::fs::copy(&layer, dir.path().join("other")).unwrap();
    std::fs::rename(dir.path().join("other"), &layer).unwrap();
    let error = disk.finalize().unwrap_err().to_string();
    assert!(error.contains("one"), "{error}");
    assert!(disk.finalize_failures() > 0 && !disk.is_finalizing());
    assert_eq!(read(&disk, 0, 4096).unwrap(), [7; 4096]);
    write(&disk, 4096, &[9; 4096]).unwrap();
    disk.snapshot(&named("two")).unwrap();
    assert_eq!(read(&disk, 0, 8192).unwrap(), [[7; 4096], [9; 4096]].concat());
    disk.close().unwrap();
}

#[test]
fn what_cannot_be_snapshotted_stays_as_it_is() {
    let dir = scratch();
    let path = disk_in(dir.path(), "qcow2", &[]);
    let disk = open(&path);
    write(&disk, 0, &[1; 512]).unwrap();
    disk.snapshot(&named("one")).unwrap();
    for bad in ["one", "", "a/b", "..", &"x".repeat(300)] {
        disk.snapshot(&named(bad)).unwrap_err();
        assert_eq!(disk.layers().len(), 2, "{bad:?}");
    }
    write(&disk, 512, &[2; 512]).unwrap();
    disk.close().unwrap();
    disk.snapshot(&named("late")).unwrap_err();
    drop(disk);
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    // The stock image's header has no room for an index: it has one beside it.
    assert_eq!(names.len(), 3, "{names:?}");
    let frozen = open_read_only(&path);
    let refused = frozen.snapshot(&named("read-only")).unwrap_err();
    assert!(refused.to_string().contains("read-only"), "{refused}");
}

#[test]
fn a_snapshot_that_is_refused_leaves_no_journal() {
    let dir = scratch();
    let path = disk_in(dir.path(), "qcow2", &[]);
    let journals = dir.path().join("journals");
    let disk = Disk::open(&path, &OpenOptions::default(), &small_resources(Some(&journals))).unwrap();
    let count = || std::fs::read_dir(&journals).unwrap().count();
    disk.snapshot(&named("state")).unwrap();
    assert_eq!(count(), 2, "those of the disk");
    for _ in 0..3 {
        disk.snapshot(&named("state")).unwrap_err();
        assert_eq!(count(), 2, "those of an overlay that was not used");
    }
    disk.close().unwrap();
    assert_eq!(count(), 0);
}

#[test]
fn a_disk_tells_whether_anything_was_written_since_its_last_snapshot() {
    let dir = scratch();
    let path = disk_in(dir.path(), "qcow2", &[]);
    let disk = open(&path);
    assert!(!disk.has_written());
    for (step, clear) in [false, true, false].into_iter().enumerate() {
        if clear {
            disk.discard(common::flat::range(0, SIZE)).unwrap();
        } else {
            write(&disk, 4096, b"something").unwrap();
        }
        assert!(disk.has_written(), "{step}");
        disk.snapshot(&named(step)).unwrap();
        assert!(!disk.has_written(), "{step}");
    }
    write(&disk, 0, b"more").unwrap();
    disk.close().unwrap();
    drop(disk);
    assert!(open(&path).has_written());
}

#[test]
fn a_disk_that_is_told_to_refuses_writes_and_flushes_and_is_read() {
    let dir = scratch();
    let disk = open(&disk_in(dir.path(), "qcow2", &[]));
    write(&disk, 0, b"before").unwrap();
    disk.refuse_writes("another host has it");
    disk.refuse_writes("a later cause");
    for refused in [write(&disk, 0, b"after!"), disk.flush(), disk.snapshot(&named("late")).map(drop)] {
        assert!(refused.unwrap_err().to_string().contains("another host has it"));
    }
    assert_eq!(read(&disk, 0, 6).unwrap(), b"before");
    assert_eq!(disk.failure().as_deref(), Some("another host has it"));
}
