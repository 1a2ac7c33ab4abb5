//! What a move sees of its guest's requests: where they are, and how long they take.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_disk::{Disk, IoObserver, Op, Result};
use vmstrata_types::GuestRange;

use crate::follow::Kind;

/// Requests that are kept until the move looks: the last ones.
const KEPT: usize = 256;
/// A request that has not ended while so many others began is not timed to its end: its queue may be gone.
const OTHERS_MAX: u32 = 100_000;

/// How long a request took, in time since the move began.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// What it did.
    pub kind: Kind,
    /// When it was pushed.
    pub began: Duration,
    /// When it had ended.
    pub ended: Duration,
}

/// See the module documentation. One request is timed at a time, the next one after it: whatever a guest does, each costs it a lock that
/// is free, and few of them the clock.
#[derive(Debug)]
pub struct Requests {
    began: Instant,
    /// Bytes of the disk: a guest may ask for others.
    size: u64,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    places: VecDeque<(Kind, GuestRange)>,
    /// The request that is timed, and when it began.
    timing: Option<(Kind, GuestRange, Duration)>,
    /// Requests that began since then.
    others: u32,
    timed: Vec<Timed>,
}

/// The requests of a disk's queues, from [`Observed::begin`] on until this is dropped.
#[derive(Debug)]
pub(crate) struct Observed {
    disk: Arc<Disk>,
    pub(crate) requests: Arc<Requests>,
    has_begun: bool,
}

impl Observed {
    pub(crate) fn of(disk: &Arc<Disk>) -> Self {
        let requests =
            Arc::new(Requests { began: Instant::now(), size: disk.size(), seen: Mutex::default() });
        Self { disk: Arc::clone(disk), requests, has_begun: false }
    }

    /// With the first step of a move.
    pub(crate) fn begin(&mut self) {
        if !self.has_begun {
            self.has_begun = true;
            self.disk.observe(Some(Arc::clone(&self.requests) as Arc<dyn IoObserver>));
        }
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        if self.has_begun {
            self.disk.observe(None);
        }
    }
}

impl Requests {
    /// Time since the move began.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Those that were timed since the last look.
    pub fn take_timed(&self) -> Vec<Timed> {
        std::mem::take(&mut self.seen.lock().timed)
    }

    /// What is looked at of requests.
    fn kind_of(&self, op: Op, range: GuestRange) -> Option<Kind> {
        let kind = match op {
            Op::Read => Kind::Read,
            Op::Write { .. } | Op::WriteZeroes { .. } => Kind::Write,
            Op::Flush | Op::Discard | Op::Prefetch => return None,
        };
        range.start.get().checked_add(range.len).is_some_and(|end| end <= self.size).then_some(kind)
    }

    /// Where the last ones since the last look are.
    pub(crate) fn take_places(&self) -> VecDeque<(Kind, GuestRange)> {
        std::mem::take(&mut self.seen.lock().places)
    }
}

impl IoObserver for Requests {
    fn begin(&self, op: Op, range: GuestRange) {
        let Some(kind) = self.kind_of(op, range) else { return };
        let mut seen = self.seen.lock();
        if seen.places.len() == KEPT {
            seen.places.pop_front();
        }
        seen.places.push_back((kind, range));
        seen.others += 1;
        if (seen.timing.is_none() || seen.others > OTHERS_MAX) && seen.timed.len() < KEPT {
            (seen.timing, seen.others) = (Some((kind, range, self.now())), 0);
        }
    }

    fn end(&self, op: Op, range: GuestRange, _result: &Result<()>) {
        let Some(kind) = self.kind_of(op, range) else { return };
        let mut seen = self.seen.lock();
        if let Some((_, _, began)) = seen.timing.filter(|(timed, at, _)| (*timed, *at) == (kind, range)) {
            seen.timing = None;
            seen.timed.push(Timed { kind, began, ended: self.now() });
        }
    }
}
