//! Moments at which this machine itself stood still.
//!
//! A virtual machine's host may let it have so much processor time every so often (100 ms where a control group limits it);
//! when that is used up nothing in it runs until the next period. Nobody inside is told: a request that was under way just
//! takes that much longer, whoever serves it. Here a thread for each processor, which only the kernel itself and the host can
//! keep from running, sleeps for a moment again and again, and notes when it overslept.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::watcher;

/// How often is looked.
const STEP: Duration = Duration::from_millis(1);
/// Longer than the kernel keeps a processor to itself.
const SHORTEST: Duration = Duration::from_millis(3);

/// A watch that is kept until [`Stalls::end`].
#[derive(Debug)]
pub struct Stalls {
    stop: Arc<AtomicBool>,
    watchers: Vec<JoinHandle<Vec<Stall>>>,
}

/// From when to when a processor stood still.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    /// The last moment at which it ran.
    pub from: Instant,
    /// When it ran again.
    pub to: Instant,
}

impl Stalls {
    /// Begins to look.
    ///
    /// # Errors
    /// Where this process may not have threads of real-time priority: others could not tell a stall from competition.
    pub fn watch() -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism()?.get();
        let watchers = (0..processors).map(|processor| {
            let stop = Arc::clone(&stop);
            watcher::spawn(processor, move || look(&stop))
        });
        let watchers = watchers.collect::<io::Result<_>>()?;
        Ok(Self { stop, watchers })
    }

    /// What was seen, of all processors.
    ///
    /// # Panics
    /// When a thread that watched has panicked.
    pub fn end(self) -> Vec<Stall> {
        self.stop.store(true, Ordering::Relaxed);
        self.watchers.into_iter().flat_map(|watcher| watcher.join().expect("it only looks")).collect()
    }
}

fn look(stop: &AtomicBool) -> Vec<Stall> {
    let (mut seen, mut last) = (Vec::new(), Instant::now());
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(STEP);
        let now = Instant::now();
        if now - last >= STEP + SHORTEST {
            seen.push(Stall { from: last, to: now });
        }
        last = now;
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn competition_is_no_stall() {
        let Ok(stalls) = Stalls::watch() else { return };
        let processors = std::thread::available_parallelism().unwrap().get();
        let start = Instant::now();
        let busy = || while start.elapsed() < Duration::from_millis(200) {};
        std::thread::scope(|scope| (0..4 * processors).for_each(|_| _ = scope.spawn(busy)));
        // Threads of ordinary priority would have been kept waiting for most of the time.
        let stood: Duration = stalls.end().iter().map(|stall| stall.to - stall.from).sum();
        assert!(stood < Duration::from_millis(100), "{stood:?}");
    }

    #[test]
    fn what_keeps_a_processor_from_a_watcher_is_a_stall() {
        let Ok(stalls) = Stalls::watch() else { return };
        let hog = || {
            watcher::before_all_others(0).unwrap();
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(20) {}
            start
        };
        let start = std::thread::spawn(hog).join().unwrap();
        let seen = stalls.end();
        let within = |stall: &&Stall| stall.from < start + Duration::from_millis(10) && stall.to > start;
        assert!(seen.iter().any(|stall| within(&stall)), "{seen:?}");
    }
}
