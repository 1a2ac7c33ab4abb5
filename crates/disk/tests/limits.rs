//! Requests wait for a disk's limits in their queue, in order, and go on when they may.

use crate::common;
use std::sync::Arc;

use crate::common::flat::write;
use crate::common::io::{Client, Done};
use crate::common::{open, scratch};
use vmstrata_disk::{CreateOptions, Disk, Limit, Limits, Op, create};

const LEN: u64 = 4096;
const COUNT: u64 = 16;
const DATA: [u8; LEN as usize] = [7; LEN as usize];
const WRITE: Op = Op::Write { fua: false };

/// A disk of which all is written, so that its queues write in place.
fn disk() -> (tempfile::TempDir, Arc<Disk>) {
    let dir = scratch();
    let path = dir.path().join("disk");
    create(&path, &CreateOptions { size: Some(COUNT * LEN), ..CreateOptions::default() }).unwrap();
    let disk = open(&path);
    write(&disk, 0, &vec![1; (COUNT * LEN) as usize]).unwrap();
    (dir, disk)
}

fn a_second(rate: u64) -> Option<Limit> {
    Some(Limit::new(rate, None, None).unwrap())
}

/// One write in an hour, and reads without limit.
fn hardly_any() -> Limits {
    Limits { bps_write: a_second(1), ..Limits::default() }
}

fn push_writes(client: &mut Client) -> Vec<u64> {
    (0..COUNT).map(|number| client.push(WRITE, number * LEN, LEN, Some(&DATA))).collect()
}

fn tokens(done: &[Done]) -> Vec<u64> {
    assert!(done.iter().all(|done| done.result.is_ok()));
    done.iter().map(|done| done.token).collect()
}

#[test]
fn all_requests_of_a_limited_disk_end_in_order() {
    let (_dir, disk) = disk();
    // More than are let through at once.
    disk.limit(Limits { iops_total: a_second(20), ..Limits::default() });
    let mut client = Client::new(&disk, 16);
    let pushed = push_writes(&mut client);
    let flush = client.push(Op::Flush, 0, 0, None);
    assert!(client.at_others() > 0, "nothing waits");
    let mut done = tokens(&client.drain());
    assert!(done[done.len() - 2..].contains(&flush), "it was not after the writes that it covers: {done:?}");
    done.retain(|token| *token != flush);
    assert_eq!(done, pushed);
    let stats = disk.stats();
    assert!(stats.throttled[0] > 0 && stats.throttled_ns[0] > 0, "{stats:?}");
    assert_eq!(stats.at_workers.iter().sum::<u64>(), 1, "no thread waits: a worker only flushed");
}

#[test]
fn without_limits_those_that_wait_go_on_at_once() {
    let (_dir, disk) = disk();
    disk.limit(hardly_any());
    let mut client = Client::new(&disk, 16);
    let pushed = push_writes(&mut client);
    let mut done = tokens(&client.wait());
    assert_eq!(client.at_others() as u64, COUNT - 1);
    std::thread::scope(|scope| {
        // While the queue sleeps, or before.
        scope.spawn(|| disk.limit(Limits::default()));
        done.extend(tokens(&client.drain()));
    });
    assert_eq!(done, pushed);
    assert_eq!(disk.limits(), Limits::default());
}

#[test]
fn one_direction_does_not_wait_for_the_limits_of_the_other() {
    let (_dir, disk) = disk();
    let mut client = Client::new(&disk, 16);
    let mut pass = |limits, first: Op, other: &[Op]| {
        disk.limit(limits);
        let bytes = |op| matches!(op, WRITE).then_some(&DATA[..]);
        let waits: Vec<u64> = [first; 2].map(|op| client.push(op, 0, LEN, bytes(op))).into();
        let others: Vec<u64> = other.iter().map(|op| client.push(*op, LEN, LEN, bytes(*op))).collect();
        let mut done = Vec::new();
        while done.len() < 1 + others.len() {
            done.extend(tokens(&client.wait()));
        }
        assert!(!done.contains(&waits[1]) && others.iter().all(|other| done.contains(other)), "{done:?}");
        disk.limit(Limits::default());
        assert_eq!(tokens(&client.drain()), [waits[1]]);
    };
    pass(hardly_any(), WRITE, &[Op::Read]);
    let reads = Limits { bps_read: a_second(1), ..Limits::default() };
    pass(reads, Op::Read, &[WRITE, Op::Flush]);
}

/// Else a guest that is stopped, or a connection that ends, would wait for all that its queue has.
#[test]
fn a_queue_that_ends_does_not_wait_for_limits() {
    let (_dir, disk) = disk();
    disk.limit(hardly_any());
    let mut client = Client::new(&disk, 16);
    push_writes(&mut client);
    // Each write would wait for an hour.
    drop(client);
    assert_eq!(disk.stats().requests[vmstrata_disk::stats::Kind::Write as usize], COUNT);
    assert!(common::flat::read(&disk, 0, (COUNT * LEN) as usize).unwrap().iter().all(|byte| *byte == 7));
}

/// Queues share the limits of their disk, and one disk's are not another's.
#[test]
fn limits_are_those_of_the_disk() {
    let ((_dir, limited), (_other_dir, free)) = (disk(), disk());
    limited.limit(hardly_any());
    let [mut first, mut second] = [&limited, &limited].map(|disk| Client::new(disk, 16));
    first.push(WRITE, 0, LEN, Some(&DATA));
    first.drain();
    second.push(WRITE, 0, LEN, Some(&DATA));
    assert_eq!(second.at_others(), 1);
    let mut other = Client::new(&free, 16);
    push_writes(&mut other);
    assert_eq!((other.at_others(), other.drain().len() as u64), (0, COUNT));
}
