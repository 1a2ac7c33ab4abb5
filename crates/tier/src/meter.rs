//! What is seen of the traffic of a disk with its repository: how much was moved, and for how long it has not answered.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What is known of the traffic with a repository.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Bytes written, and read.
    moved: AtomicU64,
    asked: Mutex<Asked>,
}

#[derive(Debug)]
struct Asked {
    /// Operations under way.
    count: usize,
    /// When one of them ended, or the first began.
    since: Instant,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self { moved: AtomicU64::new(0), asked: Mutex::new(Asked { count: 0, since: Instant::now() }) }
    }

    /// Bytes moved until now.
    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// For how long the repository has answered nothing although it is asked something.
    pub(crate) fn silence(&self) -> Option<Duration> {
        let asked = self.asked.lock();
        (asked.count > 0).then(|| asked.since.elapsed())
    }

    /// Asks the repository something.
    pub(crate) fn ask<T>(&self, ask: impl FnOnce() -> T) -> T {
        struct Ask<'a>(&'a Meter);
        impl Drop for Ask<'_> {
            fn drop(&mut self) {
                let mut asked = self.0.asked.lock();
                (asked.count, asked.since) = (asked.count - 1, Instant::now());
            }
        }
        let mut asked = self.asked.lock();
        if asked.count == 0 {
            asked.since = Instant::now();
        }
        asked.count += 1;
        drop(asked);
        let _ends = Ask(self);
        ask()
    }

    /// Has the repository move so many bytes.
    pub(crate) fn ask_to_move<T, E>(&self, bytes: usize, ask: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let moved = self.ask(ask)?;
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_silent_only_while_it_is_asked_something() {
        let meter = Meter::new();
        assert_eq!(meter.silence(), None);
        meter.ask(|| {
            let first = meter.silence().unwrap();
            // Another answer ends the silence, and this question is open still.
            while meter.silence().unwrap() <= first {}
            let long = meter.silence().unwrap();
            meter.ask(|| ());
            assert!(meter.silence().unwrap() < long);
        });
        assert_eq!(meter.silence(), None);
    }
}
