//! A 7,200 rpm disk in virtual time: a 2 TB Barracuda. One head, no cache, no queue of its own.

use std::time::Duration;

/// Bytes.
pub(super) const CAPACITY: u64 = 2_000_000_000_000;
const BYTES_PER_SECOND: f64 = 150e6;
const TURN_SECONDS: f64 = 60.0 / 7200.0;
const SEEK_MIN: f64 = 1.0e-3;
const SEEK_AVERAGE: f64 = 13.0e-3;
/// The average of the root of the distance of two random places, of 1.
const ROOT_AVERAGE: f64 = 8.0 / 15.0;

/// The time that passing bytes below the head takes.
pub(super) fn transfer(len: u64) -> Duration {
    Duration::from_secs_f64(len as f64 / BYTES_PER_SECOND)
}

/// The time of a request follows from where the head is, how far it seeks, and where the platter is by then.
#[derive(Debug, Default)]
pub(super) struct Disk {
    /// Where the last request ended.
    head: u64,
}

impl Disk {
    /// Serves a request that begins at `now`. Returns when it ends. One that begins where the last one ended costs no seek and no turn.
    pub(super) fn serve(&mut self, now: Duration, at: u64, len: u64) -> Duration {
        let wait = if at == self.head { 0.0 } else { self.positions(now.as_secs_f64(), at) };
        self.head = at + len;
        now + Duration::from_secs_f64(wait) + transfer(len)
    }

    fn positions(&self, now: f64, at: u64) -> f64 {
        let full = SEEK_MIN + (SEEK_AVERAGE - SEEK_MIN) / ROOT_AVERAGE;
        let distance = at.abs_diff(self.head) as f64 / CAPACITY as f64;
        let seek = SEEK_MIN + (full - SEEK_MIN) * distance.sqrt();
        // In turns: where the place is on its track, and what passes below the head when it arrives.
        let place = at as f64 / (BYTES_PER_SECOND * TURN_SECONDS);
        let passes = (now + seek) / TURN_SECONDS;
        seek + (place - passes).rem_euclid(1.0) * TURN_SECONDS
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    #[test]
    fn random_reads_take_what_the_data_sheet_says() {
        let mut rng = SmallRng::seed_from_u64(1);
        let (mut disk, mut now) = (Disk::default(), Duration::ZERO);
        for _ in 0..100_000 {
            now = disk.serve(now, rng.random_range(0..CAPACITY / 4096) * 4096, 4096);
        }
        // 13 ms of seek, half a turn, and 27 us.
        let mean = now.as_secs_f64() / 100_000.0 * 1e3;
        assert!((mean - 17.2).abs() < 0.1, "{mean}");
    }

    #[test]
    fn a_request_that_goes_on_is_at_full_speed() {
        let (mut disk, mut now) = (Disk::default(), Duration::ZERO);
        for part in 0..150 {
            now = disk.serve(now, part * 1_000_000, 1_000_000);
        }
        assert!(now.abs_diff(Duration::from_secs(1)) < Duration::from_micros(1), "{now:?}");
        let near = disk.serve(now, 151_000_000, 4096) - now;
        assert!(near > Duration::from_millis(1), "a gap costs a seek and a part of a turn: {near:?}");
    }
}
