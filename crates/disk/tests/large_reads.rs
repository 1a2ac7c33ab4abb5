//! Large reads that fall into pieces in many files: the queue's ring reads some of them, a worker the others.

use std::path::{Path, PathBuf};

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_same, write};
use crate::common::io::Client;
use crate::common::stock::{path_str, qemu_img};
use crate::common::{open, open_read_only, scratch};
use vmstrata_disk::stats::Kind;
use vmstrata_disk::{Disk, Op, OpenOptions};
use vmstrata_store::{FaultPlan, OperationKind};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 4 << 20;

/// A chain in which each 64 KiB come from another layer than those before them, and what it reads as.
fn scattered(dir: &Path, layers: u64) -> (PathBuf, Vec<u8>) {
    let mut content = vec![0; SIZE as usize];
    let mut below: Option<PathBuf> = None;
    for layer in 0..layers {
        let path = dir.join(format!("{layer}.qcow2"));
        let size = SIZE.to_string();
        match &below {
            None => qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &size]),
            Some(below) => {
                let backing = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(below)];
                qemu_img(&[&backing[..], &[path_str(&path)]].concat())
            }
        };
        let disk = open(&path);
        for cluster in (layer..SIZE / CLUSTER).step_by(layers as usize) {
            let bytes: Vec<u8> = (0..CLUSTER).map(|i| (i / 7 + cluster * 13 + layer) as u8).collect();
            let at = (cluster * CLUSTER) as usize;
            content[at..at + CLUSTER as usize].copy_from_slice(&bytes);
            write(&disk, cluster * CLUSTER, &bytes).unwrap();
        }
        disk.close().unwrap();
        below = Some(path);
    }
    (below.unwrap(), content)
}

#[test]
fn reads_over_many_layers_arrive_whole_at_any_length() {
    let dir = scratch();
    let (top, content) = scattered(dir.path(), 5);
    let disk = open_read_only(&top);
    let mut client = Client::new(&disk, 8);
    let lengths = [4 << 10, 512 << 10, (512 << 10) + 512, 1 << 20, (1 << 20) - 512, 2 << 20];
    for (step, len) in (0..60u64).zip(lengths.into_iter().cycle()) {
        let at = (step * 37 * 4096 + step % 3 * 512) % (SIZE - len);
        let token = client.push(Op::Read, at, len, None);
        assert_eq!(token, step);
        if step % 4 == 3 {
            client.submit();
        }
        for done in if step % 7 == 6 { client.drain() } else { Vec::new() } {
            done.result.unwrap();
            let len = done.bytes.len();
            let at = (done.token * 37 * 4096 + done.token % 3 * 512) as usize % (SIZE as usize - len);
            assert_same(&done.bytes, &content[at..at + len], at as u64, "large read");
        }
    }
    assert!(client.drain().iter().all(|done| done.result.is_ok()));
    let stats = disk.stats();
    let counted = stats.read_depth.iter().sum::<u64>() + stats.zero_bytes[0];
    assert_eq!(counted, stats.bytes_of(Kind::Read), "every byte comes from somewhere, whoever read it");
}

#[test]
fn pieces_that_lie_next_to_each_other_in_a_file_are_one_read() {
    let dir = scratch();
    let (top, content) = scattered(dir.path(), 2);
    let plan = FaultPlan::new();
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = Disk::open(&top, &read_only, &FaultyFiles::new(&plan).usual_resources()).unwrap();
    disk.warm_map().unwrap();
    let mut client = Client::new(&disk, 8);
    let len = 7 * CLUSTER;
    // A worker opens the files, for the first.
    for at in [SIZE / 2, SIZE / 4] {
        let before = (plan.count(Some(OperationKind::Read)), disk.stats().at_workers[Kind::Read as usize]);
        client.push(Op::Read, at, len, None);
        let done = client.drain().remove(0);
        done.result.unwrap();
        assert_same(&done.bytes, &content[at as usize..(at + len) as usize], at, "pieces of two files");
        let after = (plan.count(Some(OperationKind::Read)), disk.stats().at_workers[Kind::Read as usize]);
        if at == SIZE / 4 {
            assert_eq!((after.0 - before.0, after.1 - before.1), (2, 0), "reads, and by workers");
        }
    }
}

/// Only the second half of the request has pieces in files.
#[test]
fn a_read_that_begins_with_zeros_arrives_whole() {
    let dir = scratch();
    let path = dir.path().join("holes.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &SIZE.to_string()]);
    let disk = open(&path);
    let mut content = vec![0; SIZE as usize];
    for cluster in [11, 13, 15] {
        let at = cluster * CLUSTER;
        write(&disk, at, &[cluster as u8; CLUSTER as usize]).unwrap();
        content[at as usize..(at + CLUSTER) as usize].fill(cluster as u8);
    }
    let mut client = Client::new(&disk, 8);
    client.push(Op::Read, 0, 1 << 20, None);
    for done in client.drain() {
        done.result.unwrap();
        assert_same(&done.bytes, &content[..1 << 20], 0, "zeros first");
    }
}
