//! The benchmark of guests' memory, small: its guest works, its figures agree with each other, and it cleans up.

use std::time::Duration;

use xtask::bench::memory::{self, Options};

#[test]
fn a_small_guest_is_taken_compared_and_restored() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        mib: 512,
        large_mib: None,
        works: vec!["build".into()],
        rounds: 1,
        after: Duration::from_secs(1),
        ..Options::full(dir.path().to_owned())
    };
    let report = memory::run(&options).unwrap();
    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.samples > 0), "{:?}", report.rows);
    let row = |start: &str| {
        let found = report.rows.iter().find(|row| row.name.starts_with(start));
        found.unwrap_or_else(|| panic!("no row {start}")).value
    };
    // What does not depend on how fast this machine is: the causes add up to what the files show, but for their headers.
    let saved = row("space saved of three full copies");
    let causes: f64 =
        report.rows.iter().filter(|row| row.name.starts_with("… of it")).map(|row| row.value).sum();
    assert!((saved - causes).abs() < 1.0, "{causes} of {saved}");
    assert!(saved > 50.0 && row("… of it, by: read again from the disk") > 1.0, "{saved}");
    assert!(row("bytes of the next snapshot / of the first") < 1.0);
    for mode in ["stop", "copy", "live"] {
        assert!(row(&format!("guest held, mode `{mode}`")) > 0.0);
        assert!(row(&format!("time of a snapshot, mode `{mode}`")) > 0.0);
    }
    let runs = row("restore until the guest runs, no cache");
    assert!(row("restore until the guest's next piece of work, no cache") > runs && runs > 0.0);
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().starts_with("root-")), "{left:?}");
}
