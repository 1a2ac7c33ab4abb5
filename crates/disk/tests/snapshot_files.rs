//! Snapshots as files: whatever happens, the disk's path leads to a sound chain, and stock tools agree on every state.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use vmstrata_disk::snapshot::{
    self, PrepareOptions, RevertOptions, SnapshotFault, SnapshotInfo, Step, list, prepare,
};
use vmstrata_disk::{
    CreateOptions, Error, ErrorKind, Format, OpenOptions, ResourceOptions, Resources, create as create_image,
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

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn take_offline(path: &Path, name: &str) -> Result<PathBuf, Error> {
    let (open, options) = (OpenOptions::default(), PrepareOptions::default());
    let created = snapshot::create(&[path.to_owned()], &info(name), &open, &options, &resources())?;
    Ok(created.into_iter().next().unwrap().layer)
}

fn names(path: &Path) -> Vec<String> {
    let found = list(path, &OpenOptions::default()).unwrap();
    found.iter().map(|snapshot| snapshot.name().unwrap_or("-").to_owned()).collect()
}

/// The names in a directory, sorted.
fn files(dir: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn fault(error: &Error) -> &SnapshotFault {
    match error.kind() {
        ErrorKind::Snapshot(fault) => fault,
        other => panic!("{other}"),
    }
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
