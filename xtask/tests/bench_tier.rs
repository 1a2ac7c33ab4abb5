//! The benchmark of tiered disks, small: its steps work on a real NFS server, what it reads is right, and it cleans up after itself.

use std::time::Duration;

use xtask::bench::tier::{self, Options};

#[test]
fn small_tiered_disks_are_measured_checked_and_removed() {
    if let Err(why) = xtask::nas::check() {
        eprintln!("not tested: {why}");
        return;
    }
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        size: 8 << 20,
        sparse: 64 << 20,
        counted: 200,
        turn: Duration::from_millis(400),
        window: Duration::from_millis(200),
        round_trips: vec![Duration::from_millis(1)],
        epochs: 5,
        outage: Duration::from_millis(1500),
        ..Options::quick(dir.path().to_owned())
    };
    let report = tier::run(&options).unwrap();
    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.value >= 0.0), "{:?}", report.rows);
    // What does not depend on how fast this machine is.
    let row = |start: &str| {
        let found = report.rows.iter().find(|row| row.name.starts_with(start));
        found.unwrap_or_else(|| panic!("no row {start}"))
    };
    for name in ["bytes to the NAS / written: sequential", "guests' errors while the NAS is gone"] {
        assert_eq!(row(name).met(), Some(true), "{:?}", row(name));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}
