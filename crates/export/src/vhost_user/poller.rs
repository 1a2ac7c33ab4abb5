//! When an I/O thread should look again at once, and when it should sleep.
//!
//! Waking a sleeping thread costs a guest an exit and the host two context switches, more than a 4 KiB read
//! from the page cache takes. So after work a thread keeps looking for a while. How long adapts: sleeps that
//! turn out short widen the window, long ones narrow it, and an idle disk costs nothing.
//!
//! Only so many threads of the process look at once that half of the processors stay free: a thread that
//! spins where the guest needs to run makes everything slower.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Threads of this process that are looking right now.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

/// Looks between two glances at the clock.
const LOOKS_PER_GLANCE: u32 = 16;
/// The smallest window worth having.
const WINDOW_MIN: Duration = Duration::from_micros(4);
/// A sleep this many times the widest window is a long one.
const LONG_SLEEP: u32 = 8;

/// One thread's decision, made anew whenever it finds nothing to do.
#[derive(Debug)]
pub(super) struct Poller {
    window_max: Duration,
    window: Duration,
    lookers_max: usize,
    since: Option<Instant>,
    looks: u32,
}

impl Poller {
    /// Looks for at most `window_max` before sleeping; zero means not at all, and so does having one
    /// processor only.
    pub(super) fn new(window_max: Duration, processors: usize) -> Self {
        let lookers_max = processors / 2;
        let window = if lookers_max == 0 { Duration::ZERO } else { window_max };
        Self { window_max: window, window, lookers_max, since: None, looks: 0 }
    }

    /// There was work.
    #[inline]
    pub(super) fn worked(&mut self) {
        if self.since.take().is_some() {
            LOOKING.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// There was nothing to do: whether to look again rather than sleep.
    #[inline]
    pub(super) fn look_again(&mut self) -> bool {
        let Some(since) = self.since else { return self.begin() };
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS_PER_GLANCE) || since.elapsed() < self.window {
            std::hint::spin_loop();
            return true;
        }
        self.worked();
        false
    }

    fn begin(&mut self) -> bool {
        if self.window.is_zero() {
            return false;
        }
        if LOOKING.fetch_add(1, Ordering::Relaxed) >= self.lookers_max {
            LOOKING.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        (self.since, self.looks) = (Some(Instant::now()), 0);
        true
    }

    /// The thread slept for `time` before there was work again.
    pub(super) fn slept(&mut self, time: Duration) {
        if time <= self.window_max {
            self.window = (self.window * 2).clamp(WINDOW_MIN.min(self.window_max), self.window_max);
        } else if time > self.window_max * LONG_SLEEP {
            self.window /= 2;
            if self.window < WINDOW_MIN {
                self.window = Duration::ZERO;
            }
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.worked();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(50);

    #[test]
    fn long_sleeps_end_looking_and_short_ones_bring_it_back() {
        let mut poller = Poller::new(MAX, 64);
        for _ in 0..8 {
            poller.slept(Duration::from_millis(10));
        }
        assert!(!poller.look_again());
        for _ in 0..8 {
            poller.slept(Duration::from_micros(20));
        }
        assert_eq!(poller.window, MAX);
        assert!(poller.look_again());
        poller.worked();
    }

    #[test]
    fn looking_ends_with_the_window() {
        let mut poller = Poller::new(Duration::from_millis(2), 64);
        let start = Instant::now();
        while poller.look_again() {}
        assert!(start.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn one_processor_or_no_window_means_sleeping_at_once() {
        assert!(!Poller::new(MAX, 1).look_again());
        assert!(!Poller::new(Duration::ZERO, 64).look_again());
    }
}
