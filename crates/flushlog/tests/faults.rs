//! A log or a file that fails, and logs that are not what they should be.

use std::sync::Arc;

use vmstrata_flushlog::{LogError, LoggedStore, SHORT_MAX};
use vmstrata_store::{Effect, Fault, Logged as _, MemoryStore, OperationKind, Store, StoreId, When};
use vmstrata_types::HostOffset;

use crate::common::{Files, LOG, LOG_LEN, Rig, before, boot, memory, open_log, path_of, sectors_of, zeros};

const LEN: u64 = 64 << 10;

fn fail(rig: &Rig, store: StoreId, kind: OperationKind) {
    let (kind, store) = (Some(kind), Some(store));
    rig.plan.add(Fault { kind, store, when: When::Nth(0), effect: Effect::Fail(5) });
}

fn first(store: &dyn Store) -> u64 {
    let mut bytes = [0; 8];
    store.read_exact(&mut bytes, HostOffset::ZERO).unwrap();
    u64::from_le_bytes(bytes)
}

fn write(store: &LoggedStore, value: u64) {
    store.write_all(&sectors_of(value, 512), HostOffset::ZERO).unwrap();
}

/// All bytes of a store.
fn bytes_of(store: &dyn Store) -> Vec<u8> {
    let mut bytes = vec![0; store.len().unwrap() as usize];
    store.read_exact(&mut bytes, HostOffset::ZERO).unwrap();
    bytes
}

#[test]
fn a_log_that_fails_answers_no_flush_any_more() {
    for kind in [OperationKind::Write, OperationKind::Flush] {
        let rig = Rig::new(2, LEN);
        rig.files.iter().for_each(|file| file.flush().unwrap());
        write(&rig.files[0], 1);
        rig.files[0].flush().unwrap();
        fail(&rig, LOG, kind);
        write(&rig.files[0], 2);
        let told = rig.files[0].flush().unwrap_err().to_string();
        assert!(told.contains("/log"), "{told}");
        rig.files[0].flush().unwrap_err();
        write(&rig.files[1], 3);
        rig.files[1].flush().unwrap_err();
        rig.files[1].flush().unwrap_err();
        assert!(rig.log.failure().is_some());
        // The next start finds what was answered.
        let files = Files(vec![memory(before(LEN)), memory(before(LEN))]);
        open_log(&memory(bytes_of(&*rig.log_store)), boot(2), &files).unwrap();
        assert!([1, 2].contains(&first(&*files.0[0])));
    }
}

/// A kernel reports lost writes once; a process that is started then must not take the page cache for the truth.
#[test]
fn a_file_whose_sync_failed_is_replayed_though_the_host_did_not_go_down() {
    let rig = Rig::new(2, LEN);
    rig.files.iter().for_each(|file| file.flush().unwrap());
    write(&rig.files[0], 1);
    rig.files[0].flush().unwrap();
    fail(&rig, StoreId(1), OperationKind::Flush);
    rig.files[0].checkpoint().unwrap_err();
    write(&rig.files[0], 2);
    rig.files[0].flush().unwrap_err();
    // Others go on.
    write(&rig.files[1], 3);
    rig.files[1].flush().unwrap();
    let files = Files(vec![memory(before(LEN)), memory(before(LEN))]);
    let (_, recovered) = open_log(&rig.log_store, boot(1), &files).unwrap();
    assert_eq!((first(&*files.0[0]), recovered.replayed.len(), recovered.synced.len()), (1, 1, 1));
}

/// In the boot in which a process was killed, the host's memory has what is newer than the log.
#[test]
fn a_killed_process_takes_nothing_back() {
    let rig = Rig::new(1, LEN);
    rig.files[0].flush().unwrap();
    write(&rig.files[0], 1);
    rig.files[0].flush().unwrap();
    write(&rig.files[0], 2);
    let left = memory(bytes_of(&*rig.log_store));
    let files = Files(vec![Arc::clone(&rig.raw[0])]);
    let flushes = || rig.plan.log().iter().filter(|record| record.store == StoreId(1)).count();
    let so_far = flushes();
    open_log(&left, boot(1), &files).unwrap();
    assert_eq!((first(&*rig.raw[0]), flushes()), (2, so_far + 1), "it is synced, and not written");
}

#[test]
fn writes_that_are_not_logged_are_not_undone_by_older_ones() {
    let rig = Rig::new(1, 4 * SHORT_MAX as u64);
    rig.files[0].flush().unwrap();
    write(&rig.files[0], 1);
    rig.files[0].flush().unwrap();
    rig.files[0].write_all(&sectors_of(2, 2 * SHORT_MAX as u64), HostOffset::ZERO).unwrap();
    rig.files[0].flush().unwrap();
    let files = Files(vec![memory(bytes_of(&*rig.raw[0]))]);
    open_log(&memory(bytes_of(&*rig.log_store)), boot(2), &files).unwrap();
    assert_eq!(first(&*files.0[0]), 2);
}

#[test]
fn a_log_that_cannot_be_used_stays_as_it_is() {
    let rig = Rig::new(1, LEN);
    rig.files[0].flush().unwrap();
    write(&rig.files[0], 1);
    rig.files[0].flush().unwrap();
    let left = bytes_of(&*rig.log_store);
    let refused = |store: &Arc<dyn Store>, host, files: &Files| {
        let before = bytes_of(&**store);
        let error = open_log(store, host, files).unwrap_err();
        assert_eq!(bytes_of(&**store), before, "{error}");
        error
    };
    // A file that is gone.
    let error = refused(&memory(left.clone()), boot(2), &Files(Vec::new()));
    assert!(matches!(&error, LogError::Target { file, .. } if *file == path_of(0)), "{error}");
    assert!(error.to_string().contains("/vms/0.qcow2"));
    // A file that cannot be written.
    let broken = Rig::new(1, LEN);
    fail(&broken, StoreId(1), OperationKind::Write);
    let error = refused(&memory(left.clone()), boot(2), &Files(vec![Arc::clone(&broken.raw[0])]));
    assert!(matches!(error, LogError::Target { .. }), "{error}");
    // Another host's.
    let elsewhere = vmstrata_flushlog::Host { id: [8; 16], boot: [2; 16] };
    let error = refused(&memory(left), elsewhere, &Files(vec![memory(before(LEN))]));
    assert!(matches!(error, LogError::OtherHost { .. }), "{error}");
    // None.
    let error = refused(&memory(before(LOG_LEN)), boot(2), &Files(Vec::new()));
    assert!(matches!(error, LogError::NotALog { .. }), "{error}");
    let error = refused(&memory(zeros(64 << 10)), boot(2), &Files(Vec::new()));
    assert!(matches!(error, LogError::TooSmall { .. }), "{error}");
}

#[test]
fn a_log_takes_as_many_files_as_it_has_room_set_aside_for() {
    let rig = Rig::new(1, LEN);
    let join = |number: u64| {
        let store = LoggedStore::new(Arc::new(MemoryStore::new()), path_of(0), number, &rig.log);
        store.join(0).map(|()| store)
    };
    let joined: Vec<_> = (0..64).map(join).take_while(Result::is_ok).map(Result::unwrap).collect();
    assert_eq!(joined.len(), 3, "of four blocks, one is taken");
    drop(joined);
    join(0).unwrap();
}
