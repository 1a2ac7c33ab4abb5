//! Processes are killed and the power fails at every moment of a workload; what was flushed is there after recovery, and again
//! after a recovery that was cut itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::Rng as _;
use vmstrata_store::{Crash, CrashKind, FaultPlan, FaultStore, Moment, Store, StoreId, Survivors};

use crate::common::{Files, History, LOG, boot, memory, open_log, random};

const LEN: u64 = 256 << 10;
const FILES: usize = 3;
/// After the first of them, the log is as one that was used for long.
const STEPS: [usize; 2] = [240, 80];

/// Recovers what a crash left; returns the files.
fn recover(log: Vec<u8>, files: Vec<Vec<u8>>, as_boot: u8) -> Vec<Vec<u8>> {
    let files = Files(files.into_iter().map(memory).collect());
    open_log(&memory(log), boot(as_boot), &files).expect("recovers");
    bytes_of(&files)
}

fn bytes_of(files: &Files) -> Vec<Vec<u8>> {
    let read = |store: &Arc<dyn Store>| {
        let mut bytes = vec![0; LEN as usize];
        store.read_padded(&mut bytes, vmstrata_types::HostOffset::ZERO).unwrap();
        bytes
    };
    files.0.iter().map(read).collect()
}

/// The power fails while the log is brought into the files; recovery begins anew.
fn recover_twice(log: &[u8], files: &[Vec<u8>], seed: u64) -> Vec<Vec<u8>> {
    let mut random = random(seed);
    let plan = FaultPlan::recording();
    let faulty = |bytes: &Vec<u8>, id| -> Arc<dyn Store> {
        Arc::new(FaultStore::new(memory(bytes.clone()), &plan, id))
    };
    let log_store = faulty(&log.to_vec(), LOG);
    let stores = (1..).zip(files).map(|(id, bytes)| faulty(bytes, StoreId(id))).collect();
    open_log(&log_store, boot(2), &Files(stores)).expect("recovers");
    let at = Moment(random.random_range(0..=plan.now().0));
    let crash = Crash { kind: CrashKind::Power, at, survivors: Survivors::Seeded(random.random()) };
    let records = plan.log();
    let image = |base: &[u8], id| crash.image(base, &records, id);
    let files = (1..).zip(files).map(|(id, bytes)| image(bytes, StoreId(id))).collect();
    recover(image(log, LOG), files, 3)
}

/// Cuts a workload at each of its last moments; returns how often.
fn cut_everywhere(seed: u64) -> usize {
    let history = History::make(seed, FILES, LEN, STEPS[0] + STEPS[1]);
    let first = history.steps[STEPS[0]].began.0;
    let mut random = random(seed ^ 0xc07);
    let mut cuts = 0;
    for at in (first..=history.end.0).map(Moment) {
        let choices = [Survivors::None, Survivors::All, Survivors::Seeded(random.random())];
        let survivors = choices[random.random_range(0..choices.len())];
        let crash = Crash { kind: CrashKind::Power, at, survivors };
        let (log, files) = history.left(&crash);
        let recovered = if random.random_ratio(1, 4) {
            recover_twice(&log, &files, random.random())
        } else {
            recover(log, files, 2)
        };
        recovered.iter().enumerate().for_each(|(file, bytes)| history.check(file, bytes, at, false));
        cuts += 1;
        if random.random_ratio(1, 4) {
            let crash = Crash { kind: CrashKind::Process, at, survivors: Survivors::All };
            let (log, files) = history.left(&crash);
            let recovered = recover(log, files, 1);
            recovered.iter().enumerate().for_each(|(file, bytes)| history.check(file, bytes, at, true));
            cuts += 1;
        }
    }
    cuts
}

fn knob(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// `VMSTRATA_SEED` moves the seeds, `VMSTRATA_SOAK_SECONDS` goes on with new ones.
#[test]
fn what_was_flushed_survives_a_crash_at_any_moment() {
    let soak = Duration::from_secs(knob("VMSTRATA_SOAK_SECONDS").unwrap_or(0));
    let (first, began) = (knob("VMSTRATA_SEED").unwrap_or(0), Instant::now());
    let (mut seed, mut cuts) = (first, 0);
    while seed < first + 3 || began.elapsed() < soak {
        println!("seed {seed}");
        cuts += cut_everywhere(seed);
        seed += 1;
    }
    println!("{cuts} cuts of {} workloads", seed - first);
}

/// One file kept the tail, and what a record had left free at the end of the ring was taken from what is set aside.
#[test]
fn a_ring_with_a_gap_at_its_end_has_room_for_what_must_be_told() {
    History::make(1002, FILES, LEN, STEPS[0] + STEPS[1]);
}

#[test]
fn workloads_write_the_log_more_than_once() {
    let history = History::make(0, FILES, LEN, STEPS[0]);
    let to_log = history.records.iter().filter(|record| record.store == LOG);
    let written: usize = to_log
        .map(|record| match &record.operation {
            vmstrata_store::Operation::Write { bytes, .. } => bytes.len(),
            _ => 0,
        })
        .sum();
    assert!(written as u64 > crate::common::LOG_LEN, "{written} bytes went to the log");
    assert!(history.steps.iter().any(|taken| matches!(taken.step, crate::common::Step::Elsewhere { .. })));
}
