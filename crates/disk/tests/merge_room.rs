//! Merges on a file system that has little room left: none fills it.

use crate::common;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::common::flat::{read, write};
use crate::common::stock::{assert_clean, path_str, qemu_io};
use vmstrata_disk::merge::{Direction, Merge, MergeFault, MergeOptions, ranges_of};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo};
use vmstrata_disk::{CreateOptions, Disk, Error, OpenOptions, ResourceOptions, Resources, create};

/// Where a test that needs a little file system of its own finds it.
const ROOM: &str = "VMSTRATA_TEST_ROOM";
const MIB: u64 = 1 << 20;

/// A file system in memory of so many MiB; `None` in the process that has `test` run where there is one.
fn little_room(test: &str, mib: u64) -> Option<PathBuf> {
    if let Some(room) = std::env::var_os(ROOM) {
        return Some(room.into());
    }
    let script = "mount -t tmpfs -o size=$1 tmpfs \"$0\" || exit 99; shift; exec \"$@\"";
    let room = tempfile::tempdir().unwrap();
    let output = Command::new("unshare")
        .args(["-rm", "sh", "-c", script, path_str(room.path()), &format!("{mib}m")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ROOM, room.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    None
}

fn available(room: &Path) -> u64 {
    let found = rustix::fs::statvfs(room).unwrap();
    found.f_bavail * found.f_frsize
}

/// Not by a tool that needs room itself.
fn whole(disk: &Path) -> Vec<u8> {
    read(&common::open_read_only(disk), 0, (64 * MIB) as usize).unwrap()
}

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

/// Begins to delete a snapshot, of a disk in use or of files.
fn begin(disk: &Path, running: Option<&Arc<Disk>>, name: &str) -> Result<Merge, Error> {
    // Upwards, which takes the most room.
    let options = MergeOptions { direction: Direction::Stream, ..MergeOptions::default() };
    let range = ranges_of(disk, &[name.to_owned()], &OpenOptions::default()).unwrap()[0];
    match running {
        Some(running) => Merge::of_disk(running, range, &options),
        None => Merge::new(disk, range, &options, &resources()),
    }
}

#[test]
fn a_merge_without_room_is_refused_before_it_copies_anything() {
    let Some(room) = little_room("merge_room::a_merge_without_room_is_refused_before_it_copies_anything", 64)
    else {
        return;
    };
    let disk = room.join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(64 * MIB), ..CreateOptions::default() }).unwrap();
    for (name, command) in
        [("s1", "write -q -P 1 0 20M"), ("s2", "write -q -P 2 30M 64k"), ("s3", "write -q -P 3 31M 64k")]
    {
        qemu_io(&disk, &[command.to_owned()]);
        let info = SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() };
        let (open, prepare) = (OpenOptions::default(), PrepareOptions::default());
        snapshot::create(std::slice::from_ref(&disk), &info, &open, &prepare, &resources()).unwrap();
    }
    let filler = available(&room) - 10 * MIB;
    std::fs::write(room.join("filler"), vec![1; filler as usize]).unwrap();
    let (before, layer) = (whole(&disk), room.join("web.s2.qcow2"));
    let state = std::fs::read(&layer).unwrap();
    for is_running in [false, true] {
        let running = is_running.then(|| common::open(&disk));
        let free = available(&room);
        let refused = begin(&disk, running.as_ref(), "s1").unwrap_err();
        let Some(MergeFault::NoSpace { demand, reserve, available: found }) = refused.fault() else {
            panic!("{refused}")
        };
        assert_eq!((*demand, *reserve), (20 * MIB, MIB), "running: {is_running}");
        assert!(*found <= 10 * MIB, "{found}");
        assert_eq!(available(&room), free, "nothing was copied");
        assert!(std::fs::read(&layer).unwrap() == state, "nor was the layer touched");
        if let Some(running) = running {
            // The guest has the room that there is.
            write(&running, 40 * MIB, &[9; 65536]).unwrap();
            // What costs little is done. It frees more than it takes.
            let job = begin(&disk, Some(&running), "s3").unwrap();
            assert_eq!(job.demand(), 65536);
            job.run().unwrap();
            running.close().unwrap();
        }
    }
    let mut expected = before;
    expected[40 << 20..][..65536].fill(9);
    assert!(whole(&disk) == expected);
    assert_clean(&disk);
}

/// Somebody else writes while it copies: it ends, and what it has copied is not copied again.
#[test]
fn a_merge_ends_where_others_fill_the_file_system() {
    let Some(room) = little_room("merge_room::a_merge_ends_where_others_fill_the_file_system", 96) else {
        return;
    };
    let disk = room.join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(64 * MIB), ..CreateOptions::default() }).unwrap();
    for (name, command) in [("s1", "write -q -P 1 0 20M"), ("s2", "write -q -P 2 30M 64k")] {
        qemu_io(&disk, &[command.to_owned()]);
        let info = SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() };
        let (open, prepare) = (OpenOptions::default(), PrepareOptions::default());
        snapshot::create(std::slice::from_ref(&disk), &info, &open, &prepare, &resources()).unwrap();
    }
    let before = whole(&disk);
    let mut job = begin(&disk, None, "s1").unwrap();
    assert_eq!(job.demand(), 20 * MIB);
    assert_eq!(job.apply(job.select().unwrap()).unwrap(), 4 * MIB);
    let filler = room.join("filler");
    std::fs::write(&filler, vec![1; (available(&room) - MIB) as usize]).unwrap();
    let ended = job.apply(job.select().unwrap()).unwrap_err();
    assert!(matches!(ended.fault(), Some(MergeFault::NoSpace { .. })), "{ended}");
    drop(job);
    assert!(whole(&disk) == before);
    std::fs::remove_file(filler).unwrap();
    let job = begin(&disk, None, "s1").unwrap();
    assert_eq!(job.demand(), 16 * MIB);
    assert_eq!(job.run().unwrap().copied_bytes, 16 * MIB);
    assert!(whole(&disk) == before);
}
