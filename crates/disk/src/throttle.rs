//! Limits of a disk: operations and bytes a second, as QEMU's `throttle` has them.
//!
//! Each limit is a leaky bucket, shared by the disk's queues. A request fills it, and it leaks at the limit's rate. While it is
//! full, requests wait in their queues; one that begins may overfill it, so none is too large. All limits hold at once.
//!
//! Beside its limits a disk has a [`Pace`] for its writes, which changes with what becomes of them: one more bucket, or a stop.
//!
//! Reads and prefetches count as reads; writes, discards and zeroing as writes. Discards and zeroing move no bytes, so they
//! count as operations only (unlike in QEMU). A flush counts as nothing.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::request::{Op, Request};

/// How much a second, and in bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Operations or bytes a second.
    rate: u64,
    burst: Option<Burst>,
}

/// What is let through before the rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Burst {
    /// Operations or bytes a second.
    max: u64,
    /// For so many seconds.
    seconds: u64,
}

/// Why numbers are no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// It lets nothing through, or is out of bounds.
    #[error("a limit is 1 to {} a second", Limit::RATE_MAX)]
    Rate,
    /// The burst is slower than what is allowed all the time.
    #[error("'max' is the rate of bursts: it is not below the limit, nor above {}", Limit::RATE_MAX)]
    Max,
    /// No burst, or one that does not end.
    #[error(
        "'max-length' is how many seconds a burst lasts: 1 to {}, and with 'max' only",
        Limit::SECONDS_MAX
    )]
    Length,
}

impl Limit {
    /// The highest rate (as in QEMU).
    pub const RATE_MAX: u64 = 1_000_000_000_000_000;
    /// The longest burst: a day.
    pub const SECONDS_MAX: u64 = 86_400;

    /// A limit of `rate` a second; after a while with less, of `max` for `seconds` (1 if not said).
    ///
    /// # Errors
    /// Numbers that make no sense.
    pub fn new(rate: u64, max: Option<u64>, seconds: Option<u64>) -> Result<Self, LimitError> {
        if !(1..=Self::RATE_MAX).contains(&rate) {
            return Err(LimitError::Rate);
        }
        if max.is_some_and(|max| !(rate..=Self::RATE_MAX).contains(&max)) {
            return Err(LimitError::Max);
        }
        let is_length = |seconds| max.is_some() && (1..=Self::SECONDS_MAX).contains(&seconds);
        if !seconds.is_none_or(is_length) {
            return Err(LimitError::Length);
        }
        Ok(Self { rate, burst: max.map(|max| Burst { max, seconds: seconds.unwrap_or(1) }) })
    }

    /// What [`Limit::new`] was given.
    pub fn parts(self) -> (u64, Option<u64>, Option<u64>) {
        let seconds = self.burst.map(|burst| burst.seconds).filter(|seconds| *seconds > 1);
        (self.rate, self.burst.map(|burst| burst.max), seconds)
    }
}

/// The limits of a disk, by what they count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Operations of any kind.
    pub iops_total: Option<Limit>,
    /// Reads.
    pub iops_read: Option<Limit>,
    /// Writes.
    pub iops_write: Option<Limit>,
    /// Bytes read and written.
    pub bps_total: Option<Limit>,
    /// Bytes read.
    pub bps_read: Option<Limit>,
    /// Bytes written.
    pub bps_write: Option<Limit>,
}

/// How fast a disk takes writes, within its limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// As fast as it can.
    #[default]
    Free,
    /// So many bytes a second; 0 is taken for 1.
    BytesPerSecond(u64),
    /// Writes, discards and zeroing wait, until the pace is another.
    Stopped,
}

/// Which way a request goes: those of one direction keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read = 0,
    Write = 1,
}

impl From<Op> for Direction {
    fn from(op: Op) -> Self {
        match op {
            Op::Read | Op::Prefetch => Self::Read,
            // A flush comes after the writes that were pushed before it.
            Op::Write { .. } | Op::Flush | Op::Discard | Op::WriteZeroes { .. } => Self::Write,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Operations,
    Bytes,
}

/// See the module documentation.
#[derive(Debug)]
struct Bucket {
    limit: Limit,
    unit: Unit,
    /// Only requests of this direction, or of both.
    direction: Option<Direction>,
    /// Leaks at the rate.
    level: f64,
    /// Leaks at the burst's rate: a long burst is let through evenly, too.
    burst_level: f64,
}

/// What of a second's worth a bucket takes at once, so that a queue need not wake for each request.
const AT_ONCE: f64 = 0.1;

impl Bucket {
    fn leak(&mut self, seconds: f64) {
        self.level = (self.level - self.limit.rate as f64 * seconds).max(0.0);
        let max = self.limit.burst.map_or(0, |burst| burst.max);
        self.burst_level = (self.burst_level - max as f64 * seconds).max(0.0);
    }

    /// Seconds until it lets another request through, 0 or less for none.
    fn wait(&self) -> f64 {
        let rate = self.limit.rate as f64;
        let Some(Burst { max, seconds }) = self.limit.burst else {
            return self.level / rate - AT_ONCE;
        };
        let max = max as f64;
        let wait = (self.level - max * seconds as f64) / rate;
        if seconds > 1 { wait.max(self.burst_level / max - AT_ONCE) } else { wait }
    }

    fn counts(&self, direction: Direction) -> bool {
        self.direction.is_none_or(|only| only == direction)
    }

    fn fill(&mut self, bytes: u64) {
        let amount = match self.unit {
            Unit::Operations => 1.0,
            Unit::Bytes => bytes as f64,
        };
        self.level += amount;
        self.burst_level += amount;
    }
}

/// The limits of a disk and how far they are used up.
#[derive(Debug)]
pub(crate) struct Throttle {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    buckets: Vec<Bucket>,
    pace: Pace,
    /// That of the pace.
    paced: Option<Bucket>,
    leaked_at: Instant,
}

impl State {
    /// Changes the pace. Who waits for it does not wait longer by that.
    fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
        let Pace::BytesPerSecond(rate) = pace else {
            self.paced = None;
            return;
        };
        let limit = Limit { rate: rate.max(1), burst: None };
        let slowed = |bucket: &Bucket| bucket.level * (limit.rate as f64 / bucket.limit.rate as f64).min(1.0);
        let level = self.paced.as_ref().map_or(0.0, slowed);
        let direction = Some(Direction::Write);
        self.paced = Some(Bucket { limit, unit: Unit::Bytes, direction, level, burst_level: 0.0 });
    }
}

impl Throttle {
    /// `None` without any limit.
    pub(crate) fn new(limits: Limits, pace: Pace, now: Instant) -> Option<Self> {
        let (read, write) = (Some(Direction::Read), Some(Direction::Write));
        let Limits { iops_total, iops_read, iops_write, bps_total, bps_read, bps_write } = limits;
        let all = [
            (iops_total, Unit::Operations, None),
            (iops_read, Unit::Operations, read),
            (iops_write, Unit::Operations, write),
            (bps_total, Unit::Bytes, None),
            (bps_read, Unit::Bytes, read),
            (bps_write, Unit::Bytes, write),
        ];
        let bucket = |(limit, unit, direction): (Option<Limit>, _, _)| {
            Some(Bucket { limit: limit?, unit, direction, level: 0.0, burst_level: 0.0 })
        };
        let buckets: Vec<Bucket> = all.into_iter().filter_map(bucket).collect();
        let mut state = State { leaked_at: now, buckets, pace: Pace::Free, paced: None };
        state.set_pace(pace);
        let limits_anything = limits != Limits::default() || pace != Pace::Free;
        limits_anything.then(|| Self { limits, state: Mutex::new(state) })
    }

    /// The pace now.
    pub(crate) fn pace(&self) -> Pace {
        self.state.lock().pace
    }

    /// Changes the pace; the limits stay used up as far as they are.
    pub(crate) fn set_pace(&self, pace: Pace) {
        self.state.lock().set_pace(pace);
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Lets a request through.
    ///
    /// # Errors
    /// It has to wait, until then at least.
    pub(crate) fn admit(&self, request: &Request, now: Instant) -> Result<(), Instant> {
        if request.op == Op::Flush {
            return Ok(());
        }
        let direction = Direction::from(request.op);
        let moves_bytes = request.op.has_buffers() || request.op == Op::Prefetch;
        let bytes = if moves_bytes { request.range.len } else { 0 };
        let mut state = self.state.lock();
        let passed = now.saturating_duration_since(state.leaked_at);
        state.leaked_at = state.leaked_at.max(now);
        let is_stopped = state.pace == Pace::Stopped && direction == Direction::Write;
        let State { buckets, paced, .. } = &mut *state;
        let mut wait = if is_stopped { f64::MAX } else { 0.0 };
        for bucket in buckets.iter_mut().chain(&mut *paced) {
            bucket.leak(passed.as_secs_f64());
            if bucket.counts(direction) {
                wait = wait.max(bucket.wait());
            }
        }
        if wait > 0.0 {
            // Rounded up, else it would ask once too often; bounded, because a clock ends.
            let wait = Duration::from_secs_f64(wait.min(Limit::SECONDS_MAX as f64));
            return Err(now + wait + Duration::from_nanos(1));
        }
        let counting = buckets.iter_mut().chain(paced).filter(|bucket| bucket.counts(direction));
        counting.for_each(|bucket| bucket.fill(bytes));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
