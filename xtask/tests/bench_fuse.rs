//! The benchmark of disks as files, small: its steps work, what it reads is right, and it cleans up after itself.

use xtask::bench::fuse::{self, Options};

#[test]
fn small_disks_as_files_are_measured_checked_and_removed() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = Options { size: 16 << 20, layers: 2, ..Options::quick(dir.path().to_owned()) };
    let report = fuse::run(&options).unwrap();
    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.value > 0.0), "{:?}", report.rows);
    assert_eq!(report.rows.len(), 12);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}
