//! The benchmark of histories, small: its steps work, its oracles agree, and it cleans up after itself.

use std::time::Duration;

use xtask::bench::history::{self, Options, Pace};

#[test]
fn a_small_history_is_measured_checked_and_removed() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let pace = Pace { spaced: 1, close: 1, second: Duration::from_millis(100) };
    let options = Options {
        snapshots: 14,
        pace,
        working_set: 1 << 20,
        merged: 4 << 20,
        reads_size: 4 << 20,
        ..Options::quick(dir.path().to_owned())
    };
    let report = history::run(&options).unwrap();

    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.samples > 0), "{:?}", report.rows);
    let row = |start: &str| {
        let found = report.rows.iter().find(|row| row.name.starts_with(start));
        found.unwrap_or_else(|| panic!("no row {start}"))
    };
    // What does not depend on how fast this machine is.
    assert_eq!(row("snapshot of the live disk").samples, 2);
    assert_eq!(row("writes in the second after / before a snapshot").samples, 1);
    assert_eq!(row("layers that `qemu-img check` finds clean").value, 15.0);
    let added = row("bytes that all snapshots add / their bound");
    assert_eq!((added.samples, added.met()), (1, Some(true)), "{added:?}");
    assert!(row("snapshot of the live disk").qemu.is_some());
    assert!(row("4 KiB requests of a guest, p99: while").qemu.is_some());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}

#[test]
fn too_few_snapshots_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { snapshots: 12, ..Options::quick(dir.path().to_owned()) };
    assert!(history::run(&options).is_err());
}
