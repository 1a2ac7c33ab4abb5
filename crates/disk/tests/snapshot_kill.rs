//! A process is killed with SIGKILL while it writes and takes snapshots: the disk and every snapshot are whole, for stock
//! tools at once and for its successor with everything that had completed.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::flat::write;
use crate::common::killed::{PLACES, numbers};
use crate::common::stock::{assert_safe, path_str, qemu_img};
use crate::common::{for_seeds, open_read_only, random, scratch, small_resources, wait_until};
use rand::Rng as _;
use vmstrata_disk::snapshot::{SnapshotInfo, list};
use vmstrata_disk::{Disk, OpenOptions, snapshot_together};

/// What the child finds its orders in: the image.
const ORDERS: &str = "VMSTRATA_TEST_SNAPSHOT_CHILD";

fn open(path: &Path) -> Arc<Disk> {
    let journals = path.with_file_name("journals");
    let resources = small_resources(Some(journals.as_path()));
    Disk::open(path, &OpenOptions::default(), &resources).expect("the disk opens")
}

fn report_of(path: &Path) -> PathBuf {
    path.with_file_name("reported")
}

/// The child: writes numbers, takes a snapshot now and then, and says which number has completed.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn child_that_takes_snapshots_until_it_is_killed() {
    let Some(path) = std::env::var_os(ORDERS).map(PathBuf::from) else { return };
    let disk = open(&path);
    let mut reported =
        std::fs::OpenOptions::new().append(true).create(true).open(report_of(&path)).expect("opens");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1u64.. {
                let block = number.to_le_bytes().repeat(512);
                for place in PLACES {
                    write(&disk, place + 65536 + number % 9 * 65536, &block).expect("writes");
                    write(&disk, place, &block).expect("writes");
                }
                if number % 64 == 0 {
                    disk.flush().expect("flushes");
                }
                reported.write_all(b".").expect("reports");
            }
        });
        for step in 0u64.. {
            std::thread::sleep(Duration::from_millis(3));
            let name = format!("{}-{step}", std::process::id());
            let info = SnapshotInfo { name, ..SnapshotInfo::default() };
            snapshot_together(&[&disk], &info).expect("takes a snapshot");
            // Every other one is finalized by the next.
            if step % 2 == 0 {
                disk.finalize().expect("finalizes");
            }
        }
    });
}

fn run_and_kill(path: &Path, after: Duration) -> u64 {
    let _ = std::fs::remove_file(report_of(path));
    let mut child = Command::new(std::env::current_exe().expect("the test binary"))
        .args([
            "--exact",
            "snapshot_kill::child_that_takes_snapshots_until_it_is_killed",
            "--ignored",
            "--nocapture",
        ])
        .env(ORDERS, path)
        .stdout(Stdio::null())
        .spawn()
        .expect("the child starts");
    let reported = || std::fs::metadata(report_of(path)).map_or(0, |metadata| metadata.len());
    let before = layers(path);
    wait_until("the child's first snapshots", || reported() > 0 && layers(path) >= before + 3);
    std::thread::sleep(after);
    child.kill().expect("killed");
    child.wait().expect("gone");
    reported()
}

/// Files of layers, the disk's own included.
fn layers(path: &Path) -> usize {
    let files = std::fs::read_dir(path.parent().expect("in a directory")).expect("there");
    files.filter(|file| file.as_ref().is_ok_and(|file| file.path().extension() == path.extension())).count()
}

#[test]
fn a_killed_server_loses_no_write_and_leaves_no_broken_snapshot() {
    for_seeds(6, |seed| {
        let dir = scratch();
        let path = dir.path().join("disk.qcow2");
        std::fs::create_dir(dir.path().join("journals")).unwrap();
        let cluster = ["64k", "4k"][seed as usize % 2];
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &format!("cluster_size={cluster}"),
            path_str(&path),
            "8M",
        ]);
        for round in 0..3 {
            let after = Duration::from_micros(random("killed", seed * 3 + round).random_range(0..120_000));
            let completed = run_and_kill(&path, after);
            assert_safe(&path);
            let disk = open(&path);
            let [first, second] = numbers(&disk, "the disk");
            assert!(second >= completed, "seed {seed}: {first}, {second}, had completed {completed}");
            disk.close().unwrap();
            drop(disk);
            // What a killed process had set aside for writes to come may be leaked.
            assert_safe(&path);
            // The next child begins at 1 again.
            let disk = open(&path);
            for place in PLACES {
                write(&disk, place, &[0; 4096]).unwrap();
            }
            disk.close().unwrap();
        }
        let snapshots = list(&path, &OpenOptions::default()).unwrap();
        assert!(snapshots.len() > 3, "{} snapshots", snapshots.len());
        for snapshot in snapshots {
            assert_safe(&snapshot.layer);
            numbers(&open_read_only(&snapshot.layer), &snapshot.layer.display().to_string());
        }
    });
}
