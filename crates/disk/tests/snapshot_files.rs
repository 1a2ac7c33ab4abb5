//! Snapshots as files: stock tools agree on every state, and a refusal leaves everything as it was.

use crate::common;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::stock::{User, assert_clean, content, path_str, qemu_img, qemu_io, snapshot_content};
use vmstrata_disk::snapshot::{
    self, HolderKind, PrepareOptions, RevertOptions, SnapshotFault, SnapshotInfo, find, list, prepare,
    resolve,
};
use vmstrata_disk::{
    CreateOptions, Disk, Error, ErrorKind, Format, OpenOptions, ResourceOptions, Resources,
    create as create_image,
};

const MIB: u64 = 1 << 20;

fn info(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), taken_ns: 1_700_000_000_000_000_007, ..SnapshotInfo::default() }
}

fn new_disk(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    create_image(&path, &CreateOptions { size: Some(4 * MIB), ..CreateOptions::default() }).unwrap();
    path
}

fn write(path: &Path, pattern: u8, at: &str) {
    qemu_io(path, &[format!("write -P {pattern} {at}")]);
}

fn reads(path: &Path, pattern: u8, at: &str) {
    qemu_io(path, &[format!("read -P {pattern} {at}")]);
}

fn take(path: &Path, name: &str) {
    prepare(path, &info(name), &PrepareOptions::default()).unwrap().publish().unwrap();
}

fn refuse(path: &Path, name: &str) -> Error {
    prepare(path, &info(name), &PrepareOptions::default()).unwrap_err()
}

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn take_offline(disks: &[&Path], name: &str) -> Result<Vec<PathBuf>, Error> {
    let open = OpenOptions::default();
    let options = PrepareOptions { convert_raw: true, ..PrepareOptions::default() };
    let disks: Vec<PathBuf> = disks.iter().map(|disk| (*disk).to_owned()).collect();
    let created = snapshot::create(&disks, &info(name), &open, &options, &resources())?;
    Ok(created.into_iter().map(|created| created.layer).collect())
}

fn names(path: &Path) -> Vec<String> {
    let found = list(path, &OpenOptions::default()).unwrap();
    found.iter().map(|snapshot| snapshot.name().unwrap_or("-").to_owned()).collect()
}

/// The names in a directory, sorted.
fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn fault(error: &Error) -> &SnapshotFault {
    error.fault().unwrap_or_else(|| panic!("{error}"))
}

fn chain_of(path: &Path) -> Vec<serde_json::Value> {
    serde_json::from_str(&qemu_img(&["info", "--backing-chain", "--output=json", path_str(path)])).unwrap()
}

#[test]
fn the_active_file_gets_a_name_and_an_empty_overlay_takes_its_place() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    write(&disk, 7, "0 1M");
    let before = disk.metadata().unwrap().ino();
    let prepared = prepare(&disk, &info("mon"), &PrepareOptions::default()).unwrap();
    let frozen = prepared.frozen_path().to_owned();
    assert_eq!(frozen, dir.path().join("web.mon.qcow2"));
    assert_eq!(disk.metadata().unwrap().ino(), before, "the path has not moved yet");
    reads(prepared.overlay(), 7, "0 1M");
    prepared.publish().unwrap();
    assert_eq!(frozen.metadata().unwrap().ino(), before);
    assert_eq!(files(dir.path()), ["web.mon.qcow2", "web.qcow2"]);
    write(&disk, 8, "0 64k");
    reads(&disk, 7, "64k 64k");
    reads(&frozen, 7, "0 1M");
    for layer in [&disk, &frozen] {
        assert_clean(layer);
    }
    let chain = chain_of(&disk);
    assert_eq!(chain.len(), 2);
    assert_eq!(chain[0]["backing-filename"], "web.mon.qcow2");
    assert_eq!(chain[0]["backing-filename-format"], "qcow2");
    assert_eq!(names(&disk), ["mon"]);
}

/// What stock tools say of an image: version, cluster size, whether it has subclusters.
fn shape_of(image: &Path) -> (String, u64, bool) {
    let info = &chain_of(image)[0];
    let data = &info["format-specific"]["data"];
    (
        data["compat"].as_str().unwrap().to_owned(),
        info["cluster-size"].as_u64().unwrap(),
        data["extended-l2"].as_bool().unwrap_or_default(),
    )
}

#[test]
fn overlays_have_subclusters_unless_the_layer_below_is_old_or_they_are_not_wanted() {
    let (new, old) = ("1.1".to_owned(), "0.10".to_owned());
    let cases = [
        ("compat=1.1", (new.clone(), 128 << 10, true), (new.clone(), 64 << 10, false)),
        ("cluster_size=512", (new.clone(), 128 << 10, true), (new.clone(), 512, false)),
        ("cluster_size=2M", (new.clone(), 128 << 10, true), (new.clone(), 2 << 20, false)),
        ("extended_l2=on,cluster_size=1M", (new.clone(), 1 << 20, true), (new.clone(), 1 << 20, false)),
        ("compat=0.10", (old.clone(), 64 << 10, false), (old.clone(), 64 << 10, false)),
        ("raw", (new.clone(), 128 << 10, true), (new, 64 << 10, false)),
    ];
    for (options, with, without) in cases {
        for (subclusters, expected) in [(true, with), (false, without)] {
            let dir = common::scratch();
            let disk = dir.path().join("web.img");
            match options {
                "raw" => qemu_img(&["create", "-q", "-f", "raw", path_str(&disk), "4M"]),
                _ => qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, path_str(&disk), "4M"]),
            };
            let open = OpenOptions { subclusters, ..OpenOptions::default() };
            let options = PrepareOptions { convert_raw: true, subclusters, ..PrepareOptions::default() };
            snapshot::create(std::slice::from_ref(&disk), &info("one"), &open, &options, &resources())
                .unwrap();
            assert_eq!(shape_of(&disk), expected, "offline");
            let served = Disk::open(&disk, &open, &resources()).unwrap();
            served.snapshot(&info("two")).unwrap();
            served.close().unwrap();
            drop(served);
            assert_eq!(shape_of(&disk), expected, "in use");
            let clone = dir.path().join("clone.qcow2");
            snapshot::clone(&disk, "two", &clone, &open).unwrap();
            assert_eq!(shape_of(&clone), expected, "a clone");
            let back = RevertOptions { open, prepare: options, ..RevertOptions::default() };
            snapshot::revert(&disk, "one", &back, &resources()).unwrap();
            assert_eq!(shape_of(&disk), expected, "gone back");
            write(&disk, 7, "4k 4k");
            assert_clean(&disk);
        }
    }
}

#[test]
fn what_is_not_published_is_undone() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    let before = disk.metadata().unwrap().ino();
    drop(prepare(&disk, &info("mon"), &PrepareOptions::default()).unwrap());
    assert_eq!(files(dir.path()), ["web.qcow2"]);
    assert_eq!((disk.metadata().unwrap().ino(), disk.metadata().unwrap().nlink()), (before, 1));
    take(&disk, "mon");
}

#[test]
fn every_state_is_what_stock_tools_read_then() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    let mut then = Vec::new();
    for step in 1..=8u8 {
        write(&disk, step, &format!("{}k 192k", u32::from(step) * 128));
        then.push(content(&disk, "qcow2"));
        take_offline(&[&disk], &format!("s{step}")).unwrap();
    }
    assert_eq!(names(&disk), ["s8", "s7", "s6", "s5", "s4", "s3", "s2", "s1"]);
    for (number, expected) in then.iter().enumerate() {
        let layer = dir.path().join(format!("web.s{}.qcow2", number + 1));
        assert!(content(&layer, "qcow2") == *expected, "snapshot {number}");
        assert_clean(&layer);
    }
    assert_eq!(chain_of(&disk).len(), 9);
    assert_clean(&disk);
}

#[test]
fn three_hundred_snapshots_in_a_row() {
    let dir = common::scratch();
    let disk = dir.path().join("web.qcow2");
    create_image(&disk, &CreateOptions { size: Some(32 * MIB), ..CreateOptions::default() }).unwrap();
    for number in 0..300u64 {
        write_alone(&disk, number);
        take(&disk, &format!("n{number}"));
    }
    let found = list(&disk, &OpenOptions::default()).unwrap();
    assert_eq!(found.len(), 300);
    for (depth, snapshot) in found.iter().enumerate() {
        assert_eq!((snapshot.name(), snapshot.depth), (Some(&*format!("n{}", 299 - depth)), depth + 1));
    }
    assert_eq!(files(dir.path()).len(), 301);
    for number in [0, 1, 99, 299] {
        let state =
            resolve(&dir.path().join(format!("web.qcow2@n{number}")), &OpenOptions::default()).unwrap();
        let commands: Vec<String> = (0..300u64)
            .map(|at| format!("read -P {} {}k 64k", if at <= number { at % 250 + 1 } else { 0 }, at * 64))
            .collect();
        qemu_io(&state.path, &commands);
        assert_clean(&state.path);
    }
    assert_eq!(chain_of(&disk).len(), 301);
}

/// Writes a cluster of its own into the layer alone, which opens no layer below it.
fn write_alone(path: &Path, number: u64) {
    let options = format!("driver=qcow2,file.driver=file,file.filename={},backing=", path_str(path));
    let command = format!("write -P {} {}k 64k", number % 250 + 1, number * 64);
    let done =
        std::process::Command::new("qemu-io").args(["--image-opts", &options, "-c", &command]).output();
    assert!(done.unwrap().status.success());
}

#[test]
fn an_overlay_takes_over_the_features_of_the_layer_below() {
    let dir = common::scratch();
    for (number, options) in [
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=1",
        "cluster_size=2M,refcount_bits=64",
        "compression_type=zstd,lazy_refcounts=on",
    ]
    .iter()
    .enumerate()
    {
        let disk = dir.path().join(format!("{number}.qcow2"));
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, path_str(&disk), "5M"]);
        write(&disk, 9, "1M 1M");
        let like = chain_of(&disk).remove(0);
        take_offline(&[&disk], "a").unwrap();
        write(&disk, 10, "1536k 1M");
        take_offline(&[&disk], "b").unwrap();
        let chain = chain_of(&disk);
        assert_eq!(chain.len(), 3, "{options}");
        for layer in &chain {
            assert_eq!(layer["virtual-size"], like["virtual-size"], "{options}");
            for field in ["compat", "refcount-bits", "compression-type", "lazy-refcounts"] {
                let of = |image: &serde_json::Value| image["format-specific"]["data"][field].clone();
                assert_eq!(of(layer), of(&like), "{options}: {field}");
            }
            assert_clean(Path::new(layer["filename"].as_str().unwrap()));
        }
        qemu_io(&disk, &["read -P 9 1M 512k", "read -P 10 1536k 1M", "read -P 0 2560k 1M"].map(String::from));
        assert_eq!(names(&disk), ["b", "a"]);
    }
}

#[test]
fn a_raw_disk_stays_raw_below_its_overlay() {
    let dir = common::scratch();
    let disk = dir.path().join("web.img");
    std::fs::write(&disk, vec![5; (2 << 20) + 100]).unwrap();
    take_offline(&[&disk], "mon").unwrap();
    assert_eq!(files(dir.path()), ["web.img", "web.mon.raw"]);
    let chain = chain_of(&disk);
    assert_eq!(chain[0]["backing-filename-format"], "raw");
    assert_eq!(chain[0]["virtual-size"], (2 << 20) + 512, "whole sectors");
    reads(&disk, 5, "0 2M");
    assert_clean(&disk);
    assert_eq!(names(&disk), ["mon"]);
}

#[test]
fn a_raw_disk_whose_guest_wrote_a_header_is_raw_when_told() {
    let dir = common::scratch();
    let victim = dir.path().join("secret");
    std::fs::write(&victim, [1; 512]).unwrap();
    let disk = dir.path().join("web.img");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-F",
        "raw",
        "-b",
        path_str(&victim),
        path_str(&disk),
        "1M",
    ]);
    let bytes = std::fs::read(&disk).unwrap();
    let options = PrepareOptions { format: Some(Format::Raw), ..PrepareOptions::default() };
    prepare(&disk, &info("mon"), &options).unwrap().publish().unwrap();
    assert!(content(&disk, "qcow2").starts_with(&bytes));
}

#[test]
fn internal_snapshots_and_bitmaps_stay_in_the_layer_that_has_them() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    write(&disk, 1, "0 1M");
    qemu_img(&["snapshot", "-c", "inner", path_str(&disk)]);
    qemu_img(&["bitmap", "--add", path_str(&disk), "b0"]);
    write(&disk, 2, "0 512k");
    let frozen = take_offline(&[&disk], "mon").unwrap().remove(0);
    write(&disk, 3, "0 64k");
    assert_eq!(snapshot_content(&frozen, "inner")[..MIB as usize], vec![1; MIB as usize]);
    reads(&frozen, 2, "0 512k");
    let chain = chain_of(&disk);
    assert_eq!(chain[1]["format-specific"]["data"]["bitmaps"][0]["name"], "b0");
    assert!(chain[0]["format-specific"]["data"]["bitmaps"].is_null());
    for layer in [&disk, &frozen] {
        assert_clean(layer);
    }
}

#[test]
fn names_that_no_file_can_have_are_refused_and_strange_disk_names_work() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    for name in ["", "..", "a/b", "../../etc/x", "a\nb", "ü", "a b", "-rf", ".x", &"n".repeat(101)] {
        let error = refuse(&disk, name).to_string();
        assert!(error.contains("is no snapshot name"), "{error}");
    }
    let long = new_disk(dir.path(), &format!("{}.qcow2", "d".repeat(200)));
    assert!(refuse(&long, &"n".repeat(60)).to_string().contains("too long"));
    assert_eq!(files(dir.path()).len(), 2, "nothing is left");
    for name in ["nbd:host.qcow2", "a b.qcow2", "wéb.qcow2", "json:{}.qcow2", "x@y.qcow2", "plain", ".qcow2"]
    {
        let disk = new_disk(dir.path(), name);
        write(&disk, 4, "0 64k");
        take_offline(&[&disk], "mon").unwrap();
        let relative = Path::new(".").join(name);
        let read = std::process::Command::new("qemu-io")
            .current_dir(dir.path())
            .args(["-c", "read -P 4 0 64k"])
            .arg(&relative)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&read.stdout).into_owned();
        assert!(read.status.success() && !said.contains("failed"), "{name}: {said}");
        assert_eq!(names(&disk), ["mon"]);
    }
}

#[test]
fn a_disk_may_have_a_name_that_is_not_utf_8() {
    let dir = common::scratch();
    let disk = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff.qcow2"));
    create_image(&disk, &CreateOptions { size: Some(MIB), ..CreateOptions::default() }).unwrap();
    take_offline(&[&disk], "mon").unwrap();
    let frozen = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff.mon.qcow2"));
    assert_eq!(list(&disk, &OpenOptions::default()).unwrap()[0].layer, frozen);
}

#[test]
fn what_cannot_get_a_second_name_is_refused() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    let link = dir.path().join("link.qcow2");
    symlink("web.qcow2", &link).unwrap();
    assert!(matches!(fault(&refuse(&link, "mon")), SnapshotFault::SymbolicLink));
    assert!(matches!(fault(&refuse(dir.path(), "mon")), SnapshotFault::NotAFile));
    assert!(matches!(fault(&refuse(Path::new("/dev/null"), "mon")), SnapshotFault::NotAFile));
    std::fs::write(dir.path().join("web.mon.qcow2"), b"precious").unwrap();
    let error = refuse(&disk, "mon");
    assert!(matches!(fault(&error), SnapshotFault::Exists { .. }), "{error}");
    assert_eq!(std::fs::read(dir.path().join("web.mon.qcow2")).unwrap(), b"precious");
    assert_eq!(files(dir.path()), ["link.qcow2", "web.mon.qcow2", "web.qcow2"]);
}

#[test]
fn a_name_is_taken_once_in_a_chain_even_when_its_file_was_renamed() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    take_offline(&[&disk], "mon").unwrap();
    let renamed = dir.path().join("db.qcow2");
    std::fs::rename(&disk, &renamed).unwrap();
    let error = take_offline(&[&renamed], "mon").unwrap_err();
    assert!(matches!(fault(&error), SnapshotFault::NameTaken { .. }), "{error}");
    take_offline(&[&renamed], "tue").unwrap();
    assert_eq!(files(dir.path()), ["db.qcow2", "db.tue.qcow2", "web.mon.qcow2"]);
}

#[test]
fn a_record_for_which_the_header_has_no_room_is_refused() {
    let dir = common::scratch();
    let disk = dir.path().join("web.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", path_str(&disk), "1M"]);
    let labels = |len| ["k", "l"].map(|key| (key.to_owned(), "v".repeat(len))).to_vec();
    let with = |len| SnapshotInfo { labels: labels(len), ..info("mon") };
    let options = PrepareOptions { subclusters: false, ..PrepareOptions::default() };
    let error = prepare(&disk, &with(255), &options).unwrap_err();
    assert!(error.to_string().contains("a cluster has 512"), "{error}");
    assert_eq!(files(dir.path()), ["web.qcow2"]);
    prepare(&disk, &with(100), &options).unwrap().publish().unwrap();
    let found = list(&disk, &OpenOptions::default()).unwrap().remove(0);
    assert_eq!(found.info.unwrap().labels, labels(100));
    assert_clean(&disk);
}

#[test]
fn the_users_of_the_old_file_can_use_the_new_one() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(0o660)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&disk, Some(1234), Some(4321)).unwrap();
    }
    let of =
        |path: &Path| path.metadata().map(|found| (found.mode() & 0o7777, found.uid(), found.gid())).unwrap();
    let before = of(&disk);
    take(&disk, "mon");
    assert_eq!(of(&disk), before);
}

#[test]
fn a_disk_in_use_is_left_alone_and_its_user_named() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    let user = User::with(&disk, &[]);
    let error = take_offline(&[&disk], "mon").unwrap_err();
    match fault(&error) {
        SnapshotFault::InUse { holder } => {
            assert_eq!(
                (holder.kind, holder.pid, &*holder.program),
                (HolderKind::QemuTool, user.pid(), "qemu-io")
            );
        }
        other => panic!("{other}"),
    }
    assert_eq!(files(dir.path()), ["web.qcow2"]);
    drop(user);
    take_offline(&[&disk], "mon").unwrap();
}

#[test]
fn a_disk_that_was_not_closed_is_closed_before_it_is_frozen() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    leave_open(&disk);
    let frozen = take_offline(&[&disk], "mon").unwrap().remove(0);
    assert_eq!(std::fs::read(&frozen).unwrap()[88..92], [0; 4], "no session number");
    assert_clean(&frozen);
}

/// Marks the file as one that a process was killed while it wrote.
fn leave_open(path: &Path) {
    let session = 0x8000_0001_0000_0000u64.to_be_bytes();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(&session, 88).unwrap();
}

#[test]
fn a_snapshot_that_a_killed_process_was_taking_is_finished_before_it_is_built_upon() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    write(&disk, 1, "0 64k");
    let frozen = take_offline(&[&disk], "mon").unwrap().remove(0);
    for layer in [&disk, &frozen] {
        leave_open(layer);
    }
    let clone = dir.path().join("clone.qcow2");
    let error = snapshot::clone(&disk, "mon", &clone, &OpenOptions::default()).unwrap_err();
    assert!(matches!(fault(&error), SnapshotFault::Unfinished { .. }), "{error}");
    assert!(!clone.exists());
    snapshot::revert(&disk, "mon", &RevertOptions::default(), &resources()).unwrap();
    assert_eq!(std::fs::read(&frozen).unwrap()[88..92], [0; 4], "no session number");
    snapshot::clone(&disk, "mon", &clone, &OpenOptions::default()).unwrap();
    reads(&clone, 1, "0 64k");
}

#[test]
fn a_damaged_disk_can_go_back() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    write(&disk, 1, "0 64k");
    take_offline(&[&disk], "mon").unwrap();
    std::fs::OpenOptions::new().write(true).open(&disk).unwrap().write_all_at(&[2], 79).unwrap();
    take_offline(&[&disk], "tue").unwrap_err();
    snapshot::revert(&disk, "mon", &RevertOptions::default(), &resources()).unwrap();
    reads(&disk, 1, "0 64k");
    assert_clean(&disk);
}

#[test]
fn an_image_marked_corrupt_is_not_built_upon() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    std::fs::OpenOptions::new().write(true).open(&disk).unwrap().write_all_at(&[2], 79).unwrap();
    assert!(matches!(refuse(&disk, "mon").kind(), ErrorKind::MarkedCorrupt));
    assert_eq!(files(dir.path()), ["web.qcow2"]);
}

#[test]
fn of_several_disks_all_or_none_get_the_snapshot() {
    let dir = common::scratch();
    let [root, data, more] =
        ["root.qcow2", "data.qcow2", "more.qcow2"].map(|name| new_disk(dir.path(), name));
    std::fs::write(dir.path().join("more.v2.qcow2"), b"in the way").unwrap();
    let error = take_offline(&[&root, &data, &more], "v2").unwrap_err();
    assert!(matches!(fault(&error), SnapshotFault::Exists { .. }), "{error}");
    assert!(error.to_string().contains("more.qcow2"), "{error}");
    assert_eq!(files(dir.path()), ["data.qcow2", "more.qcow2", "more.v2.qcow2", "root.qcow2"]);
    let twice = take_offline(&[&root, &root], "v2").unwrap_err();
    assert!(matches!(fault(&twice), SnapshotFault::Twice), "{twice}");
    assert_eq!(take_offline(&[&root, &data], "v2").unwrap().len(), 2);
    assert_eq!((names(&root), names(&data)), (vec!["v2".to_owned()], vec!["v2".to_owned()]));
}

#[test]
fn a_path_that_leads_elsewhere_meanwhile_is_not_replaced() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    let prepared = prepare(&disk, &info("mon"), &PrepareOptions::default()).unwrap();
    std::fs::rename(&disk, dir.path().join("moved.qcow2")).unwrap();
    std::fs::write(&disk, b"another").unwrap();
    let error = prepared.publish().unwrap_err();
    assert!(matches!(fault(&error), SnapshotFault::Replaced), "{error}");
    assert_eq!(std::fs::read(&disk).unwrap(), b"another");
    assert_eq!(files(dir.path()), ["moved.qcow2", "web.qcow2"]);
}

#[test]
fn going_back_makes_the_disk_what_it_was() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    for (pattern, name) in [(1, "mon"), (2, "tue"), (3, "wed")] {
        write(&disk, pattern, "0 1M");
        take_offline(&[&disk], name).unwrap();
    }
    write(&disk, 4, "0 1M");
    let options = RevertOptions { keep: Some(dir.path().join("kept.qcow2")), ..RevertOptions::default() };
    let reverted = snapshot::revert(&disk, "mon", &options, &resources()).unwrap();
    assert_eq!(reverted.layer, dir.path().join("web.mon.qcow2"));
    let dropped: Vec<_> = reverted.dropped.iter().map(|snapshot| snapshot.name().unwrap()).collect();
    assert_eq!(dropped, ["wed", "tue"]);
    reads(&disk, 1, "0 1M");
    reads(&dir.path().join("kept.qcow2"), 4, "0 1M");
    assert_eq!(names(&disk), ["mon"]);
    assert_eq!(names(&dir.path().join("kept.qcow2")), ["wed", "tue", "mon"]);
    write(&disk, 5, "0 64k");
    snapshot::revert(&disk, "mon", &RevertOptions::default(), &resources()).unwrap();
    reads(&disk, 1, "0 1M");
    let (notes, images): (Vec<_>, Vec<_>) =
        files(dir.path()).into_iter().partition(|name| name.starts_with('.'));
    images.iter().for_each(|image| assert_clean(&dir.path().join(image)));
    assert_eq!((images.len(), notes), (5, vec![".web.qcow2.left".to_owned()]));
    // A name of a snapshot that is not below any more is still that of its file.
    let error = take_offline(&[&disk], "tue").unwrap_err();
    assert!(matches!(fault(&error), SnapshotFault::Exists { .. }), "{error}");
}

#[test]
fn going_back_is_refused_where_it_would_lose_more_than_was_said() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    take_offline(&[&disk], "mon").unwrap();
    let inode = disk.metadata().unwrap().ino();
    let keep = |path: PathBuf| RevertOptions { keep: Some(path), ..RevertOptions::default() };
    let sub = dir.path().join("sub");
    std::fs::create_dir(&sub).unwrap();
    for (name, options, part) in [
        ("tue", RevertOptions::default(), "it has no snapshot \"tue\", it has mon"),
        ("mon", keep(sub.join("kept")), "in the disk's own directory"),
        ("mon", keep(disk.clone()), "in the disk's own directory"),
        ("mon", keep(dir.path().join("web.mon.qcow2")), "exists already"),
    ] {
        let error = snapshot::revert(&disk, name, &options, &resources()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(disk.metadata().unwrap().ino(), inode);
    assert_eq!(files(dir.path()), ["sub", "web.mon.qcow2", "web.qcow2"]);
}

#[test]
fn a_clone_is_a_disk_of_its_own() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    write(&disk, 1, "0 1M");
    take_offline(&[&disk], "mon").unwrap();
    std::fs::create_dir(dir.path().join("ci")).unwrap();
    let open = OpenOptions { allow_backing: vec![dir.path().to_owned()], ..OpenOptions::default() };
    for (output, backing) in [("clone.qcow2", "web.mon.qcow2"), ("ci/42.qcow2", "../web.mon.qcow2")] {
        let output = dir.path().join(output);
        let layer = snapshot::clone(&disk, "mon", &output, &open).unwrap();
        assert_eq!(layer, dir.path().join("web.mon.qcow2"));
        assert_eq!(chain_of(&output)[0]["backing-filename"], backing);
        write(&output, 2, "0 64k");
        reads(&output, 1, "64k 64k");
        reads(&disk, 1, "0 1M");
        let found = find(&output, "mon", &open).unwrap().info.unwrap();
        assert_eq!(found.origin.as_deref(), Some("web.qcow2"));
        assert_eq!(SnapshotInfo { origin: None, ..found }, info("mon"));
        assert_clean(&output);
        let error = snapshot::clone(&disk, "mon", &output, &open).unwrap_err();
        assert!(error.to_string().contains("exists"), "{error}");
    }
}

#[test]
fn a_state_is_named_by_its_disk_and_its_name_unless_a_file_has_that_name() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    take_offline(&[&disk], "mon").unwrap();
    let open = OpenOptions::default();
    let at = |text: &str| resolve(&dir.path().join(text), &open);
    let state = at("web.qcow2@mon").unwrap();
    assert_eq!((state.path, state.format), (dir.path().join("web.mon.qcow2"), Some(Format::Qcow2)));
    assert_eq!(state.info, Some(info("mon")));
    assert_eq!(at("web.qcow2").unwrap().path, disk);
    assert_eq!(at("absent@mon").unwrap().path, dir.path().join("absent@mon"));
    assert!(at("web.qcow2@tue").unwrap_err().to_string().contains("it has mon"));
    let odd = new_disk(dir.path(), "web.qcow2@mon");
    assert_eq!(at("web.qcow2@mon").unwrap().path, odd);
}

#[test]
fn a_damaged_record_costs_the_name_and_nothing_else() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    write(&disk, 6, "0 1M");
    take_offline(&[&disk], "mon").unwrap();
    let bytes = std::fs::read(&disk).unwrap();
    let record = bytes.windows(4).position(|window| window == b"VMSN").unwrap();
    for at in record + 8..record + 8 + 23 {
        let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
        file.write_all_at(&[bytes[at] ^ 0x41], at as u64).unwrap();
        let found = list(&disk, &OpenOptions::default()).unwrap().remove(0);
        assert!(found.info.is_none() && found.damage.is_some(), "byte {at}");
        file.write_all_at(&bytes[at..=at], at as u64).unwrap();
    }
    std::fs::OpenOptions::new()
        .write(true)
        .open(&disk)
        .unwrap()
        .write_all_at(&[9], record as u64 + 8)
        .unwrap();
    reads(&disk, 6, "0 1M");
    assert_clean(&disk);
    take_offline(&[&disk], "tue").unwrap();
    assert_eq!(names(&disk), ["tue", "-"]);
}

#[test]
fn stock_tools_keep_the_record() {
    let dir = common::scratch();
    let disk = new_disk(dir.path(), "web.qcow2");
    take_offline(&[&disk], "mon").unwrap();
    qemu_img(&["amend", "-o", "lazy_refcounts=on", path_str(&disk)]);
    qemu_img(&["bitmap", "--add", path_str(&disk), "b0"]);
    qemu_img(&["resize", path_str(&disk), "8M"]);
    assert_eq!(list(&disk, &OpenOptions::default()).unwrap()[0].info, Some(info("mon")));
    assert_clean(&disk);
}
