//! How fast a job may go: a bucket that bytes are taken from after they were written, and that fills with time. Steps of at most
//! [`Bucket::step_bytes`] bound what is written before it is paid for.

use std::thread;
use std::time::{Duration, Instant};

/// How often a wait asks whether to go on.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Steps in a second, at least: the limit holds over a tenth of a second.
const STEPS_PER_SECOND: u64 = 10;

/// A speed limit. What was written in one step is paid for before the next one begins, so the limit holds on average
/// whatever the steps' sizes; time in which nothing was done is not saved up.
#[derive(Debug)]
pub struct Bucket {
    bytes_per_second: Option<u64>,
    /// When what was written so far is paid for.
    paid_at: Instant,
}

impl Bucket {
    /// A bucket with nothing owed.
    pub fn new(bytes_per_second: Option<u64>, now: Instant) -> Self {
        Self { bytes_per_second, paid_at: now }
    }

    /// The limit, if there is one.
    pub fn limit(&self) -> Option<u64> {
        self.bytes_per_second
    }

    /// Bytes that one step may write, so that the limit holds from the beginning and without bursts.
    pub fn step_bytes(&self) -> u64 {
        step_bytes(self.bytes_per_second)
    }

    /// Changes the limit; what is still owed is owed at the new speed.
    pub fn set_limit(&mut self, bytes_per_second: Option<u64>, now: Instant) {
        let owed = self.paid_at.saturating_duration_since(now);
        let bytes = self.bytes_per_second.map_or(0.0, |speed| owed.as_secs_f64() * speed as f64);
        self.bytes_per_second = bytes_per_second;
        self.paid_at = now;
        self.take(bytes as u64, now);
    }

    /// Notes that `bytes` were written.
    pub fn take(&mut self, bytes: u64, now: Instant) {
        let Some(speed) = self.bytes_per_second else { return };
        // A job that owes more than a year has other troubles than its precision.
        let time = Duration::from_secs_f64((bytes as f64 / speed.max(1) as f64).min(3e7));
        self.paid_at = self.paid_at.max(now) + time;
    }

    /// Sleeps until the next step may begin, but no longer than `goes_on` holds.
    pub fn wait_while(&self, goes_on: impl FnMut() -> bool) {
        wait_while(goes_on, || self.wait(Instant::now()));
    }

    /// How long to wait before the next step.
    pub fn wait(&self, now: Instant) -> Duration {
        match self.bytes_per_second {
            Some(_) => self.paid_at.saturating_duration_since(now),
            None => Duration::ZERO,
        }
    }
}

/// As [`Bucket::step_bytes`], of a rate.
pub(crate) fn step_bytes(bytes_per_second: Option<u64>) -> u64 {
    bytes_per_second.map_or(u64::MAX, |speed| (speed / STEPS_PER_SECOND).max(1))
}

/// Sleeps until nothing is `left`, but no longer than `goes_on` holds.
pub fn wait_while(mut goes_on: impl FnMut() -> bool, left: impl Fn() -> Duration) {
    while goes_on() {
        let left = left();
        if left.is_zero() {
            break;
        }
        thread::sleep(left.min(LOOK_EVERY));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_holds_on_average_whatever_the_steps_sizes() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Some(1000), start);
        let mut now = start;
        for bytes in [1, 10, 5000, 0, 300, 4689] {
            bucket.take(bytes, now);
            now += bucket.wait(now);
        }
        let seconds = (now - start).as_secs_f64();
        assert!((9.99..10.01).contains(&seconds), "10000 bytes took {seconds} s");
    }

    #[test]
    fn the_limit_holds_from_the_first_byte() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Some(100 << 10), start);
        let (mut now, mut written) = (start, 0);
        while written < 2 << 20 {
            written += bucket.step_bytes();
            let allowed = (now - start).as_secs_f64() * f64::from(100 << 10) + bucket.step_bytes() as f64;
            assert!(written as f64 <= allowed + 1.0, "{written} of {allowed} bytes");
            bucket.take(bucket.step_bytes(), now);
            now += bucket.wait(now);
        }
        assert_eq!(Bucket::new(None, start).step_bytes(), u64::MAX);
        assert_eq!(Bucket::new(Some(1), start).step_bytes(), 1);
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Some(1000), start);
        let later = start + Duration::from_secs(3600);
        bucket.take(1000, later);
        assert_eq!(bucket.wait(later), Duration::from_secs(1));
    }

    #[test]
    fn what_is_owed_is_owed_at_the_new_speed() {
        let now = Instant::now();
        let mut bucket = Bucket::new(Some(10), now);
        bucket.take(1000, now);
        assert_eq!(bucket.wait(now), Duration::from_secs(100));
        bucket.set_limit(Some(1000), now);
        let seconds = bucket.wait(now).as_secs_f64();
        assert!((0.99..1.01).contains(&seconds), "{seconds}");
        bucket.set_limit(None, now);
        assert_eq!(bucket.wait(now), Duration::ZERO);
    }

    #[test]
    fn absurd_numbers_do_no_harm() {
        let now = Instant::now();
        let mut bucket = Bucket::new(Some(1), now);
        bucket.take(u64::MAX, now);
        bucket.take(u64::MAX, now);
        bucket.set_limit(Some(u64::MAX), now);
        assert!(bucket.wait(now) < Duration::from_secs(1));
    }
}
