//! A guest that works without a break in a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// A guest at work.
pub(super) struct Guest {
    thread: JoinHandle<Result<(Client, Trace)>>,
    stop: Arc<AtomicBool>,
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
        let (stop, epoch) = (Arc::default(), Instant::now());
        let mut recorder = Recorder {
            stop: Arc::clone(&stop),
            epoch,
            started: [Duration::ZERO; DEPTH],
            trace: Trace::with_capacity(REQUESTS),
        };
        let load = Load { access, fua: false, block: BLOCK, depth: DEPTH, time: TIME_MAX, seed: 5 };
        let thread = std::thread::spawn(move || {
            client.run_watched(&load, span, &mut recorder)?;
            Ok((client, recorder.trace))
        });
        Self { thread, stop, epoch }
    }

    /// Time since the guest began.
    pub(super) fn now(&self) -> Duration {
        self.epoch.elapsed()
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

struct Recorder {
    stop: Arc<AtomicBool>,
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
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_writes_until_it_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let target = super::super::super::client::Target::RawFile(path);
        let guest = Guest::start(Client::connect(&target, 1, false).unwrap(), 1 << 19);
        let (mut client, trace) = guest.stop().unwrap();
        assert!(trace.completed(Duration::ZERO, TIME_MAX) >= DEPTH);
        let writer = crate::chain::pattern::Writer::client(ROUND);
        assert!(client.check(1 << 19, BLOCK, &|_| None).is_ok(), "past the span nothing is written");
        let blocks = (0..1 << 19).step_by(BLOCK);
        assert!(blocks.into_iter().any(|at| client.check(at, BLOCK, &|_| Some(writer)).is_ok()));
    }
}
