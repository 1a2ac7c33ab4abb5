//! Disks that other disks stand on: their history must not be taken from under those.

use crate::common;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::flat::assert_reads;
use crate::common::small_resources;
use crate::common::stock::{content, qemu_io, text, try_qemu_io};
use vmstrata_disk::snapshot::{self, PrepareOptions, RevertOptions, SnapshotFault, SnapshotInfo, list};
use vmstrata_disk::{CreateOptions, Disk, Error, ErrorKind, Format, OpenOptions, create};

const MIB: u64 = 1 << 20;

/// `golden.qcow2` with 7 at its start, and `ci.qcow2` on it with snapshots s1 and s2, and so an index.
fn golden_and_ci(dir: &Path) -> (PathBuf, PathBuf) {
    let (golden, ci) = (dir.join("golden.qcow2"), dir.join("ci.qcow2"));
    create(&golden, &CreateOptions { size: Some(4 * MIB), ..CreateOptions::default() }).unwrap();
    write(&golden, 7, "0 1M");
    let backing = Some((PathBuf::from("golden.qcow2"), Format::Qcow2));
    create(&ci, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    for (pattern, name) in [(1, "s1"), (2, "s2")] {
        write(&ci, pattern, "1M 64k");
        take(&ci, name).unwrap();
    }
    (golden, ci)
}

fn write(path: &Path, pattern: u8, at: &str) {
    qemu_io(path, &[format!("write -P {pattern} {at}")]);
}

fn take(disk: &Path, name: &str) -> Result<(), Error> {
    take_forced(disk, name, false)
}

fn take_forced(disk: &Path, name: &str, force: bool) -> Result<(), Error> {
    let info = SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() };
    let (open, prepare) = (OpenOptions { force, ..OpenOptions::default() }, PrepareOptions::default());
    snapshot::create(&[disk.to_owned()], &info, &open, &prepare, &small_resources(None)).map(drop)
}

fn back(disk: &Path, name: &str, force: bool) -> Result<(), Error> {
    let open = OpenOptions { force, ..OpenOptions::default() };
    let options = RevertOptions { open, ..RevertOptions::default() };
    snapshot::revert(disk, name, &options, &small_resources(None)).map(drop)
}

fn fault(error: &Error) -> &SnapshotFault {
    error.fault().unwrap_or_else(|| panic!("{error}"))
}

/// The image for whose sake something was refused.
fn image_on(error: &Error) -> &Path {
    match error.kind() {
        ErrorKind::IsBase { image } => image,
        other => panic!("{other}"),
    }
}

fn names(disk: &Path) -> Vec<String> {
    let found = list(disk, &OpenOptions::default()).unwrap();
    found.iter().map(|snapshot| snapshot.name().unwrap_or("-").to_owned()).collect()
}

#[test]
fn what_a_disk_was_made_on_is_locked_while_the_disk_is_in_use_though_an_index_knows_all_of_it() {
    let dir = common::scratch();
    let (golden, ci) = golden_and_ci(dir.path());
    let expected = content(&ci, "qcow2");
    for read_only in [false, true] {
        let resources = small_resources(None);
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let disk = Disk::open(&ci, &options, &resources).unwrap();
        // Golden, the newest frozen layer, which has the index, and the disk itself where it is frozen, too.
        assert_eq!(resources.usage().open_files, 2 + usize::from(read_only), "read only: {read_only}");
        let error = take(&golden, "v8").unwrap_err();
        assert!(matches!(fault(&error), SnapshotFault::InUse { .. }), "{error}");
        let said = text(&try_qemu_io(&golden, &[], &["write -P 9 0 64k".to_owned()]));
        assert!(said.contains("Failed to get"), "{said}");
        assert_reads(&disk, &expected, "beside those who may not");
        disk.close().unwrap();
    }
    take_forced(&golden, "v8", true).unwrap();
    assert_eq!(content(&ci, "qcow2"), expected);
}

#[test]
fn no_snapshot_is_taken_below_a_disk_that_someone_has_open() {
    let dir = common::scratch();
    let (golden, ci) = golden_and_ci(dir.path());
    take_forced(&golden, "v8", true).unwrap();
    let expected = content(&ci, "qcow2");
    let opened = std::fs::File::open(&ci).unwrap();
    let mut user = Command::new("sleep").arg("600").stdin(Stdio::from(opened)).spawn().unwrap();
    for error in [take(&golden, "v9").unwrap_err(), back(&golden, "v8", true).unwrap_err()] {
        match fault(&error) {
            SnapshotFault::StoodOnInUse { image, by } => {
                assert_eq!(image.file_name().unwrap(), "ci.s1.qcow2");
                assert_eq!(*by, format!("pid {} (sleep)", user.id()));
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(names(&golden), ["v8"]);
    user.kill().unwrap();
    user.wait().unwrap();
    take_forced(&golden, "v9", true).unwrap();
    assert_eq!(content(&ci, "qcow2"), expected);
}

#[test]
fn going_back_is_refused_where_images_would_read_other_data() {
    let dir = common::scratch();
    let (golden, ci) = golden_and_ci(dir.path());
    take_forced(&golden, "v8", true).unwrap();
    write(&golden, 8, "2M 64k");
    let expected = content(&ci, "qcow2");
    let error = back(&golden, "v8", false).unwrap_err();
    assert_eq!(image_on(&error).file_name().unwrap(), "ci.s1.qcow2");
    assert_eq!(content(&ci, "qcow2"), expected);
    back(&golden, "v8", true).unwrap();
    assert_ne!(content(&ci, "qcow2"), expected);
    // What stands on a snapshot is in nobody's way.
    snapshot::clone(&golden, "v8", &dir.path().join("clone.qcow2"), &OpenOptions::default()).unwrap();
    std::fs::remove_file(dir.path().join("ci.s1.qcow2")).unwrap();
    back(&golden, "v8", false).unwrap();
}

/// Refused, and the file is what it was; forced, it is opened.
fn assert_kept_for(image: &Path, base: &Path) {
    let before = std::fs::read(base).unwrap();
    let open = |force| {
        let options = OpenOptions { force, ..OpenOptions::default() };
        Disk::open(base, &options, &small_resources(None))
    };
    assert_eq!(image_on(&open(false).unwrap_err()).file_name(), image.file_name(), "{}", base.display());
    assert_eq!(image_on(&take(base, "x").unwrap_err()).file_name(), image.file_name(), "{}", base.display());
    assert_eq!(std::fs::read(base).unwrap(), before);
    open(true).unwrap().close().unwrap();
}

#[test]
fn a_file_that_an_image_stands_on_is_written_only_if_forced() {
    let dir = common::scratch();
    let (golden, ci) = golden_and_ci(dir.path());
    // A snapshot's file; a base, known by the layer beside it that stock tools could have made, too.
    assert_kept_for(&ci, &dir.path().join("ci.s2.qcow2"));
    assert_kept_for(&dir.path().join("ci.s1.qcow2"), &golden);
    // What nothing stands on.
    Disk::open(&ci, &OpenOptions::default(), &small_resources(None)).unwrap().close().unwrap();
    take(&ci, "s3").unwrap();
}

#[test]
fn a_base_is_known_by_images_in_other_directories_as_long_as_they_stand_on_it() {
    let dir = common::scratch();
    let (golden, clone) = (dir.path().join("golden.qcow2"), dir.path().join("vms/clone.qcow2"));
    create(&golden, &CreateOptions { size: Some(4 * MIB), ..CreateOptions::default() }).unwrap();
    std::fs::create_dir(dir.path().join("vms")).unwrap();
    let backing = Some((PathBuf::from("../golden.qcow2"), Format::Qcow2));
    create(&clone, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    assert_kept_for(&clone, &golden);
    std::fs::remove_file(&clone).unwrap();
    Disk::open(&golden, &OpenOptions::default(), &small_resources(None)).unwrap().close().unwrap();
}

#[test]
fn disks_of_one_directory_that_are_opened_in_a_row_see_what_was_made_between() {
    let dir = common::scratch();
    let resources = small_resources(None);
    let disks = ["a.qcow2", "b.qcow2"].map(|name| dir.path().join(name));
    for disk in &disks {
        create(disk, &CreateOptions { size: Some(4 * MIB), ..CreateOptions::default() }).unwrap();
    }
    let open = |disk: &Path| Disk::open(disk, &OpenOptions::default(), &resources);
    open(&disks[0]).unwrap().close().unwrap();
    let backing = Some((PathBuf::from("b.qcow2"), Format::Qcow2));
    let overlay = dir.path().join("c.qcow2");
    create(&overlay, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    assert_eq!(image_on(&open(&disks[1]).unwrap_err()).file_name(), overlay.file_name());
}
