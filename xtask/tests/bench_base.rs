//! The benchmark of bases, small: hosts whose guests boot together get each byte of their base once from a real NFS server, and none again.

use xtask::bench::base::{self, Options, Part};
use xtask::bench::report::{Report, Row};

/// Runs a part, and looks whether its files are gone. `None` where there can be no NAS.
fn run(part: Part) -> Option<Report> {
    if let Err(why) = xtask::nas::check() {
        eprintln!("not tested: {why}");
        return None;
    }
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = Options { parts: vec![part], ..Options::quick(dir.path().to_owned()) };
    let report = base::run(&options).unwrap();
    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.value >= 0.0), "{:?}", report.rows);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
    Some(report)
}

#[test]
fn small_boot_storms_are_measured_and_removed() {
    let Some(report) = run(Part::Storm) else { return };
    let bytes = report.rows.iter().filter(|row| row.name.ends_with("/ the base"));
    let bytes: Vec<_> = bytes.map(|row| row.met()).collect();
    assert_eq!(bytes, [Some(true); 4], "{:?}", report.rows);
}

#[test]
fn a_host_that_has_nothing_boots_from_an_object_store() {
    let Some(report) = run(Part::S3) else { return };
    let came = report.rows.iter().find(|row| row.name.ends_with("from the store")).expect("bytes");
    assert!(came.value > 1.0, "{came:?}");
}

#[test]
fn upgrades_that_the_next_base_has_are_not_shipped() {
    let Some(report) = run(Part::Upgrade) else { return };
    let bounded: Vec<_> = report.rows.iter().filter_map(Row::met).collect();
    assert_eq!(bounded, [true; 2], "{:?}", report.rows);
}

#[test]
fn what_a_guest_swaps_to_a_disk_of_its_host_does_not_reach_the_nas() {
    let Some(report) = run(Part::Swap) else { return };
    let sent = report.rows.iter().find(|row| row.name == "swap: to the NAS").expect("bytes");
    assert!(sent.met() == Some(true) && sent.qemu > Some(1.0), "{sent:?}");
}

#[test]
fn waits_of_guests_that_boot_and_work_are_counted() {
    let Some(report) = run(Part::Responses) else { return };
    let [bursts, long @ ..] = &report.rows[..] else { panic!("no rows") };
    assert!(bursts.value > 10.0, "{bursts:?}");
    assert!(long.len() == 2 && long.iter().all(|row| row.value <= 100.0), "{long:?}");
}
