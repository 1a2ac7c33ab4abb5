//! Faults on demand, and what crashes leave.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use vmstrata_store::{
    Crash, CrashKind, Effect, Fault, FaultPlan, FaultStore, LocalFile as _, MemoryStore, Moment, Operation,
    OperationKind, Record, Segment, Store, StoreId, Survivors, When,
};
use vmstrata_types::HostOffset;

const PATIENCE: Duration = Duration::from_secs(20);
const DISK: StoreId = StoreId(0);

fn at(offset: u64) -> HostOffset {
    HostOffset::new(offset)
}

fn wrapped(plan: &Arc<FaultPlan>, id: StoreId, content: Vec<u8>) -> (Arc<MemoryStore>, FaultStore) {
    let memory = Arc::new(MemoryStore::from_vec(content));
    (Arc::clone(&memory), FaultStore::new(memory, plan, id))
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

#[test]
fn every_operation_passes_the_trait_and_is_counted() {
    let plan = FaultPlan::new();
    let (memory, store) = wrapped(&plan, DISK, vec![1; 1000]);
    assert!(store.raw().is_none() && store.raw_alignment() == 1);
    store.write_all(&[2; 10], at(5)).expect("write");
    store.read_padded(&mut [0; 10], at(5)).expect("read");
    store.punch_hole(at(7), 2).expect("punch");
    store.set_len(20).expect("set_len");
    store.flush().expect("flush");
    assert_eq!(store.len().expect("len"), 20);
    assert_eq!(store.extent(at(3)).expect("extent"), (true, at(20)));
    assert_eq!(memory.to_vec(), [[1; 5], [2, 2, 0, 0, 2], [2; 5], [1; 5]].concat());
    assert_eq!(plan.count(None), 7);
    use OperationKind::{Extent, Flush, Len, PunchHole, Read, SetLen, Write};
    for kind in [Read, Write, PunchHole, SetLen, Flush, Len, Extent] {
        assert_eq!(plan.count(Some(kind)), 1, "{kind:?}");
    }
    assert!(plan.log().is_empty(), "nothing is logged unless asked for");
}

#[test]
fn every_kind_of_operation_can_fail_without_effect() {
    type Call = fn(&FaultStore) -> Option<i32>;
    let calls: [(OperationKind, Call); 7] = [
        (OperationKind::Read, |store| errno(store.read_padded(&mut [0; 4], at(0)))),
        (OperationKind::Write, |store| errno(store.write_all(b"new", at(0)))),
        (OperationKind::PunchHole, |store| errno(store.punch_hole(at(0), 4))),
        (OperationKind::SetLen, |store| errno(store.set_len(1))),
        (OperationKind::Flush, |store| errno(store.flush())),
        (OperationKind::Len, |store| errno(store.len())),
        (OperationKind::Extent, |store| errno(store.extent(at(0)))),
    ];
    for (kind, call) in calls {
        let plan = FaultPlan::new();
        let (memory, store) = wrapped(&plan, DISK, b"old content".to_vec());
        plan.fail_nth(Some(kind), 0, libc::ENOSPC);
        assert_eq!(call(&store), Some(libc::ENOSPC), "{kind:?}");
        assert_eq!(memory.to_vec(), b"old content");
        store.write_all(b"new", at(0)).expect("only once");
    }
}

#[test]
fn faults_befall_the_nth_or_all_from_the_nth() {
    let plan = FaultPlan::new();
    let (_, store) = wrapped(&plan, DISK, Vec::new());
    plan.fail_nth(Some(OperationKind::Write), 1, libc::EIO);
    plan.fail_from(None, 5, libc::ENOSPC);
    let results: Vec<Option<i32>> = (0..4)
        .flat_map(|_| [store.write_all(b"x", at(0)), store.flush()])
        .map(|result| result.err().and_then(|error| error.raw_os_error()))
        .collect();
    let full = Some(libc::ENOSPC);
    assert_eq!(results, [None, None, Some(libc::EIO), None, None, full, full, full]);
    plan.clear();
    store.flush().expect("faults are gone");
}

#[test]
fn one_plan_numbers_the_operations_of_several_stores() {
    let plan = FaultPlan::recording();
    let (_, first) = wrapped(&plan, StoreId(1), Vec::new());
    let (_, second) = wrapped(&plan, StoreId(2), Vec::new());
    plan.fail_nth(None, 2, libc::EIO);
    let only_second = Some(StoreId(2));
    let effect = Effect::Fail(libc::EROFS);
    plan.add(Fault { kind: None, store: only_second, when: When::Nth(1), effect });
    first.write_all(b"0", at(0)).expect("0");
    second.write_all(b"1", at(0)).expect("1");
    assert_eq!(errno(first.flush()), Some(libc::EIO));
    assert_eq!(errno(second.flush()), Some(libc::EROFS));
    let log: Vec<_> = plan.log().iter().map(|record| (record.store.0, record.completed.is_some())).collect();
    assert_eq!(log, [(1, true), (2, true), (1, false), (2, false)]);
}

#[test]
fn torn_writes_and_short_reads_move_a_part() {
    let plan = FaultPlan::recording();
    let (memory, store) = wrapped(&plan, DISK, vec![b'.'; 8]);
    let tear = Effect::Tear { bytes: 3, errno: libc::EIO };
    plan.add(Fault { kind: Some(OperationKind::Write), store: None, when: When::Nth(0), effect: tear });
    let mut bytes = *b"abcdef";
    let (left, right) = bytes.split_at_mut(2);
    let segments = [Segment::from_mut(left), Segment::from_mut(right)];
    assert_eq!(errno(store.write_segments(&segments, at(1))), Some(libc::EIO));
    assert_eq!(memory.to_vec(), b".abc....");
    let written = Operation::Write { at: at(1), bytes: b"abc".to_vec() };
    let record = Record { store: DISK, operation: written, issued: Moment(1), completed: None };
    assert_eq!(plan.log(), [record]);

    let short = Effect::Short { bytes: 2 };
    plan.add(Fault { kind: Some(OperationKind::Read), store: None, when: When::Nth(0), effect: short });
    let mut buf = [b'?'; 4];
    assert_eq!(store.read_segments(&[Segment::from_mut(&mut buf)], at(0)).expect("read"), 2);
    assert_eq!(&buf, b".a??");
}

#[test]
fn held_operations_wait_for_their_release() {
    let plan = FaultPlan::new();
    let (memory, store) = wrapped(&plan, DISK, b"old".to_vec());
    plan.add(Fault {
        kind: Some(OperationKind::Write),
        store: None,
        when: When::Nth(0),
        effect: Effect::Hold,
    });
    assert!(!plan.wait_until_held(1, Duration::from_millis(10)), "nothing is held yet");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| store.write_all(b"new", at(0)));
        assert!(plan.wait_until_held(1, PATIENCE));
        assert_eq!(memory.to_vec(), b"old");
        store.write_all(b"!", at(3)).expect("others go on");
        plan.release();
        writer.join().expect("writer").expect("write");
    });
    assert_eq!(memory.to_vec(), b"new!");
}

fn image(plan: &FaultPlan, base: &[u8], crash: Crash) -> Vec<u8> {
    crash.image(base, &plan.log(), DISK)
}

fn crash(kind: CrashKind, at: Moment, survivors: Survivors) -> Crash {
    Crash { kind, at, survivors }
}

#[test]
fn what_was_flushed_survives_and_what_was_not_may() {
    let base = vec![0; 1024];
    let plan = FaultPlan::recording();
    let (_, store) = wrapped(&plan, DISK, base.clone());
    store.write_all(&[1; 1024], at(0)).expect("write");
    store.flush().expect("flush");
    store.write_all(&[2; 1024], at(0)).expect("write");
    let now = plan.now();
    assert_eq!(image(&plan, &base, crash(CrashKind::Power, now, Survivors::None)), [1; 1024]);
    assert_eq!(image(&plan, &base, crash(CrashKind::Power, now, Survivors::All)), [2; 1024]);
    assert_eq!(image(&plan, &base, crash(CrashKind::Process, now, Survivors::None)), [2; 1024]);
    assert_eq!(image(&plan, &base, crash(CrashKind::Power, Moment(0), Survivors::All)), base);
    let sectors: HashSet<[u8; 2]> = (0..64)
        .map(|seed| image(&plan, &base, crash(CrashKind::Power, now, Survivors::Seeded(seed))))
        .map(|image| [image[0], image[512]])
        .collect();
    assert_eq!(sectors, HashSet::from([[1, 1], [1, 2], [2, 1], [2, 2]]), "sectors survive one by one");
}

#[test]
fn a_failed_flush_leaves_what_it_covered_in_doubt() {
    let plan = FaultPlan::recording();
    let (_, store) = wrapped(&plan, DISK, vec![0; 512]);
    store.write_all(&[1; 512], at(0)).expect("write");
    plan.fail_nth(Some(OperationKind::Flush), 0, libc::EIO);
    store.flush().expect_err("failed");
    store.flush().expect("the kernel has forgotten");
    let now = plan.now();
    assert_eq!(image(&plan, &[0; 512], crash(CrashKind::Power, now, Survivors::None)), [0; 512]);
    store.write_all(&[3; 512], at(0)).expect("write");
    store.flush().expect("flush");
    assert_eq!(image(&plan, &[0; 512], crash(CrashKind::Power, plan.now(), Survivors::None)), [3; 512]);
}

#[test]
fn a_flush_does_not_cover_a_write_still_under_way() {
    let record = |operation, issued, completed| Record {
        store: DISK,
        operation,
        issued: Moment(issued),
        completed: Some(Moment(completed)),
    };
    let write = Operation::Write { at: at(0), bytes: vec![1; 512] };
    let log = [record(write, 1, 3), record(Operation::Flush, 2, 4)];
    assert_eq!(crash(CrashKind::Power, Moment(4), Survivors::None).image(&[0; 512], &log, DISK), [0; 512]);
    assert_eq!(crash(CrashKind::Process, Moment(4), Survivors::None).image(&[0; 512], &log, DISK), [1; 512]);
    assert_eq!(crash(CrashKind::Process, Moment(2), Survivors::None).image(&[0; 512], &log, DISK), [0; 512]);
    assert_eq!(crash(CrashKind::Process, Moment(2), Survivors::All).image(&[0; 512], &log, DISK), [1; 512]);
}

#[test]
fn length_and_holes_survive_like_data() {
    let base = vec![7; 1024];
    let plan = FaultPlan::recording();
    let (_, store) = wrapped(&plan, DISK, base.clone());
    store.punch_hole(at(100), 300).expect("punch");
    store.write_all(&[9; 10], at(2000)).expect("grow");
    store.set_len(600).expect("cut");
    store.set_len(700).expect("extend");
    let now = plan.now();
    let mut newest = [vec![7; 100], vec![0; 300], vec![7; 200], vec![0; 100]].concat();
    assert_eq!(image(&plan, &base, crash(CrashKind::Power, now, Survivors::All)), newest);
    assert_eq!(image(&plan, &base, crash(CrashKind::Power, now, Survivors::None)), base);
    let lengths: HashSet<usize> = (0..200)
        .map(|seed| image(&plan, &base, crash(CrashKind::Power, now, Survivors::Seeded(seed))).len())
        .collect();
    assert_eq!(lengths, HashSet::from([1024, 2010, 600, 700]));
    store.flush().expect("flush");
    store.set_len(0).expect("empty");
    let after = image(&plan, &base, crash(CrashKind::Power, plan.now(), Survivors::None));
    assert_eq!(after, newest);
    newest.clear();
    assert_eq!(image(&plan, &base, crash(CrashKind::Power, plan.now(), Survivors::All)), newest);
}

#[test]
fn an_empty_write_past_the_end_leaves_the_end_where_it_is() {
    let plan = FaultPlan::recording();
    let (memory, store) = wrapped(&plan, DISK, vec![1; 10]);
    store.write_all(&[], at(1501)).expect("write");
    assert_eq!(memory.to_vec(), [1; 10]);
    assert_eq!(image(&plan, &[1; 10], crash(CrashKind::Process, plan.now(), Survivors::All)), [1; 10]);
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, len: usize, byte: u8 },
    Punch { at: u64, len: u64 },
    SetLen(u64),
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || prop_oneof![0..4000_u64, (0..8_u64).prop_map(|n| n * 512)];
    prop_oneof![
        6 => (place(), 0..2000_usize, 1..255_u8).prop_map(|(at, len, byte)| Step::Write { at, len, byte }),
        1 => (place(), place()).prop_map(|(at, len)| Step::Punch { at, len }),
        1 => place().prop_map(Step::SetLen),
        2 => Just(Step::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
    /// Against whole states: a sector holds what it held in one of the states since the last flush.
    #[test]
    fn every_sector_of_a_crash_image_is_from_a_state_since_the_last_flush(
        steps in prop::collection::vec(step(), 1..30), seed: u64, cut in 0..31_usize,
    ) {
        let base = vec![0xee; 1500];
        let plan = FaultPlan::recording();
        let (memory, store) = wrapped(&plan, DISK, base.clone());
        // States since the last flush, the newest last, as of the cut.
        let mut states = vec![base.clone()];
        let mut moment = plan.now();
        for (done, step) in steps.iter().enumerate() {
            match *step {
                Step::Write { at: offset, len, byte } => store.write_all(&vec![byte; len], at(offset)).expect("write"),
                Step::Punch { at: offset, len } => store.punch_hole(at(offset), len).expect("punch"),
                Step::SetLen(len) => store.set_len(len).expect("set_len"),
                Step::Flush => store.flush().expect("flush"),
            }
            if done < cut {
                moment = plan.now();
                if matches!(step, Step::Flush) {
                    states.clear();
                }
                states.push(memory.to_vec());
            }
        }
        let newest = states.last().expect("a state");
        let make = |kind, survivors| image(&plan, &base, crash(kind, moment, survivors));
        prop_assert!(make(CrashKind::Power, Survivors::All) == *newest);
        prop_assert!(make(CrashKind::Process, Survivors::Seeded(seed)) == *newest);
        prop_assert!(make(CrashKind::Power, Survivors::None) == states[0]);
        let left = make(CrashKind::Power, Survivors::Seeded(seed));
        prop_assert!(states.iter().any(|state| state.len() == left.len()));
        for (sector, bytes) in left.chunks(512).enumerate() {
            // A state that ended earlier had zeros there, as far as a longer image is concerned.
            let in_state = |state: &Vec<u8>| {
                let mut held: Vec<u8> = state.iter().skip(sector * 512).take(512).copied().collect();
                held.resize(bytes.len().max(held.len()), 0);
                held[..bytes.len()] == *bytes
            };
            prop_assert!(states.iter().any(in_state), "sector {} was never so", sector);
        }
    }
}
