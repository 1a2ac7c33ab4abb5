//! A guest that works without a break in a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::super::client::Client;
use super::super::load::{Access, Load, Watch};
use super::BLOCK;
use super::trace::Trace;

const DEPTH: usize = 8;
/// Who writes, when data is looked at.
const ROUND: u16 = u16::MAX;
/// The longest that a guest works.
const TIME_MAX: Duration = Duration::from_secs(600);

/// Requests that memory is set aside for before the first: growing would hold up the guest that is measured. What is not
/// needed is never touched.
const REQUESTS: usize = 1 << 27;

/// The most by which a second differs from the one before it, as a share of that, if both are taken to be alike.
const UNEVEN_MAX: f64 = 0.03;
/// Seconds to look at in vain: a machine may be busy with something else for long.
const COUNTS_MAX: usize = 20;

/// A guest at work.
pub(super) struct Guest {
    thread: JoinHandle<Result<(Client, Trace)>>,
    stop: Arc<AtomicBool>,
    /// Requests so far.
    completed: Arc<AtomicU64>,
    /// Times of the trace count from here.
    epoch: Instant,
}

impl Guest {
    /// Starts 4 KiB random writes at queue depth 8 to the first `span` bytes of the disk.
    pub(super) fn start(client: Client, span: u64) -> Self {
        Self::start_with(client, Access::RandomWrite { round: ROUND }, span)
    }

    /// Starts 4 KiB reads and writes in turn at queue depth 8: reads of the first `span` bytes, writes to the first `within`.
    pub(super) fn start_mixed(client: Client, span: u64, within: u64) -> Self {
        Self::start_with(client, Access::ReadWrite { round: ROUND, within }, span)
    }

    fn start_with(mut client: Client, access: Access, span: u64) -> Self {
        let (stop, completed, epoch) = (Arc::default(), Arc::default(), Instant::now());
        let mut recorder = Recorder {
            stop: Arc::clone(&stop),
            completed: Arc::clone(&completed),
            epoch,
            started: [Duration::ZERO; DEPTH],
            trace: Trace::with_capacity(REQUESTS),
        };
        let load = Load { access, block: BLOCK, depth: DEPTH, time: TIME_MAX, seed: 5 };
        let thread = std::thread::spawn(move || {
            client.run_watched(&load, span, &mut recorder)?;
            Ok((client, recorder.trace))
        });
        Self { thread, stop, completed, epoch }
    }

    /// Time since the guest began.
    pub(super) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Requests completed so far.
    fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Waits until as many requests have been completed in the last `second` as in the one before, nearly; not for ever.
    pub(super) fn wait_until_even(&self, second: Duration) {
        let mut before = self.completed();
        until_even(|| {
            std::thread::sleep(second);
            let now = self.completed();
            now - std::mem::replace(&mut before, now)
        });
    }

    /// Of another clock's moment; what was before the guest is its beginning.
    pub(super) fn time_of(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.epoch)
    }

    /// Ends the work.
    ///
    /// # Errors
    /// When one of the requests failed.
    pub(super) fn stop(self) -> Result<(Client, Trace)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the guest panicked"))?
    }
}

/// Counts until two counts in a row differ by little, or there were [`COUNTS_MAX`].
fn until_even(mut count: impl FnMut() -> u64) {
    let mut last = count();
    for _ in 1..COUNTS_MAX {
        let next = count();
        let is_even = (next as f64 / last as f64 - 1.0).abs() <= UNEVEN_MAX;
        if is_even {
            break;
        }
        last = next;
    }
}

struct Recorder {
    stop: Arc<AtomicBool>,
    completed: Arc<AtomicU64>,
    epoch: Instant,
    started: [Duration; DEPTH],
    trace: Trace,
}

impl Watch for Recorder {
    fn started(&mut self, slot: usize) {
        self.started[slot] = self.epoch.elapsed();
    }

    fn completed(&mut self, slot: usize) {
        self.trace.push(self.started[slot], self.epoch.elapsed());
        self.completed.store(self.trace.len() as u64, Ordering::Relaxed);
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_until_two_are_nearly_equal() {
        let looked_at = |counts: &[u64]| {
            let mut left = counts.iter();
            until_even(|| *left.next().unwrap());
            counts.len() - left.len()
        };
        assert_eq!(looked_at(&[100, 102, 0]), 2);
        assert_eq!(looked_at(&[100, 104, 90, 92, 0]), 4);
        let uneven: Vec<u64> = (0..30).map(|index| 100 + index % 2 * 10).collect();
        assert_eq!(looked_at(&uneven), COUNTS_MAX);
    }

    #[test]
    fn a_guest_writes_until_it_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let target = super::super::super::client::Target::RawFile(path);
        let guest = Guest::start(Client::connect(&target, 1, false).unwrap(), 1 << 19);
        std::thread::sleep(Duration::from_millis(20));
        let (now, completed) = (guest.now(), guest.completed());
        assert!(completed > 0);
        let (mut client, trace) = guest.stop().unwrap();
        assert!(trace.completed(Duration::ZERO, now) > 0);
        let writer = crate::chain::pattern::Writer::client(ROUND);
        assert!(client.check(1 << 19, BLOCK, &|_| None).is_ok(), "past the span nothing is written");
        let blocks = (0..1 << 19).step_by(BLOCK);
        assert!(blocks.into_iter().any(|at| client.check(at, BLOCK, &|_| Some(writer)).is_ok()));
    }
}
