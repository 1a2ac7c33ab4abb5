use super::*;

fn image(ino: u64) -> FileId {
    FileId { dev: 1, ino }
}

fn reopen(dir: &tempfile::TempDir, ino: u64, session: u64) -> Vec<Record> {
    Journal::open(dir.path(), image(ino), session).unwrap().1
}

fn record(cluster: u64) -> Record {
    Record { slot: Slot::L2(cluster), old: 0, new: cluster << 16 }
}

#[test]
fn what_was_noted_is_found_again_in_order_across_turns() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, found) = Journal::open(dir.path(), image(7), 0).unwrap();
    assert!(found.is_empty());
    journal.reset(77).unwrap();
    journal.append(&[record(1), record(2)]).unwrap();
    journal.turn(&[]).unwrap();
    let table = Record { slot: Slot::L1(3), old: 1, new: 2 };
    journal.append(&[table]).unwrap();
    drop(journal);
    let (mut journal, found) = Journal::open(dir.path(), image(7), 77).unwrap();
    assert_eq!(found, [record(1), record(2), table]);
    journal.reset(78).unwrap();
    journal.append(&[record(4)]).unwrap();
    journal.turn(&[]).unwrap();
    journal.append(&[record(5)]).unwrap();
    journal.drop_older().unwrap();
    assert_eq!(reopen(&dir, 7, 78), [record(5)]);
    assert!(reopen(&dir, 7, 77).is_empty(), "notes of another session were believed");
    assert!(reopen(&dir, 8, 78).is_empty(), "notes about another image were believed");
    journal.remove();
    assert!(reopen(&dir, 7, 78).is_empty());
}

#[test]
fn who_takes_a_journal_up_may_leave_some_of_it_there() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path(), image(7), 0).unwrap();
    journal.reset(77).unwrap();
    // Whichever half is the newer one.
    for round in 0..4 {
        journal.append(&[record(10 * round + 1), record(10 * round + 2)]).unwrap();
        if round % 2 == 1 {
            journal.turn(&[record(10 * round + 2)]).unwrap();
            journal.append(&[record(10 * round + 3)]).unwrap();
        }
        drop(journal);
        let (mut again, found) = Journal::open(dir.path(), image(7), 77).unwrap();
        assert!(found.contains(&record(10 * round + 2)));
        again.go_on(&[record(10 * round + 2)]).unwrap();
        assert_eq!(reopen(&dir, 7, 77), [record(10 * round + 2)]);
        journal = again;
    }
}

/// A half that could not be emptied must not show its old notes behind the new ones.
#[test]
fn a_half_that_is_begun_again_holds_nothing_old() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path(), image(7), 0).unwrap();
    journal.reset(77).unwrap();
    journal.append(&[record(1), record(2), record(3)]).unwrap();
    journal.turn(&[]).unwrap();
    journal.append(&[record(4)]).unwrap();
    journal.turn(&[]).unwrap();
    journal.append(&[record(5)]).unwrap();
    assert_eq!(reopen(&dir, 7, 77), [record(4), record(5)]);
}

#[test]
fn a_journal_grows_to_its_limit_only() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path(), image(7), 0).unwrap();
    journal.reset(77).unwrap();
    journal.limit(HEADER_LEN + RECORD_LEN as u64);
    journal.append(&[record(1)]).unwrap();
    assert!(journal.append(&[record(2)]).is_err());
    journal.turn(&[]).unwrap();
    journal.append(&[record(3)]).unwrap();
    assert_eq!(reopen(&dir, 7, 77), [record(1), record(3)]);
}

#[test]
fn a_torn_record_ends_the_journal_and_another_boot_voids_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path(), image(7), 0).unwrap();
    journal.reset(77).unwrap();
    journal.append(&[record(1), record(2)]).unwrap();
    let half = &journal.halves[0];
    half.file.set_len(HEADER_LEN + RECORD_LEN as u64 + 9).unwrap();
    assert_eq!(reopen(&dir, 7, 77), [record(1)]);
    half.file.write_all_at(&[0xFF], 9).unwrap();
    assert!(reopen(&dir, 7, 77).is_empty());
}

/// Where a test that needs a little file system of its own finds it.
const ROOM: &str = "VMSTRATA_TEST_ROOM";

/// A file system in memory of `pages` pages; `None` in the process that has `test` run where there is one.
fn little_room(test: &str, pages: usize) -> Option<std::path::PathBuf> {
    if let Some(room) = std::env::var_os(ROOM) {
        return Some(room.into());
    }
    let script = "mount -t tmpfs -o size=$1 tmpfs \"$0\" || exit 99; shift; exec \"$@\"";
    let (room, size) = (tempfile::tempdir().unwrap(), format!("{}k", pages * 4));
    let output = std::process::Command::new("unshare")
        .args(["-rm", "sh", "-c", script])
        .args([room.path().as_os_str(), size.as_ref(), std::env::current_exe().unwrap().as_os_str()])
        .args(["--exact", test, "--nocapture"])
        .env(ROOM, room.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    None
}

/// Leaves a file system that has only `pages` pages left.
fn fill(room: &Path, pages: u64) {
    let free = rustix::fs::statvfs(room).unwrap().f_bfree;
    std::fs::write(room.join("filler"), vec![1; (free - pages) as usize * 4096]).unwrap();
}

/// What stays of a commit may be more than there is room for. The half that was begun must not be taken for a newer one than
/// that which goes on.
#[test]
fn a_half_that_has_no_room_for_what_stays_is_none() {
    let test = "journal::tests::a_half_that_has_no_room_for_what_stays_is_none";
    let Some(room) = little_room(test, 8) else { return };
    let (mut journal, _) = Journal::open(&room, image(7), 0).unwrap();
    journal.reset(77).unwrap();
    let staying: Vec<Record> = (0..200).map(record).collect();
    journal.append(&staying[..10]).unwrap();
    fill(&room, 1);
    assert!(journal.turn(&staying).is_err(), "200 records in one page");
    let newer = Record { slot: Slot::L2(3), old: 3 << 16, new: 99 << 16 };
    journal.append(&[newer]).unwrap();
    let (_, found) = Journal::open(&room, image(7), 77).unwrap();
    assert_eq!((&found[..10], &found[10..]), (&staying[..10], &[newer][..]));
}

/// A note that did not fit leaves nothing behind the one that comes next.
#[test]
fn a_note_that_has_no_room_leaves_nothing() {
    let Some(room) = little_room("journal::tests::a_note_that_has_no_room_leaves_nothing", 8) else { return };
    let (mut journal, _) = Journal::open(&room, image(7), 0).unwrap();
    journal.reset(77).unwrap();
    // All of the page but two records' room.
    let mut noted: Vec<Record> = (0..124).map(record).collect();
    journal.append(&noted).unwrap();
    fill(&room, 0);
    assert!(
        journal.append(&[record(200), record(201), record(202)]).is_err(),
        "the third needs another page"
    );
    noted.push(record(203));
    journal.append(&noted[124..]).unwrap();
    let (_, found) = Journal::open(&room, image(7), 77).unwrap();
    assert_eq!((found.len(), &found[124..]), (125, &noted[124..]));
}
