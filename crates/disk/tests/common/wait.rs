//! Conditions that tests wait for.

use std::time::{Duration, Instant};

/// Waits until something holds: longer than anything takes on a loaded machine.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}
