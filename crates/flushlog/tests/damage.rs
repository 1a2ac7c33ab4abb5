//! Bytes of a log that flip: nothing is replayed that was not logged, and nothing that was flushed goes missing silently.

use std::sync::Arc;

use vmstrata_flushlog::{LogError, SHORT_MAX};
use vmstrata_store::{Crash, CrashKind, Moment, Operation, Store as _, Survivors};
use vmstrata_types::HostOffset;

use crate::common::{Files, History, LOG, Rig, boot, memory, open_log, sectors_of};

const LEN: u64 = 128 << 10;
const FILES: usize = 2;

#[test]
fn a_flipped_byte_is_found_or_costs_no_more_than_the_last_batch() {
    let (history, log, files) = full_log();
    // Without the last batch, the state is one of before that was asked for.
    let to_log = |record: &&vmstrata_store::Record| {
        record.store == LOG && matches!(record.operation, Operation::Write { .. })
    };
    let last = history.records.iter().rfind(to_log).unwrap().issued;
    let before_last = Moment(last.0 - 1);
    let (mut damaged, mut whole, mut cut) = (0, 0, 0);
    let used = (0..log.len()).filter(|at| log[*at] != 0);
    for at in used.step_by(13) {
        let mut flipped = log.clone();
        flipped[at] ^= 1 << (at % 8);
        let targets = Files(files.iter().cloned().map(memory).collect());
        match open_log(&memory(flipped), boot(2), &targets) {
            Err(LogError::Damaged { .. }) => damaged += 1,
            Err(error) => panic!("byte {at:#x}: {error}"),
            Ok((_, recovered)) => {
                let mut content = vec![0; LEN as usize];
                let mut check = |flushed_by| {
                    for (file, store) in targets.0.iter().enumerate() {
                        store.read_exact(&mut content, HostOffset::ZERO).unwrap();
                        history.check_between(file, &content, [flushed_by, history.end], false);
                    }
                };
                if recovered.bytes == whole_bytes(&log, &files) {
                    check(history.end);
                    whole += 1;
                } else {
                    check(before_last);
                    cut += 1;
                }
            }
        }
    }
    assert!(damaged > 0 && whole > 0 && cut > 0, "{damaged}, {whole}, {cut}");
}

/// A workload that ends with several batches in the log, and what a power failure then leaves.
fn full_log() -> (History, Vec<u8>, Vec<Vec<u8>>) {
    let found = (0..100).find_map(|seed| {
        let history = History::make(seed, FILES, LEN, 60);
        let crash = Crash { kind: CrashKind::Power, at: history.end, survivors: Survivors::None };
        let (log, files) = history.left(&crash);
        (whole_bytes(&log, &files) > 40 << 10).then_some((history, log, files))
    });
    found.expect("some workload does")
}

fn whole_bytes(log: &[u8], files: &[Vec<u8>]) -> u64 {
    let targets = Files(files.iter().cloned().map(memory).collect());
    open_log(&memory(log.to_vec()), boot(2), &targets).unwrap().1.bytes
}

/// What the older of the headers would lead to may be undone by what was flushed since without the log.
#[test]
fn either_header_will_do() {
    for damaged in 0..2 {
        let rig = Rig::new(1, 4 * SHORT_MAX as u64);
        let file = &rig.files[0];
        let write = |value, len| file.write_all(&sectors_of(value, len), HostOffset::ZERO).unwrap();
        file.flush().unwrap();
        write(1, 512);
        file.flush().unwrap();
        file.checkpoint().unwrap();
        rig.log.advance().unwrap();
        write(2, 2 * SHORT_MAX as u64);
        file.flush().unwrap();
        rig.log_store.write_all(&[0xff; 512], HostOffset::new(damaged * 4096)).unwrap();
        open_log(&rig.log_store, boot(2), &Files(vec![Arc::clone(&rig.raw[0])])).unwrap();
        let mut found = [0; 8];
        rig.raw[0].read_exact(&mut found, HostOffset::ZERO).unwrap();
        assert_eq!(u64::from_le_bytes(found), 2, "header {damaged}");
    }
}
