use std::sync::Arc;

use vmstrata_store::{Effect, Fault, FaultPlan, FaultStore, MemoryStore, OperationKind, StoreId, When};

use super::*;
use crate::opener::LocalFiles;

const EIO: i32 = 5;

fn subject(ino: u64, session: u64) -> Subject {
    Subject { image: FileId { dev: 1, ino }, boot: BootId([7; 16]), session, is_extended: false }
}

/// A journal in a session of its own.
pub(crate) fn fresh(dir: &Path) -> (Journal, Subject) {
    let (mut journal, found) = Journal::open(dir, subject(7, 0), &LocalFiles).unwrap();
    assert_eq!(found, Found::default());
    journal.begin(77).unwrap();
    (journal, subject(7, 77))
}

fn found_in(dir: &tempfile::TempDir, ino: u64, session: u64) -> Vec<Record> {
    let looked = look(dir.path(), &subject(ino, session)).unwrap();
    let (_, opened) = Journal::open(dir.path(), subject(ino, session), &LocalFiles).unwrap();
    assert_eq!(looked, opened);
    assert!(looked.is_there || looked.records.is_empty());
    looked.records
}

fn record(cluster: u64) -> Record {
    Record { slot: Slot::L2(cluster), old: RawEntry::EMPTY, new: RawEntry::standard(cluster << 16) }
}

#[test]
fn what_was_recorded_is_found_again_in_order_across_turns() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = fresh(dir.path());
    journal.append(&[record(1), record(2)]).unwrap();
    journal.turn().unwrap();
    let table = Record::of_l1(3, 1, 2);
    journal.append(&[table]).unwrap();
    assert_eq!(found_in(&dir, 7, 77), [record(1), record(2), table]);
    journal.turn().unwrap();
    journal.append(&[record(5)]).unwrap();
    journal.drop_older();
    assert_eq!(found_in(&dir, 7, 77), [record(5)]);
    assert!(found_in(&dir, 8, 77).is_empty(), "records about another image were believed");
    assert!(found_in(&dir, 7, 78).is_empty(), "records of another session were believed");
    journal.remove();
    assert!(!look(dir.path(), &subject(7, 77)).unwrap().is_there);
}

#[test]
fn records_with_subclusters_are_found_again_and_not_taken_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let extended = |session| Subject { is_extended: true, ..subject(7, session) };
    let (mut journal, _) = Journal::open(dir.path(), extended(0), &LocalFiles).unwrap();
    journal.begin(77).unwrap();
    let raw = |word, subclusters| RawEntry { word, subclusters };
    let records = [raw(1, 2), raw(3, u64::MAX)].map(|new| Record { slot: Slot::L2(4), old: raw(5, 6), new });
    journal.append(&records).unwrap();
    assert_eq!(look(dir.path(), &extended(77)).unwrap().records, records);
    assert!(found_in(&dir, 7, 77).is_empty(), "of an image without subclusters");
}

#[test]
fn a_session_takes_over_without_a_moment_that_has_no_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = fresh(dir.path());
    // Whichever half is the newer one.
    for round in 0..4 {
        let (session, next) = (77 + round, 78 + round);
        journal.append(&[record(10 * round + 1), record(10 * round + 2)]).unwrap();
        if round % 2 == 1 {
            journal.turn().unwrap();
            journal.append(&[record(10 * round + 3)]).unwrap();
            journal.drop_older();
        }
        let (mut again, found) = Journal::open(dir.path(), subject(7, session), &LocalFiles).unwrap();
        again.begin(next).unwrap();
        assert_eq!(found_in(&dir, 7, session), found.records);
        let begun = look(dir.path(), &subject(7, next)).unwrap();
        assert!(begun.is_there && begun.records.is_empty());
        let other = look(dir.path(), &subject(7, 0)).unwrap();
        assert!(!other.is_there && other.of_other_sessions == found.records.len(), "what is lost without it");
        again.drop_older();
        assert!(found_in(&dir, 7, session).is_empty());
        journal = again;
    }
}

#[test]
fn a_half_that_is_begun_again_holds_nothing_old() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = fresh(dir.path());
    journal.append(&[record(1), record(2), record(3)]).unwrap();
    journal.turn().unwrap();
    journal.append(&[record(4)]).unwrap();
    journal.turn().unwrap();
    journal.append(&[record(5)]).unwrap();
    assert_eq!(found_in(&dir, 7, 77), [record(4), record(5)]);
}

#[test]
fn a_journal_grows_to_its_limit_only() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = fresh(dir.path());
    journal.limit(HEADER_LEN + RECORD_LEN as u64);
    journal.append(&[record(1)]).unwrap();
    assert!(journal.append(&[record(2)]).is_err());
    journal.turn().unwrap();
    journal.append(&[record(3)]).unwrap();
    assert_eq!(found_in(&dir, 7, 77), [record(1), record(3)]);
}

#[test]
fn a_torn_record_ends_the_journal_and_another_boot_voids_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = fresh(dir.path());
    journal.append(&[record(1), record(2)]).unwrap();
    let half = &journal.halves[journal.current].store;
    half.write_all(&[0xFF], HostOffset::new(HEADER_LEN + RECORD_LEN as u64 + 9)).unwrap();
    assert_eq!(found_in(&dir, 7, 77), [record(1)]);
    half.write_all(&[0xFF], HostOffset::new(9)).unwrap();
    assert!(found_in(&dir, 7, 77).is_empty());
}

#[test]
fn a_full_file_system_leaves_room_for_one_publication() {
    let Some(room) = little_room(16) else { return };
    let (mut journal, subject) = fresh(&room);
    let most: Vec<Record> = (1000..1000 + TOGETHER_MAX).map(record).collect();
    fill(&room);
    for _ in 0..4 {
        while journal.append(&most[..100]).is_ok() {}
        let before = look(&room, &subject).unwrap().records;
        assert!(before.ends_with(&most[..100]), "what does not fit leaves nothing");
        journal.turn().unwrap();
        journal.append(&most).unwrap();
        let found = look(&room, &subject).unwrap().records;
        assert!(found.starts_with(&before) && found.ends_with(&most), "both halves are whole");
        journal.drop_older();
        journal.turn().unwrap();
        journal.drop_older();
    }
}

/// A journal before its first session, in memory.
fn in_memory(memory: &[Arc<MemoryStore>; 2], plan: &Arc<FaultPlan>) -> Journal {
    let half = |memory: &Arc<MemoryStore>| Half {
        path: PathBuf::new(),
        store: Arc::new(FaultStore::new(Arc::clone(memory) as _, plan, StoreId(0))),
        turn: 0,
        len: 0,
        room: 0,
    };
    Journal::of([half(&memory[0]), half(&memory[1])], subject(7, 0)).unwrap().0
}

#[test]
fn a_record_put_off_that_cannot_be_written_breaks_the_journal() {
    let (plan, memory) = (FaultPlan::new(), [Arc::new(MemoryStore::new()), Arc::new(MemoryStore::new())]);
    let mut journal = in_memory(&memory, &plan);
    journal.begin(77).unwrap();
    journal.append_later(&[record(1)]).unwrap();
    let effect = Effect::Tear { bytes: 0, errno: EIO };
    plan.add(Fault { kind: Some(OperationKind::Write), store: None, when: When::From(0), effect });
    journal.write_out().unwrap_err();
    plan.clear();
    assert!(journal.is_broken());
    journal.append(&[record(2)]).unwrap_err();
    journal.turn().unwrap_err();
}

/// Every write of a half in turn fails, does part of its work, or all of it; and once or for good.
#[test]
fn a_failed_write_loses_no_record_and_leaves_none_of_a_change_that_is_not_made() {
    for nth in 0.. {
        let mut has_failed = false;
        for (bytes, for_good) in
            [0, 32, 40, 64, 1 << 20].into_iter().flat_map(|bytes| [(bytes, false), (bytes, true)])
        {
            let plan = FaultPlan::new();
            let memory = [Arc::new(MemoryStore::new()), Arc::new(MemoryStore::new())];
            let mut journal = in_memory(&memory, &plan);
            let when = if for_good { When::From(nth) } else { When::Nth(nth) };
            let effect = Effect::Tear { bytes, errno: EIO };
            plan.add(Fault { kind: Some(OperationKind::Write), store: None, when, effect });
            has_failed |= !play(&mut journal, &memory);
        }
        if !has_failed {
            break;
        }
    }
}

/// Records, turns and drops; what is found after each step is what was recorded. Returns whether all went well.
fn play(journal: &mut Journal, halves: &[Arc<MemoryStore>; 2]) -> bool {
    let mut went_well = journal.begin(77).is_ok();
    if !went_well {
        return false;
    }
    // What was recorded since the last commit.
    let mut made: Vec<Record> = Vec::new();
    let found = || subject(7, 77).read([&halves[0].to_vec(), &halves[1].to_vec()]).0.records;
    for step in 0..12u64 {
        let records: Vec<Record> = (0..=step % 3).map(|n| record(100 * step + n)).collect();
        let appended = match step % 2 {
            0 => journal.append(&records),
            _ => journal.append_later(&records).and_then(|()| journal.write_out()),
        };
        match appended {
            Ok(()) => made.extend(&records),
            Err(_) => {
                went_well = false;
                let found = found();
                assert!(
                    journal.is_broken() || !records.iter().any(|record| found.contains(record)),
                    "{step}"
                );
            }
        }
        assert!(made.iter().all(|record| found().contains(record)), "step {step}");
        if step % 4 == 3 {
            went_well &= journal.turn().is_ok();
            assert!(made.iter().all(|record| found().contains(record)), "turn {step}");
            journal.drop_older();
            made.clear();
        }
    }
    went_well
}

/// Where a test that needs a little file system of its own finds it.
const ROOM: &str = "VMSTRATA_TEST_ROOM";

/// A file system in memory of `pages` pages; `None` in the process that has the test run where there is one.
fn little_room(pages: usize) -> Option<PathBuf> {
    if let Some(room) = std::env::var_os(ROOM) {
        return Some(room.into());
    }
    let script = "mount -t tmpfs -o size=$1 tmpfs \"$0\" || exit 99; shift; exec \"$@\"";
    let (room, size) = (tempfile::tempdir().unwrap(), format!("{}k", pages * 4));
    let test = std::thread::current().name().expect("a test's thread has its name").to_owned();
    let output = std::process::Command::new("unshare")
        .args(["-rm", "sh", "-c", script])
        .args([room.path().as_os_str(), size.as_ref(), std::env::current_exe().unwrap().as_os_str()])
        .args(["--exact", &test, "--nocapture"])
        .env(ROOM, room.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    None
}

/// Leaves a file system no page.
fn fill(room: &Path) {
    let free = rustix::fs::statvfs(room).unwrap().f_bfree;
    std::fs::write(room.join("filler"), vec![1; free as usize * 4096]).unwrap();
}
