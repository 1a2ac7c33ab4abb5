//! How much a move still has to copy, and how fast: with a deadline no faster than it must, so that its guest notices as little of it as can be.

use std::time::{Duration, Instant};

/// When a move is to be over.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    began: Instant,
    time: Duration,
}

impl Schedule {
    /// The move begins now, and is over after `time`.
    pub fn new(time: Duration, now: Instant) -> Self {
        Self { began: now, time }
    }

    /// For how long the next bytes may wait; zero where the move is behind. `done` and `left` are bytes. The last tenth of the time is
    /// kept for what is not foreseen.
    pub fn may_wait(&self, done: u64, left: u64, now: Instant) -> Duration {
        let time = self.time.as_secs_f64() * 0.9;
        let planned = done as f64 / (done + left).max(1) as f64 * time;
        let early = planned - now.saturating_duration_since(self.began).as_secs_f64();
        if left == 0 { Duration::ZERO } else { Duration::from_secs_f64(early.max(0.0)) }
    }

    /// How much later than asked for the move is over, at the rate so far; `None` where it is in time, or has hardly begun.
    pub fn late_by(&self, done: u64, left: u64, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.began);
        let is_known = passed >= self.time.mul_f64(0.1) && done > 0;
        let all = passed.as_secs_f64() * (done + left) as f64 / done.max(1) as f64;
        let late = all - self.time.as_secs_f64();
        (is_known && late > 0.0).then(|| Duration::from_secs_f64(late.min(3e9)))
    }
}

/// What a guest writes while its disk is copied.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growth {
    /// Bytes that were copied when what takes the writes was frozen last, and those that it has had since then.
    copied: u64,
    active: u64,
}

impl Growth {
    /// Of a small part of a copy it says little.
    const COPIED_MIN: u64 = 64 << 20;

    /// From now on.
    pub(crate) fn since(copied: u64, active: u64) -> Self {
        Self { copied, active }
    }

    /// Bytes that will be copied until the end, if the guest goes on so. `left` are those of frozen layers. What takes the writes, with
    /// `active` bytes, is frozen after that if it has more than `rest`, and again while it has less than half of what it had `before`.
    pub(crate) fn foreseen(self, copied: u64, left: u64, active: u64, rest: u64, before: Option<u64>) -> u64 {
        let written = active.saturating_sub(self.active) as f64;
        let rate = written / copied.saturating_sub(self.copied).max(Self::COPIED_MIN) as f64;
        let (mut all, mut before, mut next) = (left, before, active + (left as f64 * rate) as u64);
        while next > rest && before.is_none_or(|before| next < before / 2) {
            all += next;
            before = Some(next);
            next = (next as f64 * rate) as u64;
        }
        all + next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_the_guest_writes_meanwhile_is_foreseen() {
        let rest = 64 * MIB;
        let since = Growth::since(0, 0);
        // A fifth is copied. The guest writes three bytes while five are copied: 600 MiB, which is not halved, and is left at the switch.
        assert_eq!(since.foreseen(200 * MIB, 800 * MIB, 120 * MIB, rest, None), (800 + 600 + 360) * MIB);
        // One byte of five: 200 MiB are frozen, and 40 MiB are left.
        assert_eq!(since.foreseen(200 * MIB, 800 * MIB, 40 * MIB, rest, None), (800 + 200 + 40) * MIB);
        assert_eq!(since.foreseen(200 * MIB, 800 * MIB, 40 * MIB, rest, Some(300 * MIB)), (800 + 200) * MIB);
        // Nothing was copied yet: all of it is in what takes the writes.
        assert_eq!(Growth::since(0, 1000 * MIB).foreseen(0, 0, 1000 * MIB, rest, None), 1000 * MIB);
    }

    #[test]
    fn a_move_that_is_ahead_waits_and_ends_in_time() {
        let began = Instant::now();
        let schedule = Schedule::new(Duration::from_secs(100), began);
        let (mut now, mut done) = (began, 0);
        // Each MiB takes a tenth of a second; the guest adds half of that.
        let mut left = 100 * MIB;
        while left > 0 {
            now += schedule.may_wait(done, left, now) + Duration::from_millis(100);
            done += MIB;
            left -= if done % (2 * MIB) == 0 { 0 } else { MIB };
        }
        let took = now - began;
        assert!(took > Duration::from_secs(80) && took < Duration::from_secs(100), "{took:?}");
    }

    #[test]
    fn a_move_that_is_behind_waits_for_nothing_and_says_so() {
        let began = Instant::now();
        let schedule = Schedule::new(Duration::from_secs(100), began);
        let now = began + Duration::from_secs(20);
        assert_eq!(schedule.may_wait(10 * MIB, 90 * MIB, now), Duration::ZERO);
        assert_eq!(schedule.late_by(10 * MIB, 90 * MIB, now), Some(Duration::from_secs(100)));
        assert_eq!(schedule.late_by(30 * MIB, 70 * MIB, now), None);
        assert_eq!(
            schedule.late_by(MIB, 99 * MIB, began + Duration::from_secs(1)),
            None,
            "nothing is known yet"
        );
    }
}
