//! A short `cargo xtask soak`: snapshots of a guest's disk, most of them deleted from the middle, the server killed meanwhile.

use std::time::Duration;

use xtask::soak::{Options, run};

#[test]
fn guest_does_not_notice_deletes_of_its_snapshots_and_kills_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        snapshots: 50,
        deletes: 30,
        every: Duration::from_millis(150),
        kill_every: 8,
        check_every: 5,
        seed: 3,
        dir: dir.path().to_owned(),
    };
    let outcome = run(&options).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!((outcome.snapshots, outcome.deletes), (50, 30), "{outcome:?}");
    assert!(outcome.kills > 0 && outcome.rounds > 0, "{outcome:?}");
    assert!(outcome.recovered > 0 && outcome.layers >= 10, "{outcome:?}");
}
