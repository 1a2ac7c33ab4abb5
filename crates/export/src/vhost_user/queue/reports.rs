//! How many failures of requests are logged: a guest can bring about any number of them.

use std::time::{Duration, Instant};

/// Failures of a queue that are logged in each period.
const REPORTED_MAX: u32 = 10;
const PERIOD: Duration = Duration::from_secs(60);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Reports {
    since: Instant,
    made: u32,
}

/// What to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    Log,
    /// And say that others are not, for a while.
    LogLast,
    Skip,
}

impl Reports {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, made: 0 }
    }

    /// A request failed.
    pub(super) fn failed(&mut self, now: Instant) -> Report {
        if now.duration_since(self.since) >= PERIOD {
            *self = Self::new(now);
        }
        self.made = self.made.saturating_add(1);
        match self.made {
            ..REPORTED_MAX => Report::Log,
            REPORTED_MAX => Report::LogLast,
            _ => Report::Skip,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_fills_no_log_with_its_failures() {
        let mut now = Instant::now();
        let mut reports = Reports::new(now);
        for _ in 0..3 {
            let made: Vec<Report> = (0..1000).map(|_| reports.failed(now)).collect();
            assert!(made[..9].iter().all(|report| *report == Report::Log));
            assert_eq!(made[9], Report::LogLast);
            assert!(made[10..].iter().all(|report| *report == Report::Skip));
            now += PERIOD;
        }
    }
}
