//! Which state a backup is of, and which it may be built upon: names are not enough.

use std::path::{Path, PathBuf};

use crate::common::stock::{content, qemu_io};
use crate::common::{scratch, small_resources};
use vmstrata_backup::{
    BackupFault, BackupOptions, BackupTarget, Manifest, RestoreOptions, backup, manifest_path, restore,
};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo, State, resolve};
use vmstrata_disk::{CreateOptions, Error, OpenOptions, create};

const MIB: u64 = 1 << 20;
const NOON: u64 = 1_732_536_000_000_000_000;

/// `NAME/web.qcow2`, an empty disk.
fn new_disk(dir: &Path, name: &str, size: u64) -> PathBuf {
    std::fs::create_dir(dir.join(name)).unwrap();
    let disk = dir.join(name).join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(size), ..CreateOptions::default() }).unwrap();
    disk
}

fn write(disk: &Path, pattern: u8, at: &str) {
    qemu_io(disk, &[format!("write -P {pattern} {at}")]);
}

fn take(disks: &[&Path], name: &str, taken_ns: u64) {
    let info = SnapshotInfo { name: name.to_owned(), taken_ns, ..SnapshotInfo::default() };
    let disks: Vec<PathBuf> = disks.iter().map(|disk| (*disk).to_owned()).collect();
    let (open, prepare) = (OpenOptions::default(), PrepareOptions::default());
    snapshot::create(&disks, &info, &open, &prepare, &small_resources(None)).unwrap();
}

fn state(disk: &Path, name: &str) -> State {
    resolve(Path::new(&format!("{}@{name}", disk.display())), &OpenOptions::default()).unwrap()
}

/// Backs up a state into its disk's directory, on top of `previous` if there is one.
fn back_up(of: &State, name: &str, previous: Option<(State, &Path)>) -> Result<PathBuf, Error> {
    let path = of.path.with_file_name(name);
    let options = previous.map_or_else(BackupOptions::default, |(since, file)| BackupOptions {
        since: Some(since),
        backing_name: Some(file.into()),
        previous: Some(Manifest::of(file).unwrap()),
        ..BackupOptions::default()
    });
    let target = BackupTarget::File { path: path.clone(), replace: false };
    backup(of, target, &options, &small_resources(None), &mut |_, _| true).map(|_| path)
}

fn fault(error: &Error) -> &BackupFault {
    error.fault().unwrap_or_else(|| panic!("{error}"))
}

/// The week's first backup failed, so that of the week before is still there under its name; the snapshot was taken again.
#[test]
fn changes_are_not_stored_on_top_of_a_backup_of_another_snapshot_of_that_name() {
    let dir = scratch();
    let disk = new_disk(dir.path(), "a", 4 * MIB);
    write(&disk, 1, "0 1M");
    take(&[&disk], "mon", NOON);
    let last_week = back_up(&state(&disk, "mon"), "monday", None).unwrap();
    let again = new_disk(dir.path(), "again", 4 * MIB);
    write(&again, 2, "0 1M");
    take(&[&again], "mon", NOON + 1);
    write(&again, 3, "0 64k");
    take(&[&again], "tue", NOON + 2);
    let (mon, tue) = (state(&again, "mon"), state(&again, "tue"));
    // The layer above says of a state that is named by its file when it was taken.
    for since in [mon.clone(), State::of_file(&mon.path)] {
        let error = back_up(&tue, "tuesday", Some((since, &last_week))).unwrap_err();
        assert!(matches!(fault(&error), BackupFault::OtherSnapshot { file } if file == "web.mon.qcow2"));
        assert!(!again.with_file_name("tuesday").exists());
    }
    let monday = back_up(&mon, "monday", None).unwrap();
    let tuesday = back_up(&tue, "tuesday", Some((mon, &monday))).unwrap();
    let restored = dir.path().join("restored");
    let options = RestoreOptions::default();
    restore(&[monday, tuesday], &restored, &options, &small_resources(None), &mut |_, _| true).unwrap();
    assert_eq!(content(&restored, "qcow2"), content(&tue.path, "qcow2"));
}

#[test]
fn disks_of_one_name_are_told_apart_though_their_snapshots_are_of_one_instant() {
    let dir = scratch();
    let [one, other] = ["a", "b"].map(|name| new_disk(dir.path(), name, 4 * MIB));
    for (name, taken_ns) in [("mon", NOON), ("tue", NOON + 500)] {
        take(&[&one, &other], name, taken_ns);
    }
    let of_one = back_up(&state(&one, "mon"), "mon", None).unwrap();
    let refused = back_up(&state(&other, "tue"), "tue", Some((state(&other, "mon"), &of_one)));
    assert!(matches!(fault(&refused.unwrap_err()), BackupFault::OtherSnapshot { .. }));
    back_up(&state(&one, "tue"), "tue", Some((state(&one, "mon"), &of_one))).unwrap();
}

#[test]
fn a_backup_of_a_disk_of_another_size_is_not_built_upon() {
    let dir = scratch();
    let (small, large) = (new_disk(dir.path(), "a", 4 * MIB), new_disk(dir.path(), "b", 8 * MIB));
    for disk in [&small, &large] {
        take(&[disk], "mon", NOON);
        take(&[disk], "tue", NOON + 1);
    }
    let of_small = back_up(&state(&small, "mon"), "mon", None).unwrap();
    let refused = back_up(&state(&large, "tue"), "tue", Some((state(&large, "mon"), &of_small))).unwrap_err();
    match fault(&refused) {
        BackupFault::OtherSize { found, expected } => assert_eq!((*found, *expected), (4 * MIB, 8 * MIB)),
        other => panic!("{other}"),
    }
}

/// Other tools' layers have no record: there the name has to do, as it does for backups of before.
#[test]
fn what_nobody_knows_the_time_of_is_known_by_its_name() {
    let dir = scratch();
    let disk = new_disk(dir.path(), "a", 4 * MIB);
    write(&disk, 1, "0 64k");
    take(&[&disk], "mon", NOON);
    take(&[&disk], "tue", NOON + 1);
    let mon = state(&disk, "mon");
    let unnamed = back_up(&State::of_file(&mon.path), "mon", None).unwrap();
    assert_eq!(Manifest::read(&manifest_path(&unnamed)).unwrap().state.taken_at, None);
    back_up(&state(&disk, "tue"), "tue", Some((mon, &unnamed))).unwrap();
}
