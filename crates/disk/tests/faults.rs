//! Every store operation fails in turn: nothing panics, no read lies, no acknowledged flush is lost, and what is left
//! is an image that stock tools find free of corruption. Steps are made one by one, or several at a time through a queue.

use crate::common;
use std::path::{Path, PathBuf};
use std::slice;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{read, write};
use crate::common::io::Client;
use crate::common::ledger::{Ledger, Step, batches, steps, take};
use crate::common::shape::{LayerShape, Made, make};
use crate::common::{for_seeds, open_read_only, random, scratch, stock};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo};
use vmstrata_disk::{CheckOptions, CreateOptions, Disk, Error, ErrorKind, OpenOptions, check, create};
use vmstrata_store::{Effect, Fault, FaultPlan, Operation, OperationKind, When};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// A chain to be used again and again from the state it was made in.
struct Bench {
    _dir: tempfile::TempDir,
    made: Made,
    saved: Vec<(PathBuf, Vec<u8>)>,
    /// Steps that are under way at the same time: one by one, unless there is a queue.
    batches: Vec<Vec<Step>>,
    queue: Option<Queue>,
    /// Whether the host has in memory what first writes are written over; where it has not, a flush copies that up, and may be
    /// tried again when it cannot.
    in_memory: bool,
}

/// A queue that makes the steps.
#[derive(Clone, Copy)]
struct Queue {
    /// Of the active layer's file: from 2 on, the ring writes in place, else the queue's thread.
    alignment: usize,
}

impl Bench {
    fn new(layers: &[LayerShape], seed: u64, count: usize) -> Self {
        let dir = scratch();
        let mut random = random("faults", seed);
        let made = make(dir.path(), layers, &mut random);
        let saved = |number| {
            let path = dir.path().join(format!("layer{number}"));
            let bytes = std::fs::read(&path).expect("made");
            (path, bytes)
        };
        let saved = (0..layers.len()).map(saved).collect();
        let steps = steps(&mut random, count, made.model.len() as u64, made.cluster);
        let batches = batches(steps, 1);
        Self { _dir: dir, made, saved, batches, queue: None, in_memory: false }
    }

    fn restore(&self) {
        for (path, bytes) in &self.saved {
            std::fs::write(path, bytes).expect("restored");
        }
    }

    /// Runs the workload with one fault; returns whether there was still such an operation to fail.
    fn run(&self, fault: Fault, ask_stock: bool) -> bool {
        self.restore();
        let plan = FaultPlan::new();
        plan.add(fault);
        if self.in_memory {
            plan.read_now();
        }
        let files = FaultyFiles::aligned(&plan, self.queue.map_or(1, |queue| queue.alignment));
        let mut outcome = Outcome::new(self);
        if let Ok(disk) = Disk::open(&self.made.top, &OpenOptions::default(), &files.resources()) {
            let mut client = self.queue.map(|_| Client::new(&disk, 8));
            for batch in &self.batches {
                let results = match &mut client {
                    Some(client) => client.take(batch),
                    None => batch.iter().map(|step| take(&disk, step)).collect(),
                };
                outcome.batch(batch, results, fault);
            }
            drop(client);
            let _ = disk.close();
        }
        let When::Nth(nth) = fault.when else { panic!("one fault at a time") };
        let befell = plan.count(fault.kind) > nth;
        outcome.verify(&self.made.top, ask_stock, fault);
        befell
    }
}

struct Outcome {
    ledger: Ledger,
    /// The last step made.
    last: usize,
    flushed: usize,
    /// A flush failed: the disk must take no more writes.
    must_refuse: bool,
    /// Not every flush that fails is the host's.
    may_copy: bool,
}

impl Outcome {
    fn new(bench: &Bench) -> Self {
        let ledger = Ledger::new(&bench.made.model, bench.made.cluster);
        Self { ledger, last: 0, flushed: 0, must_refuse: false, may_copy: bench.in_memory }
    }

    /// Steps that were under way at the same time have ended.
    fn batch(&mut self, steps: &[Step], results: Vec<Result<Option<Vec<u8>>, Error>>, fault: Fault) {
        let (before, must_refuse) = (self.last, self.must_refuse);
        for (step, result) in steps.iter().zip(&results) {
            self.last += 1;
            self.ledger.enter(self.last, step, result.is_ok());
        }
        for (place, (step, result)) in steps.iter().zip(results).enumerate() {
            self.ended(step, result, (before, before + 1 + place), must_refuse, fault);
        }
    }

    /// A step has ended, of a batch after the step `before`.
    fn ended(
        &mut self,
        step: &Step,
        result: Result<Option<Vec<u8>>, Error>,
        (before, number): (usize, usize),
        must_refuse: bool,
        fault: Fault,
    ) {
        match result {
            Ok(bytes) => {
                let refused_kind = step.changes_disk() || matches!(step, Step::Flush);
                assert!(!(must_refuse && refused_kind), "{fault:?}: {step:?} succeeded after a failed flush");
                if let (Step::Read { at, .. }, Some(bytes)) = (step, bytes) {
                    self.ledger
                        .check(*at, &bytes, before, self.last)
                        .unwrap_or_else(|error| panic!("{fault:?}: {error}"));
                }
                if matches!(step, Step::Flush) {
                    self.flushed = number;
                }
            }
            Err(error) if must_refuse && !matches!(step, Step::Read { .. }) => {
                let ErrorKind::Failed { cause } = error.kind() else { panic!("{fault:?}: {error}") };
                assert!(!cause.is_empty() && error.errno() == EIO);
            }
            Err(_) => {
                let was_flush = !self.may_copy && matches!(step, Step::Flush);
                self.must_refuse |= was_flush || fault.kind == Some(OperationKind::Flush);
            }
        }
    }

    /// What is left when the process has gone, as a successor and stock tools see it.
    fn verify(&self, path: &Path, ask_stock: bool, fault: Fault) {
        let report =
            check(path, &CheckOptions { force_share: true, ..CheckOptions::default() }).expect("checks");
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{fault:?}: {:?}", report.findings);
        if ask_stock {
            stock::assert_safe(path);
        }
        let disk = open_read_only(path);
        let bytes = read(&disk, 0, disk.size() as usize).expect("reads");
        let checked = self.ledger.check(0, &bytes, self.flushed, self.last);
        checked.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
    }
}

/// Fails the first, second, ... operation of a kind, until there is no such operation any more.
fn fail_each(bench: &Bench, kind: OperationKind, effect: Effect) -> u64 {
    for nth in 0.. {
        let fault = Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect };
        let ask_stock = nth % 16 == 3 || std::env::var_os("VMSTRATA_SOAK_SECONDS").is_some();
        if !bench.run(fault, ask_stock) {
            return nth;
        }
    }
    unreachable!("workloads end")
}

/// Small clusters and wide refcounts: the refcount table grows, tables are copied, clusters are reused.
fn small_clusters(seed: u64) -> Bench {
    let base = LayerShape::qcow2(12, 300 << 10);
    let active = LayerShape { refcount_bits: 64, operations: 4, ..LayerShape::qcow2(9, 400 << 10) };
    Bench::new(&[base, active], seed, 90)
}

/// An internal snapshot above compressed clusters: everything is copied on write.
fn snapshots(seed: u64) -> Bench {
    let layer = LayerShape { snapshots: 1, compressed: Some("zlib"), ..LayerShape::qcow2(12, 256 << 10) };
    Bench::new(&[layer], seed, 90)
}

/// Parts of clusters, written one by one.
fn subclusters(seed: u64) -> Bench {
    let base = LayerShape::qcow2(12, 300 << 10);
    let active = LayerShape { subclusters: true, operations: 4, ..LayerShape::qcow2(14, 400 << 10) };
    Bench::new(&[base, active], seed, 90)
}

/// What first writes are written over is in the host's memory: it is copied up at once.
fn in_memory(seed: u64) -> Bench {
    let base = LayerShape::qcow2(12, 300 << 10);
    let active = LayerShape { operations: 4, ..LayerShape::qcow2(12, 400 << 10) };
    Bench { in_memory: true, ..Bench::new(&[base, active], seed, 90) }
}

/// Several requests at a time: the queue's thread writes in place, or its ring does, and its ring reads.
fn queued(seed: u64) -> [Bench; 2] {
    [1, 512].map(|alignment| {
        let bench = in_memory(seed);
        let steps = bench.batches.into_iter().flatten().collect();
        Bench { batches: batches(steps, 4), queue: Some(Queue { alignment }), ..bench }
    })
}

/// All of them.
fn benches(seed: u64) -> impl Iterator<Item = Bench> {
    [small_clusters(seed), snapshots(seed), in_memory(seed), subclusters(seed)]
        .into_iter()
        .chain(queued(seed))
}

#[test]
fn any_failed_write_leaves_a_sound_image() {
    for_seeds(1, |seed| {
        for bench in benches(seed) {
            for effect in [Effect::Fail(EIO), Effect::Fail(ENOSPC), Effect::Tear { bytes: 512, errno: EIO }] {
                assert!(fail_each(&bench, OperationKind::Write, effect) > 30, "the workload writes");
            }
        }
    });
}

#[test]
fn any_failed_or_short_read_is_an_error_or_harmless() {
    for_seeds(1, |seed| {
        for bench in benches(seed) {
            for effect in [Effect::Fail(EIO), Effect::Tear { bytes: 512, errno: EIO }] {
                assert!(fail_each(&bench, OperationKind::Read, effect) > 5, "the workload reads");
            }
        }
    });
}

#[test]
fn any_failed_flush_refuses_all_later_writes() {
    for_seeds(3, |seed| {
        for bench in benches(seed) {
            assert!(fail_each(&bench, OperationKind::Flush, Effect::Fail(EIO)) > 5, "the workload flushes");
        }
    });
}

#[test]
fn a_host_that_cannot_punch_holes_or_tell_lengths_is_survived() {
    let bench = small_clusters(7);
    for kind in [OperationKind::PunchHole, OperationKind::Len, OperationKind::Extent, OperationKind::SetLen] {
        fail_each(&bench, kind, Effect::Fail(95));
    }
}

/// A full host: writes fail with ENOSPC, and once there is space again everything goes on.
#[test]
fn a_full_host_is_an_error_until_there_is_space_again() {
    let bench = small_clusters(3);
    bench.restore();
    let plan = FaultPlan::new();
    let files = FaultyFiles::new(&plan);
    let disk = Disk::open(&bench.made.top, &OpenOptions::default(), &files.resources()).expect("opens");
    let mut model = bench.made.model.clone();
    plan.fail_from(Some(OperationKind::Write), 0, ENOSPC);
    for at in (0..model.len() as u64).step_by(4096) {
        if let Err(error) = write(&disk, at, &[0x77; 512]) {
            assert_eq!(error.errno(), ENOSPC, "{error}");
        }
    }
    plan.clear();
    for at in (0..model.len() as u64).step_by(4096) {
        write(&disk, at, &[0x78; 512]).expect("there is space again");
        model[at as usize..at as usize + 512].fill(0x78);
    }
    common::flat::assert_reads(&disk, &model, "after a full host");
    disk.close().expect("closes");
    drop(disk);
    stock::assert_safe(&bench.made.top);
}

/// Two threads flush, and the host fails once: neither may be told that its data is safe when it is not, and the
/// second flush must not succeed only because the kernel reports a failure once.
#[test]
fn a_failure_is_not_forgotten_by_the_flush_that_waited_for_it() {
    for nth in 0..6 {
        let dir = scratch();
        let mut random = random("waiting", nth);
        let made =
            make(dir.path(), &[LayerShape { operations: 0, ..LayerShape::qcow2(12, 1 << 20) }], &mut random);
        let plan = FaultPlan::new();
        let files = FaultyFiles::new(&plan);
        let disk = Disk::open(&made.top, &OpenOptions::default(), &files.resources()).expect("opens");
        write(&disk, 512 << 10, &[0x55; 4096]).expect("writes");
        let fault =
            |effect| Fault { kind: Some(OperationKind::Write), store: None, when: When::Nth(0), effect };
        // The commit stops before it writes the tables; meanwhile others come to wait behind it.
        plan.add(fault(Effect::Hold));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| disk.flush());
            assert!(plan.wait_until_held(1, std::time::Duration::from_secs(20)));
            plan.add(Fault { when: When::Nth(0), ..fault(Effect::Fail(EIO)) });
            plan.add(Fault { kind: Some(OperationKind::Flush), ..fault(Effect::Fail(EIO)) });
            let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| disk.flush())).collect();
            std::thread::sleep(std::time::Duration::from_millis(20));
            plan.release();
            assert!(first.join().unwrap().is_err());
            for flush in waiting {
                assert!(flush.join().unwrap().is_err(), "a flush behind a failed one succeeded");
            }
        });
        assert!(write(&disk, 0, &[1; 512]).is_err() && disk.close().is_err());
    }
}

/// After a failed flush nobody knows whether the clusters that the journal leads to reached the disk, with the bytes
/// that were copied up into them: a successor must not believe it.
#[test]
fn a_journal_is_not_taken_up_after_a_failed_flush() {
    let dir = scratch();
    let layers =
        [LayerShape::qcow2(16, 1 << 20), LayerShape { operations: 0, ..LayerShape::qcow2(16, 1 << 20) }];
    let made = make(dir.path(), &layers, &mut random("journal", 0));
    let journals = dir.path().join("journals");
    let plan = FaultPlan::new();
    let resources = FaultyFiles::new(&plan).resources_with(Some(journals.clone()));
    let disk = Disk::open(&made.top, &OpenOptions::default(), &resources).expect("opens");
    write(&disk, 4096, &[0x66; 512]).expect("writes");
    plan.fail_nth(Some(OperationKind::Flush), 0, EIO);
    assert!(disk.flush().is_err() && disk.close().is_err());
    drop((disk, resources));
    let files = FaultyFiles::new(&FaultPlan::new());
    let disk =
        Disk::open(&made.top, &OpenOptions::default(), &files.resources_with(Some(journals))).expect("opens");
    common::flat::assert_reads(&disk, &made.model, "after a failed flush");
    disk.close().expect("closes");
    drop(disk);
    stock::assert_safe(&made.top);
}

/// A version 2 header names no session, so nobody sees that a process was killed while it froze the layer.
#[test]
fn a_frozen_version_2_layer_is_flushed_before_the_disk_is_written() {
    let dir = scratch();
    let path = dir.path().join("web.qcow2");
    create(&path, &CreateOptions { size: Some(1 << 20), version: 2, ..CreateOptions::default() }).unwrap();
    let info = SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() };
    let (open, options) = (OpenOptions::default(), PrepareOptions::default());
    snapshot::create(slice::from_ref(&path), &info, &open, &options, &common::small_resources(None)).unwrap();
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    let disk = Disk::open(&path, &open, &files.resources()).unwrap();
    let frozen = files.id(&disk.layers()[0].path);
    let log = plan.log();
    assert!(log.iter().any(|record| record.store == frozen && record.operation == Operation::Flush));
}
