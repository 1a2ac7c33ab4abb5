//! Guests whose memory is in several pieces: NUMA nodes with a backend each, huge pages, a hole below 4 GiB.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::counting::{Counting, Export, STEPS_MAX, last_count, must};
use serde_json::Value;
use tempfile::TempDir;
use xtask::guest::{Hardware, Task};

/// With this much memory QEMU's q35 has 2 GiB below the hole, and the rest above it.
const ALL_MIB: u32 = 3072;
const FIRST_MIB: u32 = 512;
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Huge pages for one guest, in a file system of their own; given back when dropped.
struct HugePages {
    dir: TempDir,
    before: u64,
}

impl HugePages {
    /// `None` for who may not have them.
    fn take(mib: u32) -> Option<Self> {
        let count = || fs::read_to_string(HUGE_PAGES).ok()?.trim().parse::<u64>().ok();
        let before = count()?;
        let dir = tempfile::tempdir().ok()?;
        let mount = Command::new("mount").args(["-t", "hugetlbfs", "none"]).arg(dir.path()).status();
        mount.ok().filter(std::process::ExitStatus::success)?;
        let pages = Self { dir, before };
        let wanted = before + u64::from(mib) / 2;
        fs::write(HUGE_PAGES, wanted.to_string()).ok()?;
        (count()? == wanted).then_some(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
        let _ = fs::write(HUGE_PAGES, self.before.to_string());
    }
}

/// A machine of two nodes; the second reaches from below the hole to above it.
fn two_nodes(first: PathBuf, dir: &Path) -> Hardware {
    let nodes = vec![(dir.join("second"), ALL_MIB - FIRST_MIB)];
    Hardware { memory: Some(first), mib: FIRST_MIB, nodes, ..Hardware::default() }
}

fn json(command: &mut Command) -> Value {
    let output = must(command.arg("--json"));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// It is taken, killed, and counts on from there: started before its memory is read, and after.
fn counts_on_from(counting: &mut Counting, mode: &str) {
    let report = json(&mut counting.pages());
    assert_eq!(report["pages"], ALL_MIB << 8, "{report}");
    let before = last_count(&counting.guest.vm);
    let taken = json(counting.snapshot(mode).args(["--mode", mode]));
    assert!(taken["kernel"].is_string(), "its pages are told apart: {taken}");
    assert_eq!(taken["pages"], ALL_MIB << 8, "{taken}");
    assert!(taken["stored-pages"].as_u64() < Some(256 << 8), "most of it is free: {taken}");
    // All that it said until now.
    while counting.guest.vm.saw("guest: count ", Duration::ZERO).unwrap() {}
    let after = last_count(&counting.guest.vm) + 1;
    for flags in [&["--lazy"][..], &["--no-cache"], &[]] {
        counting.restore(mode, flags);
        counting.guest.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
        let first = last_count(&counting.guest.vm);
        assert!((before..=after).contains(&first), "{mode} {flags:?}: {first} of {before} to {after}");
        counting.counts_on();
    }
}

#[test]
fn guest_of_two_nodes_on_both_sides_of_the_hole_counts_on_from_its_snapshots() {
    let hardware = |dir: &Path| two_nodes(dir.join("first"), dir);
    let mut counting = Counting::start_on(Export::Nbd, Task::Count, hardware);
    for mode in ["copy", "live"] {
        counts_on_from(&mut counting, mode);
    }
}

#[test]
fn guest_in_huge_pages_counts_on_from_its_snapshots() {
    let Some(huge) = HugePages::take(FIRST_MIB) else {
        eprintln!("left out: no huge pages may be had here");
        return;
    };
    let hardware = |dir: &Path| two_nodes(huge.dir.path().join("first"), dir);
    let mut counting = Counting::start_on(Export::VhostUser, Task::Count, hardware);
    counts_on_from(&mut counting, "copy");
}
