//! Room that is set aside for the active layer after a live snapshot, where the file system gains by it.

mod common;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use common::flat::{read, write};
use common::open;
use common::stock::{assert_clean, path_str, qemu_img};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, snapshot_together};

const CLUSTER: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

/// On a disk, as what is made in memory gets no room.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Bytes that are allocated to a file past its length.
fn room(path: &Path) -> u64 {
    let metadata = path.metadata().unwrap();
    (metadata.blocks() * 512).saturating_sub(metadata.len())
}

fn take(disk: &Disk, name: &str) -> std::path::PathBuf {
    let info = SnapshotInfo { name: name.into(), ..SnapshotInfo::default() };
    let taken = snapshot_together(&[disk], &info).unwrap();
    disk.finalize().unwrap();
    taken[0].layer.clone()
}

/// A disk whose first layer holds 8 MiB.
fn disk(dir: &Path) -> Arc<Disk> {
    let path = dir.join("a.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1G"]);
    let disk = open(&path);
    write(&disk, 0, &vec![1; 8 * MIB as usize]).unwrap();
    disk
}

#[test]
fn a_snapshot_sets_room_aside_and_the_next_one_gives_the_rest_back() {
    let dir = scratch();
    let path = dir.path().join("a.qcow2");
    let disk = disk(dir.path());
    let is_ext4 = rustix::fs::statfs(dir.path()).unwrap().f_type == 0xEF53;
    for name in ["first", "second", "third"] {
        let layer = take(&disk, name);
        assert!(room(&layer) <= 256 << 10, "{name}: {} bytes are allocated past the end", room(&layer));
        assert_eq!(room(&path) >= 7 * MIB, is_ext4 && name == "first", "{name}: {}", room(&path));
        // Less than a layer has to hold for the next one to get room.
        write(&disk, 3 * CLUSTER, &[2; 4096]).unwrap();
        assert!(read(&disk, 3 * CLUSTER, 4096).unwrap() == [2; 4096]);
    }
    disk.close().unwrap();
    drop(disk);
    assert!(room(&path) <= 256 << 10);
    assert_clean(&path);
}

#[test]
fn room_that_a_killed_process_leaves_is_given_back_by_the_next() {
    let dir = scratch();
    let path = dir.path().join("a.qcow2");
    let first = disk(dir.path());
    take(&first, "first");
    write(&first, 3 * CLUSTER, &[2; 4096]).unwrap();
    first.flush().unwrap();
    // Never closed.
    drop(first);
    let again = open(&path);
    assert!(read(&again, 3 * CLUSTER, 4096).unwrap() == [2; 4096]);
    again.close().unwrap();
    drop(again);
    assert!(room(&path) <= 256 << 10, "{} bytes are allocated past the end", room(&path));
    assert_clean(&path);
}
