//! The benchmark of fragmented disks, small: its steps work, what it reads is right, and it cleans up after itself.

use xtask::bench::fragmented::{self, Options};

#[test]
fn small_fragmented_disks_are_measured_checked_and_removed() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options =
        Options { size: 8 << 20, large: 64 << 20, layers: [2, 3], ..Options::quick(dir.path().to_owned()) };
    let report = fragmented::run(&options).unwrap();
    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.value > 0.0), "{:?}", report.rows);
    assert_eq!(report.rows.len(), 13);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}
