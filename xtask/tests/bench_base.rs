//! The benchmark of bases, small: hosts whose guests boot together get each byte of their base once from a real NFS server, and none again.

use xtask::bench::base::{self, Options};

#[test]
fn small_boot_storms_are_measured_and_removed() {
    if let Err(why) = xtask::nas::check() {
        eprintln!("not tested: {why}");
        return;
    }
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let report = base::run(&Options::quick(dir.path().to_owned())).unwrap();
    let bytes = report.rows.iter().filter(|row| row.name.ends_with("/ the base"));
    let bytes: Vec<_> = bytes.map(|row| row.met()).collect();
    assert_eq!(bytes, [Some(true); 4], "{:?}", report.rows);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}
