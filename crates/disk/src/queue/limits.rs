//! Requests that wait for the limits of their disk.
//!
//! They wait in order, reads and writes apart, before they are started: no thread and no lock of the disk is held. The queue's
//! sleep ends when the first may go on, or when the limits change.

use std::time::Instant;

use super::IoQueue;
use crate::request::Request;
use crate::stats::Begun;
use crate::throttle::Direction;

/// A request that waits.
#[derive(Debug)]
pub(super) struct Throttled {
    request: Request,
    begun: Begun,
    since: Instant,
}

impl IoQueue {
    /// Starts a request of a disk with limits, unless it has to wait.
    #[cold]
    pub(super) fn push_limited(&mut self, request: Request) {
        let now = Instant::now();
        let direction = Direction::from(request.op);
        if self.throttled[direction as usize].is_empty() {
            match self.admit(&request, now) {
                Ok(()) => return self.start(request),
                Err(until) => self.wake_by(until),
            }
        }
        self.stats.counters().throttled();
        let throttled = Throttled { request, begun: self.begun, since: now };
        self.throttled[direction as usize].push_back(throttled);
    }

    fn admit(&self, request: &Request, now: Instant) -> Result<(), Instant> {
        self.throttle.as_ref().map_or(Ok(()), |throttle| throttle.admit(request, now))
    }

    fn wake_by(&mut self, until: Instant) {
        self.throttled_until = Some(self.throttled_until.map_or(until, |first| first.min(until)));
    }

    /// Starts the requests that need not wait any more.
    #[cold]
    pub(super) fn start_throttled(&mut self) {
        let now = Instant::now();
        self.throttled_until = None;
        for direction in [Direction::Read, Direction::Write] {
            while let Some(first) = self.throttled[direction as usize].front() {
                if let Err(until) = self.admit(&first.request, now) {
                    self.wake_by(until);
                    break;
                }
                let first = self.throttled[direction as usize].pop_front();
                let Throttled { request, begun, since } = first.expect("it is in front");
                self.stats.counters().waited(now.saturating_duration_since(since));
                self.begun = begun;
                self.start(request);
            }
        }
        self.submit();
    }

    /// Starts all requests that wait for the disk's limits, as a guest that stops waits for them.
    pub fn start_all_throttled(&mut self) {
        let throttle = self.throttle.take();
        self.start_throttled();
        self.throttle = throttle;
    }

    /// Requests that wait.
    pub(super) fn throttled(&self) -> usize {
        self.throttled[0].len() + self.throttled[1].len()
    }
}
