//! A real server under `cargo xtask stress`, for a minute.

use std::time::Duration;

use xtask::stress::{Length, Options, run};

#[test]
fn no_completed_write_is_lost_by_kills_full_disks_and_merges() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        seed: 1,
        length: Length::Time(Duration::from_secs(60)),
        dir: dir.path().to_owned(),
        server: None,
    };
    let outcome = match run(&options) {
        Ok(outcome) => outcome,
        Err(error) => panic!("{error:#}\nkept in {}", dir.keep().display()),
    };
    assert_eq!(outcome.left_out, None, "this test needs root");
    assert!(outcome.rounds > 0);
}
