//! What it takes to feed bodies in a test.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

pub mod memory;
pub mod mutate;
pub mod seeds;
pub mod watch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A number from the environment.
pub fn knob(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// Repeats `step` for some seconds, once at least; how often.
pub fn until(seconds: u64, mut step: impl FnMut()) -> u64 {
    let started = Instant::now();
    let mut rounds = 0;
    while rounds == 0 || started.elapsed() < Duration::from_secs(seconds) {
        step();
        rounds += 1;
    }
    rounds
}

/// Keeps an input that failed; where.
pub fn keep(name: &str, input: &[u8]) -> String {
    let path: PathBuf = std::env::temp_dir().join(format!("vmstrata-fuzz-{name}-{}", std::process::id()));
    std::fs::write(&path, input).unwrap();
    path.display().to_string()
}
