//! Many files and one log: one sync for all who wait, and none of them waits for the storage of another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_store::{
    Crash, CrashKind, Effect, Fault, Logged as _, OperationKind, Store as _, StoreId, Survivors, When,
};
use vmstrata_types::HostOffset;

use crate::common::{Files, LOG, LOG_LEN, Rig, before, boot, memory, open_log, sectors_of, zeros};

fn hold(rig: &Rig, store: StoreId, kind: OperationKind, when: When) {
    rig.plan.add(Fault { kind: Some(kind), store: Some(store), when, effect: Effect::Hold });
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn flushes_that_wait_share_one_sync() {
    let files = (0..8).map(|_| memory(before(64 << 10))).collect();
    let rig = Rig::on(memory(zeros(1 << 20)), files);
    for file in &rig.files {
        // What was there before is synced.
        file.flush().unwrap();
        file.write_all(&sectors_of(1, 4096), HostOffset::ZERO).unwrap();
    }
    let usage = rig.log.usage();
    hold(&rig, LOG, OperationKind::Flush, When::Nth(0));
    std::thread::scope(|scope| {
        scope.spawn(|| rig.files[0].flush().unwrap());
        assert!(rig.plan.wait_until_held(1, Duration::from_secs(20)), "the first one syncs");
        for file in &rig.files[1..] {
            scope.spawn(|| file.flush().unwrap());
        }
        wait_until("the others wait", || rig.log.usage().waiting == 7);
        rig.plan.release();
    });
    let after = rig.log.usage();
    assert_eq!((after.records - usage.records, after.syncs - usage.syncs), (8, 2));
}

#[test]
fn a_file_that_hangs_and_fills_its_share_stops_no_other() {
    let rig = Rig::new(2, 1 << 20);
    rig.files.iter().for_each(|file| file.flush().unwrap());
    let write = |file: usize, number: u64| {
        let at = HostOffset::new(number % 200 * 4096);
        rig.files[file].write_all(&sectors_of(number + 1, 4096), at).unwrap();
        rig.files[file].flush().unwrap();
    };
    write(0, 0);
    hold(&rig, StoreId(1), OperationKind::Flush, When::From(0));
    std::thread::scope(|scope| {
        scope.spawn(|| (1..100).for_each(|number| write(0, number)));
        assert!(rig.plan.wait_until_held(1, Duration::from_secs(20)), "its share is full: it syncs");
        (0..200).for_each(|number| write(1, number));
        assert!(rig.log.usage().used > rig.log.usage().bytes / 2, "the log is full of what cannot be synced");
        rig.plan.clear();
        rig.plan.release();
    });
}

/// A checkpoint in the middle of a commit does not let go of what the commit still has to write.
#[test]
fn a_record_stays_until_all_of_it_is_in_the_file() {
    let rig = Rig::new(1, 64 << 10);
    let file = &rig.files[0];
    file.flush().unwrap();
    hold(&rig, StoreId(1), OperationKind::Write, When::Nth(0));
    std::thread::scope(|scope| {
        let place = HostOffset::new(4096);
        scope.spawn(move || file.commit(&[(place, sectors_of(9, 512))]).unwrap());
        assert!(
            rig.plan.wait_until_held(1, Duration::from_secs(20)),
            "it is in the log, and not in the file"
        );
        file.checkpoint().unwrap();
        rig.log.advance().unwrap();
        rig.plan.release();
    });
    let crash = Crash { kind: CrashKind::Power, at: rig.plan.now(), survivors: Survivors::None };
    let image = |base: &[u8], id| memory(crash.image(base, &rig.plan.log(), id));
    let files = Files(vec![image(&before(64 << 10), StoreId(1))]);
    open_log(&image(&zeros(LOG_LEN), LOG), boot(2), &files).unwrap();
    let mut found = [0; 8];
    files.0[0].read_exact(&mut found, HostOffset::new(4096)).unwrap();
    assert_eq!(u64::from_le_bytes(found), 9);
}

#[test]
fn room_is_freed_in_the_background() {
    let rig = Rig::new(2, 1 << 20);
    rig.log.start_checkpoints().unwrap();
    for number in 0..400_u64 {
        let file = &rig.files[number as usize % 2];
        file.write_all(&sectors_of(number, 4096), HostOffset::new(number % 100 * 4096)).unwrap();
        file.flush().unwrap();
    }
    wait_until("most of the log is free", || rig.log.usage().used <= rig.log.usage().bytes / 4);
}

#[test]
fn an_orderly_end_leaves_an_empty_log() {
    let Rig { log_store, raw, log, files, .. } = Rig::new(3, 64 << 10);
    for file in &files {
        file.write_all(&sectors_of(5, 4096), HostOffset::ZERO).unwrap();
        file.flush().unwrap();
        file.write_all(&sectors_of(6, 4096), HostOffset::ZERO).unwrap();
    }
    drop(files);
    log.advance().unwrap();
    assert_eq!((log.usage().used, log.usage().files), (0, 0));
    drop(log);
    let (_, recovered) = open_log(&log_store, boot(2), &Files(Vec::new())).unwrap();
    assert_eq!((recovered.replayed.len(), recovered.bytes), (0, 0));
    let mut bytes = [0; 8];
    raw[0].read_exact(&mut bytes, HostOffset::ZERO).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 6);
    assert_eq!(Arc::strong_count(&raw[0]), 1);
}
