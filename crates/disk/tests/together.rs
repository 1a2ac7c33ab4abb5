//! Several requests carried out together read as if each had been alone, also when operations fail below them.

mod common;

use std::path::Path;

use common::faulty::FaultyFiles;
use common::flat::{SECTOR, assert_reads, pattern, range, read};
use common::io::segments_of;
use common::shape::{LayerShape, Made, make};
use common::{for_seeds, open_read_only, open_with, random, scratch, stock};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{CheckOptions, Disk, Op, OpenOptions, Request, check};
use vmstrata_store::{AlignedBuf, Effect, Fault, FaultPlan, OperationKind, When};

/// Writes with their bytes; requests point into those.
#[derive(Default)]
struct Batch(Vec<(u64, AlignedBuf)>);

impl Batch {
    /// Up to 12 writes that do not overlap; many fall into one cluster, some cover several.
    fn random(random: &mut SmallRng, size: u64, cluster: u64) -> Self {
        let mut batch = Self::default();
        for _ in 0..random.random_range(1..=12) {
            let sectors = size / SECTOR;
            let long = if random.random_ratio(1, 8) { 2 * cluster / SECTOR } else { 8 };
            let at = random.random_range(0..sectors);
            let len = random.random_range(1..=long.max(1)).min(sectors - at);
            let (at, len) = (at * SECTOR, len * SECTOR);
            let meets =
                |(other, bytes): &(u64, AlignedBuf)| at < other + bytes.len() as u64 && *other < at + len;
            if !batch.0.iter().any(meets) {
                let mut bytes = AlignedBuf::zeroed(len as usize);
                bytes.copy_from_slice(&pattern(random, len as usize));
                batch.0.push((at, bytes));
            }
        }
        batch
    }

    fn run(&mut self, disk: &Disk) -> Vec<bool> {
        let request = |(at, bytes): &mut (u64, AlignedBuf)| {
            let range = range(*at, bytes.len() as u64);
            Request { op: Op::Write { fua: false }, range, segments: segments_of(bytes), token: 0 }
        };
        let requests: Vec<Request> = self.0.iter_mut().map(request).collect();
        disk.run_together(&requests.iter().collect::<Vec<_>>()).iter().map(Result::is_ok).collect()
    }

    fn enter(&self, model: &mut [u8]) {
        for (at, bytes) in &self.0 {
            model[*at as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }
}

fn chains() -> Vec<Vec<LayerShape>> {
    let compressed = |bits, size| LayerShape { compressed: Some("zlib"), ..LayerShape::qcow2(bits, size) };
    vec![
        vec![LayerShape::qcow2(16, 5 << 20)],
        vec![LayerShape::raw((3 << 20) + 512), LayerShape::qcow2(16, 4 << 20)],
        vec![compressed(12, 600 << 10), LayerShape { operations: 4, ..LayerShape::qcow2(12, 900 << 10) }],
        vec![LayerShape::qcow2(16, 2 << 20), LayerShape { snapshots: 1, ..compressed(9, 300 << 10) }],
        vec![compressed(21, 9 << 20), LayerShape::qcow2(21, 9 << 20)],
    ]
}

#[test]
fn batches_read_as_their_writes() {
    for_seeds(4, |seed| {
        for (number, layers) in chains().iter().enumerate() {
            let dir = scratch();
            let mut random = random("together", seed * 10 + number as u64);
            let Made { top, mut model, cluster, .. } = make(dir.path(), layers, &mut random);
            let mut disk = open_with(&top, &OpenOptions::default());
            for round in 0..60 {
                let mut batch = Batch::random(&mut random, model.len() as u64, cluster);
                assert!(batch.run(&disk).into_iter().all(|done| done));
                batch.enter(&mut model);
                if round % 20 == 19 {
                    assert_reads(&disk, &model, "after some batches");
                    disk.close().expect("closes");
                    drop(disk);
                    stock::assert_clean(&top);
                    disk = open_with(&top, &OpenOptions::default());
                    assert_reads(&disk, &model, "opened again");
                }
            }
        }
    });
}

/// Carries batches out with one fault; returns whether there was still such an operation to fail.
fn run_with_fault(made: &Made, batches: &mut [Batch], fault: Fault) -> bool {
    let plan = FaultPlan::new();
    plan.add(fault);
    let disk = Disk::open(&made.top, &OpenOptions::default(), &FaultyFiles::new(&plan).resources());
    let mut written: Vec<bool> = Vec::new();
    if let Ok(disk) = disk {
        written = batches.iter_mut().flat_map(|batch| batch.run(&disk)).collect();
        if disk.flush().is_err() {
            written.fill(false);
        }
        let _ = disk.close();
    }
    verify(&made.top, &made.model, batches, &written, fault);
    let When::Nth(nth) = fault.when else { panic!("one fault at a time") };
    plan.count(fault.kind) > nth
}

/// What was said to be written is there; what failed may be; the rest is as it was; and the image is sound.
fn verify(top: &Path, model: &[u8], batches: &[Batch], written: &[bool], fault: Fault) {
    let report = check(top, &CheckOptions { force_share: true, ..CheckOptions::default() }).expect("checks");
    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{fault:?}: {:?}", report.findings);
    let disk = open_read_only(top);
    let found = read(&disk, 0, model.len()).expect("reads");
    let mut may: Vec<Vec<u8>> = model.iter().map(|&byte| vec![byte]).collect();
    let writes = batches.iter().flat_map(|batch| &batch.0);
    for (number, (at, bytes)) in writes.enumerate() {
        for (place, &byte) in may[*at as usize..].iter_mut().zip(bytes.iter()) {
            if written.get(number) == Some(&true) {
                place.clear();
            }
            place.push(byte);
        }
    }
    for (place, (byte, may)) in found.iter().zip(&may).enumerate() {
        assert!(may.contains(byte), "{fault:?}: byte {place:#x} reads {byte:#x}, not one of {may:x?}");
    }
}

#[test]
fn a_failed_operation_fails_no_more_than_it_must() {
    let layers =
        [LayerShape::qcow2(12, 300 << 10), LayerShape { operations: 4, ..LayerShape::qcow2(12, 400 << 10) }];
    for (kind, errno) in [
        (OperationKind::Write, 28),
        (OperationKind::Write, 5),
        (OperationKind::Read, 5),
        (OperationKind::Flush, 5),
    ] {
        let mut befell = 0;
        for nth in 0.. {
            let dir = scratch();
            let mut random = random("together faults", 1);
            let made = make(dir.path(), &layers, &mut random);
            let mut batches: Vec<Batch> =
                (0..6).map(|_| Batch::random(&mut random, made.model.len() as u64, made.cluster)).collect();
            let fault =
                Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect: Effect::Fail(errno) };
            if !run_with_fault(&made, &mut batches, fault) {
                break;
            }
            befell += 1;
        }
        assert!(befell > 3, "{kind:?}: only {befell} operations");
    }
}
