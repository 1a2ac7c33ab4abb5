//! A queue's own reads and writes meet the faults of a plan: without a worker, and each by itself.

use std::sync::Arc;
use std::time::Duration;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, assert_same, range, read, write};
use crate::common::io::{Client, Done};
use crate::common::stock::{self, path_str, qemu_img};
use crate::common::{open_read_only, scratch, wait_until};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::stats::Kind;
use vmstrata_disk::{Disk, Op, OpenOptions, snapshot_together};
use vmstrata_store::{
    Crash, CrashKind, Effect, Fault, FaultPlan, Moment, OperationKind, StoreId, Survivors, When,
};

const EIO: i32 = 5;
const CLUSTER: u64 = 65536;
const LEN: u64 = 4096;
/// Requests at a time, each in a cluster of its own.
const COUNT: u64 = 4;

/// A disk that is full of `OLD`, with its map in memory.
struct Full {
    dir: tempfile::TempDir,
    plan: Arc<FaultPlan>,
    id: StoreId,
    disk: Arc<Disk>,
}

const OLD: u8 = 0x11;
const NEW: [u8; LEN as usize] = [0x22; LEN as usize];

/// The ring writes in place where the files are `aligned`, else the queue's thread.
fn full(alignment: usize) -> Full {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &(2 * COUNT * CLUSTER).to_string()]);
    let plan = FaultPlan::recording();
    let files = FaultyFiles::aligned(&plan, alignment);
    let disk = Disk::open(&path, &OpenOptions::default(), &files.resources()).unwrap();
    write(&disk, 0, &vec![OLD; (2 * COUNT * CLUSTER) as usize]).unwrap();
    disk.flush().unwrap();
    disk.warm_map().unwrap();
    Full { id: files.id(&path), dir, plan, disk }
}

impl Full {
    /// Starts as many writes as reads: the writes have the first tokens.
    fn start(&self) -> Client {
        let mut client = Client::new(&self.disk, 16);
        for number in 0..COUNT {
            client.push(Op::Write { fua: false }, number * CLUSTER, LEN, Some(&NEW));
        }
        for number in COUNT..2 * COUNT {
            client.push(Op::Read, number * CLUSTER, LEN, None);
        }
        client.submit();
        client
    }

    fn add(&self, kind: OperationKind, nth: u64, effect: Effect) {
        self.plan.add(Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect });
    }

    fn counts(&self) -> [u64; 4] {
        let at_workers = self.disk.stats().at_workers;
        let of_plan = |kind| self.plan.count(Some(kind));
        let by_worker = |kind| at_workers[kind as usize];
        [
            of_plan(OperationKind::Write),
            of_plan(OperationKind::Read),
            by_worker(Kind::Write),
            by_worker(Kind::Read),
        ]
    }

    /// All that was started has ended well, and the disk is what it should be.
    fn end(self, done: Vec<Done>) {
        for done in done {
            done.result.unwrap();
            let expected = if done.token < COUNT { NEW } else { [OLD; LEN as usize] };
            assert_same(&done.bytes, &expected, 0, "a request's bytes");
        }
        let mut model = vec![OLD; (2 * COUNT * CLUSTER) as usize];
        for number in 0..COUNT {
            model[(number * CLUSTER) as usize..][..LEN as usize].copy_from_slice(&NEW);
        }
        assert_reads(&self.disk, &model, "afterwards");
        self.disk.close().unwrap();
        drop(self.disk);
        stock::assert_clean(&self.dir.path().join("disk"));
    }
}

#[test]
fn reads_and_writes_in_place_pass_the_plan_without_a_worker() {
    for alignment in [1, 512] {
        let all_passed = || {
            let full = full(alignment);
            let before = full.counts();
            let done = full.start().drain();
            let after = full.counts();
            let passed: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
            full.end(done);
            assert_eq!(passed[..2], [COUNT, COUNT], "of the plan");
            assert_eq!(passed[3], 0, "reads at workers");
            passed[2] == 0
        };
        // A write that waited for a processor leaves the next ones to workers for a while.
        while !all_passed() {}
    }
}

#[test]
fn a_worker_makes_good_what_fails_in_a_queue() {
    let effects = [Effect::Fail(EIO), Effect::Tear { bytes: 512, errno: EIO }, Effect::Short { bytes: 512 }];
    for (alignment, effect) in [1, 512].into_iter().flat_map(|aligned| effects.map(|it| (aligned, it))) {
        // A write is never short.
        let is_short = matches!(effect, Effect::Short { .. });
        for nth in 0..COUNT {
            let by_workers = || {
                let full = full(alignment);
                let before = full.counts();
                full.add(OperationKind::Read, nth, effect);
                if !is_short {
                    full.add(OperationKind::Write, nth, effect);
                }
                let done = full.start().drain();
                let after = full.counts();
                full.end(done);
                [after[2] - before[2], after[3] - before[3]]
            };
            let expected = [u64::from(!is_short), 1];
            loop {
                let found = by_workers();
                // A write that waited for a processor leaves the next ones to workers for a while.
                if found[0] <= expected[0] {
                    assert_eq!(found, expected, "{effect:?} of operation {nth}");
                    break;
                }
            }
        }
    }
}

#[test]
fn a_failure_that_lasts_is_the_requests_own() {
    for alignment in [1, 512] {
        let full = full(alignment);
        for kind in [OperationKind::Read, OperationKind::Write] {
            full.plan.fail_from(Some(kind), 0, EIO);
        }
        for done in full.start().drain() {
            assert_eq!(done.result.unwrap_err().errno(), EIO, "request {}", done.token);
        }
        full.plan.clear();
        let done = full.start().drain();
        full.end(done);
    }
}

/// Waits until `count` requests have ended.
fn wait_for(client: &mut Client, count: usize) -> Vec<Done> {
    let mut done = Vec::new();
    while done.len() < count {
        done.extend(client.wait());
    }
    done
}

#[test]
fn others_pass_a_request_that_is_held() {
    for (kind, first) in [(OperationKind::Write, 0), (OperationKind::Read, COUNT)] {
        for nth in 0..COUNT {
            let full = full(512);
            full.add(kind, nth, Effect::Hold);
            let mut client = full.start();
            // A flush covers what has ended, and waits for nothing else.
            let flush = client.push(Op::Flush, 0, 0, None);
            let mut done = wait_for(&mut client, 2 * COUNT as usize);
            assert!(done.iter().all(|done| done.token != first + nth), "ended while it was held");
            assert!(full.plan.wait_until_held(1, Duration::ZERO) && client.in_flight() == 1);
            full.plan.release();
            done.extend(client.drain());
            done.retain(|done| done.token != flush);
            assert_eq!(done.len(), 2 * COUNT as usize);
            drop(client);
            full.end(done);
        }
    }
}

#[test]
fn a_snapshot_waits_for_a_write_that_is_held() {
    let full = full(512);
    full.add(OperationKind::Write, 0, Effect::Hold);
    let mut client = full.start();
    let mut done = wait_for(&mut client, 2 * COUNT as usize - 1);
    std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| {
            let info = SnapshotInfo { name: "state".to_owned(), ..SnapshotInfo::default() };
            snapshot_together(&[&full.disk], &info).map(drop)
        });
        // Once it waits, later writes do so as well.
        wait_until("a snapshot that waits", || {
            client.push(Op::Write { fua: false }, 0, LEN, Some(&NEW));
            client.submit();
            let waits = client.at_others() > 0 || full.disk.layer_count() > 1;
            if !waits {
                client.wait();
            }
            waits
        });
        let layers = full.disk.layer_count();
        full.plan.release();
        assert_eq!(layers, 1, "a layer was frozen under a write");
        done.extend(client.drain().into_iter().filter(|done| done.token < 2 * COUNT));
        snapshot.join().unwrap().unwrap();
    });
    assert_eq!(full.disk.layer_count(), 2);
    drop(client);
    full.end(done);
}

const DURABLE: Op = Op::Write { fua: true };

impl Full {
    fn flushes(&self) -> u64 {
        self.plan.count(Some(OperationKind::Flush))
    }
}

#[test]
fn one_flush_of_the_ring_serves_all_that_wait() {
    for alignment in [1, 512] {
        let full = full(alignment);
        let before = (full.flushes(), full.disk.stats().at_workers);
        full.add(OperationKind::Flush, 0, Effect::Hold);
        let mut client = Client::new(&full.disk, 16);
        client.push(Op::Flush, 0, 0, None);
        client.push(Op::Flush, 0, 0, None);
        client.submit();
        let is_held = full.plan.wait_until_held(1, Duration::ZERO);
        for number in 0..COUNT {
            client.push(DURABLE, number * CLUSTER, LEN, Some(&NEW));
            client.push(Op::Flush, 0, 0, None);
        }
        let read = client.push(Op::Read, COUNT * CLUSTER, LEN, None);
        let passed: Vec<u64> = client.wait().iter().map(|done| done.token).collect();
        full.plan.release();
        assert!(is_held, "no flush of the ring");
        assert_eq!(passed, [read], "who does not flush waits for no flush");
        let done = client.drain();
        assert_eq!(done.len() as u64, 2 + 2 * COUNT);
        assert!(done.iter().all(|done| done.result.is_ok()));
        assert_eq!((full.flushes() - before.0, full.disk.stats().at_workers), (2, before.1));
        drop(client);
        full.end(Vec::new());
    }
}

#[test]
fn all_but_their_own_queue_pass_a_flush_that_is_alone_and_held() {
    let full = full(1);
    let before = full.flushes();
    full.add(OperationKind::Flush, 0, Effect::Hold);
    std::thread::scope(|scope| {
        let alone = scope.spawn(|| {
            let mut client = Client::new(&full.disk, 16);
            client.push(DURABLE, 0, LEN, Some(&NEW));
            client.drain().remove(0).result
        });
        let is_held = full.plan.wait_until_held(1, Duration::from_secs(10));
        let mut client = Client::new(&full.disk, 16);
        client.push(Op::Write { fua: false }, CLUSTER, LEN, Some(&NEW));
        client.push(Op::Read, 0, LEN, None);
        let passed = client.drain();
        // It may not vouch for what came after the flush that is held, nor be made beside it.
        let flush = scope.spawn(|| full.disk.flush());
        let flushes = full.flushes();
        full.plan.release();
        assert!(is_held && passed.iter().all(|done| done.result.is_ok()));
        assert_eq!(flushes - before, 1, "flushed beside a flush");
        alone.join().unwrap().unwrap();
        flush.join().unwrap().unwrap();
        assert_eq!(full.flushes() - before, 2);
    });
    full.disk.close().unwrap();
}

#[test]
fn a_flush_of_a_queue_that_fails_fails_the_disk_and_is_not_made_again() {
    let cases = [(1, 1), (1, 2), (512, 1)];
    for ((alignment, count), nth) in cases.into_iter().flat_map(|case| (0..3).map(move |nth| (case, nth))) {
        let full = full(alignment);
        let before = full.flushes();
        full.add(OperationKind::Flush, nth, Effect::Fail(EIO));
        let mut client = Client::new(&full.disk, 16);
        // The thread flushes for one request, and the ring for two.
        let mut round = || {
            client.push(DURABLE, 0, LEN, Some(&NEW));
            if count == 2 {
                client.push(Op::Flush, 0, 0, None);
            }
            client.drain().iter().filter(|done| done.result.is_err()).count()
        };
        for _ in 0..nth {
            assert_eq!(round(), 0, "before flush {nth}");
        }
        assert_eq!((round(), round()), (count, count), "at flush {nth} and after it");
        assert_eq!(full.flushes() - before, nth + 1, "a lost cause was flushed again");
        let failure = full.disk.failure().expect("the disk has failed");
        assert!(failure.contains("os error 5"), "{failure}");
        full.plan.clear();
        full.disk.flush().unwrap_err();
        full.disk.close().unwrap_err();
        let Full { dir, disk, .. } = full;
        drop((client, disk));
        stock::assert_safe(&dir.path().join("disk"));
    }
}

impl Full {
    /// What the disk reads at `at` after a power failure at a moment that keeps nothing but what was flushed since `since`, in a
    /// log's records; then the image was `before`.
    fn after_power_failure(&self, (before, since): &(Vec<u8>, usize), moment: Moment, at: u64) -> Vec<u8> {
        let crash = Crash { kind: CrashKind::Power, at: moment, survivors: Survivors::None };
        let left = self.dir.path().join("left");
        std::fs::write(&left, crash.image(before, &self.plan.log()[*since..], self.id)).unwrap();
        read(&open_read_only(&left), at, LEN as usize).unwrap()
    }

    /// The image now, and how long the log is.
    fn image(&self) -> (Vec<u8>, usize) {
        (std::fs::read(self.dir.path().join("disk")).unwrap(), self.plan.log().len())
    }
}

#[test]
fn what_a_queue_made_durable_survives_a_power_failure() {
    for (alignment, is_alone) in
        [1, 512].into_iter().flat_map(|alignment| [(alignment, true), (alignment, false)])
    {
        let full = full(alignment);
        let before = full.image();
        let mut client = Client::new(&full.disk, 16);
        let wait_for = |client: &mut Client, token: u64| -> Moment {
            if !is_alone {
                client.push(Op::Read, 0, LEN, None);
            }
            loop {
                if client.wait().iter().any(|done| done.token == token && done.result.is_ok()) {
                    return full.plan.now();
                }
            }
        };
        // By cluster: since when its write is durable.
        let mut durable = Vec::new();
        for first in (0..2 * COUNT).step_by(2) {
            let written = client.push(Op::Write { fua: false }, first * CLUSTER, LEN, Some(&NEW));
            wait_for(&mut client, written);
            let flush = client.push(Op::Flush, 0, 0, None);
            durable.push(wait_for(&mut client, flush));
            let written = client.push(DURABLE, (first + 1) * CLUSTER, LEN, Some(&NEW));
            durable.push(wait_for(&mut client, written));
        }
        let first = full.plan.log()[before.1].issued.0;
        for at in (first..=full.plan.now().0).map(Moment) {
            for (cluster, since) in (0..).zip(&durable).filter(|(_, since)| **since <= at) {
                let found = full.after_power_failure(&before, at, cluster * CLUSTER);
                assert!(found == NEW, "cluster {cluster}, durable since {since:?}, is lost at {at:?}");
            }
        }
        drop(client);
        full.disk.close().unwrap();
    }
}

#[test]
fn a_durable_write_takes_the_tables_that_lead_to_it_along() {
    let full = full(512);
    let before = full.image();
    full.disk.write_zeroes(range(0, CLUSTER), true).unwrap();
    full.disk.flush().unwrap();
    // A new cluster, which the image does not know yet, and an overwrite in it.
    write(&full.disk, 0, &vec![OLD; CLUSTER as usize]).unwrap();
    let mut client = Client::new(&full.disk, 16);
    client.push(DURABLE, 0, LEN, Some(&NEW));
    client.drain().remove(0).result.unwrap();
    assert_same(&full.after_power_failure(&before, full.plan.now(), 0), &NEW, 0, "after a power failure");
    drop(client);
    full.disk.close().unwrap();
}

#[test]
fn a_flush_after_a_snapshot_waits_for_the_layer_that_was_frozen() {
    let full = full(512);
    write(&full.disk, 0, &NEW).unwrap();
    let flushes_by_workers = || full.disk.stats().at_workers[Kind::Flush as usize];
    let (mut client, before) = (Client::new(&full.disk, 16), flushes_by_workers());
    full.plan.add(Fault {
        kind: Some(OperationKind::Flush),
        store: Some(full.id),
        when: When::Nth(0),
        effect: Effect::Hold,
    });
    std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| {
            let info = SnapshotInfo { name: "state".to_owned(), ..SnapshotInfo::default() };
            snapshot_together(&[&full.disk], &info).map(drop)
        });
        wait_until("the layers to change", || full.disk.layer_count() == 2);
        client.push(Op::Flush, 0, 0, None);
        client.submit();
        let left_to_a_worker = flushes_by_workers() - before;
        full.plan.clear();
        assert!(client.drain().remove(0).result.is_ok());
        snapshot.join().unwrap().unwrap();
        assert_eq!(left_to_a_worker, 1, "the ring flushed the new layer alone");
    });
    drop(client);
    full.disk.close().unwrap();
}
