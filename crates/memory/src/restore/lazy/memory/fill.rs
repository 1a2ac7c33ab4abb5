//! Reading in the background what was not asked for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{LazyMemory, Left};
use crate::address::PAGE_BYTES;

/// For how long the background steps aside for a page that is waited for.
const ASIDE_MAX: Duration = Duration::from_millis(20);

impl LazyMemory {
    /// Reads what is left, in order, giving way to readers that wait for a page, until `stop`; at most `rate` bytes a second.
    /// `progress` gets what is left. Pages that cannot be read are left; true when none is.
    pub fn fill(&self, rate: Option<u64>, stop: &AtomicBool, mut progress: impl FnMut(Left)) -> bool {
        let (start, before) = (Instant::now(), self.left().pages);
        for &page in &self.order {
            if stop.load(Ordering::Relaxed) {
                return false;
            }
            if self.is_here(page) {
                continue;
            }
            self.step_aside();
            let gone = self.fetch(page, Duration::ZERO).is_err();
            let left = self.left();
            if !gone {
                progress(left);
            }
            let read = before.saturating_sub(left.pages) * PAGE_BYTES as u64;
            let due = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(read as f64 / rate as f64));
            sleep_until(start + due, stop);
        }
        self.let_go()
    }

    /// Lets sources go when they are not needed any more.
    fn let_go(&self) -> bool {
        let done = self.left.load(Ordering::Acquire) == 0;
        if done {
            self.sources.write().clear();
        }
        done
    }

    fn step_aside(&self) {
        let until = Instant::now() + ASIDE_MAX;
        while self.waiting.load(Ordering::Relaxed) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn sleep_until(until: Instant, stop: &AtomicBool) {
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        && !stop.load(Ordering::Relaxed)
    {
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}
