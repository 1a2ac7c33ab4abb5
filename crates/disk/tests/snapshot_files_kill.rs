//! kill -9 between any two steps of a snapshot: the disk is there, sound, and what was left is cleaned up.
//!
//! Each case runs in a child process, which is this test binary again: it kills itself at its n-th step.

use crate::common;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::killed::is_killed;
use crate::common::stock::{assert_clean, qemu_io};
use vmstrata_disk::snapshot::{self, PrepareOptions, RevertOptions, SnapshotInfo, Step, list, prepare};
use vmstrata_disk::{CreateOptions, OpenOptions, create};

/// Steps until the end.
static LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);

fn count_down(_: Step) {
    if LEFT.fetch_sub(1, Ordering::Relaxed) == 0 {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

fn info(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

fn options() -> PrepareOptions {
    PrepareOptions { on_step: count_down, ..PrepareOptions::default() }
}

/// What the child does: `KILL_AT` is "OPERATION STEP DISK".
#[test]
fn child() {
    let Ok(case) = std::env::var("KILL_AT") else { return };
    let mut words = case.splitn(3, ' ');
    let (operation, step, disk) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    LEFT.store(step.parse().unwrap(), Ordering::Relaxed);
    let disk = Path::new(disk);
    match operation {
        "publish" => prepare(disk, &info("tue"), &options()).unwrap().publish().unwrap(),
        "undo" => drop(prepare(disk, &info("tue"), &options()).unwrap()),
        "revert" => {
            let options = RevertOptions {
                keep: Some(disk.with_file_name("kept.qcow2")),
                prepare: options(),
                ..RevertOptions::default()
            };
            snapshot::revert(disk, "mon", &options, &common::small_resources(None)).unwrap();
        }
        other => panic!("{other}"),
    }
}

/// Runs the operation until its n-th step; false when it has fewer.
fn killed_at(operation: &str, step: usize, disk: &Path) -> bool {
    is_killed("snapshot_files_kill::child", "KILL_AT", format!("{operation} {step} {}", disk.display()))
}

/// A disk with a snapshot: 1 at its start in "mon", 2 behind that written since, and files that are none of ours.
fn new_disk(dir: &Path) -> PathBuf {
    let disk = dir.join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
    qemu_io(&disk, &["write -P 1 0 64k".to_owned()]);
    prepare(&disk, &info("mon"), &PrepareOptions::default()).unwrap().publish().unwrap();
    qemu_io(&disk, &["write -P 2 64k 64k".to_owned()]);
    std::fs::hard_link(&disk, dir.join("web.mine.qcow2")).unwrap();
    for bystander in BYSTANDERS {
        std::fs::write(dir.join(bystander), b"QFI").unwrap();
    }
    std::fs::create_dir(dir.join(".web.qcow2.1-1.snapshot")).unwrap();
    disk
}

const BYSTANDERS: [&str; 4] =
    [".web.qcow2.1-1.new", ".web.qcow2.x-1.snapshot", ".db.qcow2.1-1.snapshot", "web.qcow2.1-1.snapshot"];

/// Names in the directory, but for those that are always there.
fn files(dir: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let always = [".web.qcow2.1-1.snapshot", "web.qcow2", "web.mon.qcow2", "web.mine.qcow2"];
    let mut names: Vec<String> = names.collect();
    for name in always.iter().chain(&BYSTANDERS) {
        let at = names.iter().position(|other| other == name).unwrap_or_else(|| panic!("{name} is gone"));
        names.swap_remove(at);
    }
    names.sort();
    names
}

fn names(disk: &Path) -> Vec<String> {
    let found = list(disk, &OpenOptions::default()).unwrap();
    found.iter().map(|snapshot| snapshot.name().unwrap_or("-").to_owned()).collect()
}

/// Whatever happened, stock tools read the disk, and it is one of the two that it may be.
fn assert_sound(disk: &Path, second: &[u8]) -> bool {
    assert_clean(disk);
    let content = common::stock::content(disk, "qcow2");
    assert!(content[..64 << 10].iter().all(|&byte| byte == 1));
    let is_new = content[64 << 10] == second[0];
    let expected = if is_new { second[0] } else { 2 };
    assert!(content[64 << 10..128 << 10].iter().all(|&byte| byte == expected));
    is_new
}

#[test]
fn a_killed_snapshot_is_taken_or_not_and_the_next_one_cleans_up() {
    let mut seen = std::collections::BTreeSet::new();
    for operation in ["publish", "undo"] {
        for step in 0.. {
            let dir = common::scratch();
            let disk = new_disk(dir.path());
            let before = disk.metadata().unwrap().ino();
            if !killed_at(operation, step, &disk) {
                assert!(step >= 6, "{operation} has only {step} steps");
                break;
            }
            assert_sound(&disk, &[2]);
            let is_taken = disk.metadata().unwrap().ino() != before;
            assert_eq!(is_taken, names(&disk).len() == 2);
            let second = dir.path().join("web.tue.qcow2");
            if second.exists() {
                assert_eq!(second.metadata().unwrap().ino(), before);
                assert_clean(&second);
            }
            seen.insert((files(dir.path()).len(), is_taken));
            // The next one of the same name goes through where the first was not taken.
            let next = if is_taken { "wed" } else { "tue" };
            prepare(&disk, &info(next), &PrepareOptions::default()).unwrap().publish().unwrap();
            assert_sound(&disk, &[2]);
            let expected: &[&str] =
                if is_taken { &["web.tue.qcow2", "web.wed.qcow2"] } else { &["web.tue.qcow2"] };
            assert_eq!(files(dir.path()), expected, "{operation} killed at {step}");
        }
    }
    // Killed with nothing left, a temporary file, that and a second name; and after the rename.
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [(0, false), (1, false), (1, true), (2, false)]);
}

#[test]
fn a_killed_revert_is_done_or_not_and_can_be_done_again() {
    let mut outcomes = [0, 0];
    for step in 0.. {
        let dir = common::scratch();
        let disk = new_disk(dir.path());
        if !killed_at("revert", step, &disk) {
            break;
        }
        let is_done = assert_sound(&disk, &[0]);
        outcomes[usize::from(is_done)] += 1;
        if !is_done {
            let keep = Some(disk.with_file_name("kept.qcow2"));
            let options = RevertOptions { keep, ..RevertOptions::default() };
            snapshot::revert(&disk, "mon", &options, &common::small_resources(None)).unwrap();
        }
        assert!(assert_sound(&disk, &[0]));
        assert_eq!(files(dir.path()), ["kept.qcow2"], "killed at {step}");
        assert!(!assert_sound(&dir.path().join("kept.qcow2"), &[0]));
        assert_eq!(names(&disk), ["mon"]);
    }
    assert!(outcomes[0] >= 5 && outcomes[1] >= 1, "{outcomes:?}");
}

/// Going back was killed, and then a snapshot is taken: the file that it freezes must have no name under which it is written.
#[test]
fn a_snapshot_after_a_killed_revert_takes_back_the_name_of_what_was_to_be_kept() {
    let mut had_two_names = false;
    for step in 0.. {
        let dir = common::scratch();
        let disk = new_disk(dir.path());
        if !killed_at("revert", step, &disk) {
            break;
        }
        let kept = dir.path().join("kept.qcow2");
        let ino = |path: &Path| path.metadata().unwrap().ino();
        had_two_names |= kept.exists() && ino(&kept) == ino(&disk);
        let is_done = assert_sound(&disk, &[0]);
        prepare(&disk, &info("tue"), &PrepareOptions::default()).unwrap().publish().unwrap();
        let expected: &[&str] = if is_done { &["kept.qcow2", "web.tue.qcow2"] } else { &["web.tue.qcow2"] };
        assert_eq!(files(dir.path()), expected, "killed at {step}");
    }
    assert!(had_two_names);
}

#[test]
fn a_sweep_that_is_killed_is_taken_up() {
    let dir = common::scratch();
    let disk = new_disk(dir.path());
    // Killed before the rename: both names are left.
    assert!(killed_at("publish", 4, &disk));
    assert_eq!(files(dir.path()).len(), 2);
    // Many more are left by processes that are killed in turn while they sweep or make.
    for step in [0, 1, 2, 3, 4, 5, 1, 2, 0, 3, 5] {
        assert!(killed_at("undo", step, &disk));
        assert!(files(dir.path()).len() <= 2, "{:?}", files(dir.path()));
        assert_sound(&disk, &[2]);
    }
    drop(prepare(&disk, &info("tue"), &PrepareOptions::default()).unwrap());
    assert_eq!(files(dir.path()), [""; 0]);
}
