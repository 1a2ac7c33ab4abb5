//! After a snapshot the host begins to write out what the new layer grows by, before anybody flushes.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::flat::write;
use crate::common::stock::{path_str, qemu_img};
use crate::common::{open, wait_until};
use vmstrata_disk::snapshot::SnapshotInfo;

const CLUSTER: u64 = 64 << 10;
const CLUSTERS: u64 = 64;

/// Number of `cachestat(2)` (Linux 6.5) on all machines but Alpha.
const CACHESTAT: libc::c_long = 451;

/// What it tells, in pages.
#[repr(C)]
#[derive(Default)]
struct Cached {
    pages: u64,
    dirty: u64,
    under_writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of the whole file that the host has in memory only.
fn dirty_pages(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    let (whole, mut cached) = ([0_u64; 2], Cached::default());
    // SAFETY: a range of two words and a place for the five numbers, both of which outlive the call.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), whole.as_ptr(), &raw mut cached, 0) };
    assert_eq!(result, 0, "cachestat: {}", std::io::Error::last_os_error());
    cached.dirty
}

#[test]
fn new_clusters_are_written_out_before_anyone_flushes() {
    // Beside what is compiled: the directory for temporary files may be in memory, which is written out nowhere.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let top = dir.path().join("top");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&top), "64M"]);
    let disk = open(&top);
    let fill = |byte: u8| {
        for cluster in 0..CLUSTERS {
            write(&disk, cluster * CLUSTER, &[byte; CLUSTER as usize]).unwrap();
        }
    };
    fill(1);
    disk.snapshot(&SnapshotInfo { name: "monday".into(), ..SnapshotInfo::default() }).unwrap();
    let begun = Instant::now();
    fill(2);
    let grown = CLUSTERS * CLUSTER / rustix::param::page_size() as u64;
    if dirty_pages(&top) < grown {
        // Such as one that lies over another, which has the pages.
        eprintln!("this file system does not tell what is dirty");
        return;
    }
    // The kernel alone waits for thirty seconds, and changes are committed after five.
    wait_until("written out", || dirty_pages(&top) <= grown / 16);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    disk.close().unwrap();
}
