//! A host whose file system fills up: requests fail, and go on once there is room.

use std::path::PathBuf;

use crate::common::flat::{read, write};
use crate::common::small_resources;
use vmstrata_disk::{CreateOptions, Disk, OpenOptions, create};

/// A file system of its own for the process that has the test run: `None` in the one that starts it.
fn little_room(mib: usize) -> Option<PathBuf> {
    const ROOM: &str = "VMSTRATA_TEST_ROOM";
    if let Some(room) = std::env::var_os(ROOM) {
        return Some(room.into());
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounting an image needs root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let script =
        "truncate -s $1M $0.img && mkfs.ext4 -qF $0.img && mount -o loop $0.img $0 && shift && exec \"$@\"";
    let test = std::thread::current().name().unwrap().to_owned();
    let room = dir.path().join("room");
    std::fs::create_dir(&room).unwrap();
    let output = std::process::Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .args([room.as_os_str(), mib.to_string().as_ref(), std::env::current_exe().unwrap().as_os_str()])
        .args(["--exact", &test, "--nocapture"])
        .env(ROOM, &room)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    None
}

#[test]
fn a_full_file_system_refuses_writes_and_keeps_what_was_written() {
    let Some(room) = little_room(64) else { return };
    let (path, filler) = (room.join("d.qcow2"), room.join("filler"));
    create(&path, &CreateOptions { size: Some(1 << 30), ..CreateOptions::default() }).unwrap();
    let resources = small_resources(None);
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    write(&disk, 0, &[1; 65536]).unwrap();
    let free = rustix::fs::statvfs(&room).unwrap();
    // All that there is, the blocks that root may use as well.
    let _ = std::fs::write(&filler, vec![1; (free.f_bfree * free.f_bsize) as usize]);
    let refused = (1..2000).find_map(|cluster| write(&disk, cluster << 19, &[2; 65536]).err());
    assert_eq!(refused.expect("it is full").errno(), 28);
    // To the last block.
    let mut last = std::fs::File::create(room.join("last")).unwrap();
    while std::io::Write::write_all(&mut last, &[1; 512]).and_then(|()| last.sync_data()).is_ok() {}
    // The first flush writes an entry of the L1 table, of which a new image had nothing on the host's disk.
    disk.flush().expect("what was written has its space");
    assert_eq!(disk.failure(), None);
    std::fs::remove_file(&filler).unwrap();
    write(&disk, 1 << 20, &[3; 65536]).expect("there is room again");
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    assert_eq!((read(&disk, 0, 1).unwrap(), read(&disk, 1 << 20, 1).unwrap()), (vec![1], vec![3]));
}
