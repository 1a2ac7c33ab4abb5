//! The counters of all queues of a disk, and a queue's share in them.

use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::{Counters, DiskStats, Kind, TIMED_EVERY};
use crate::request::Op;

/// Everything that counts for one disk.
#[derive(Debug, Default)]
pub(crate) struct StatsSet {
    pub(super) queues: Mutex<Queues>,
    workers: Counters,
}

#[derive(Debug, Default)]
pub(super) struct Queues {
    pub(super) live: Vec<Weak<Counters>>,
    retired: DiskStats,
}

impl StatsSet {
    /// Counters for a queue, which ends with what is returned.
    pub(crate) fn join(self: &Arc<Self>) -> QueueStats {
        let counters = Arc::new(Counters::default());
        self.queues.lock().live.push(Arc::downgrade(&counters));
        QueueStats { counters, set: Arc::clone(self), until_timed: 0 }
    }

    /// The sums over all queues there are and were, and the workers.
    pub(crate) fn sum(&self) -> DiskStats {
        let queues = self.queues.lock();
        let mut sum = queues.retired.clone();
        for counters in queues.live.iter().filter_map(Weak::upgrade) {
            counters.add_to(&mut sum);
        }
        self.workers.add_to(&mut sum);
        sum
    }

    /// A worker's read took `len` bytes from the layer `depth` below the active one, or found nothing in any.
    pub(crate) fn worker_read(&self, depth: Option<u16>, len: u64) {
        self.workers.worker_read(depth, len);
    }
}

/// A queue's share in the counting.
#[derive(Debug)]
pub(crate) struct QueueStats {
    counters: Arc<Counters>,
    set: Arc<StatsSet>,
    until_timed: u8,
}

/// What is known of a request until it ends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Begun {
    kind: Kind,
    len: u64,
    at: Option<Instant>,
}

impl QueueStats {
    /// A request begins.
    #[inline]
    pub(crate) fn begin(&mut self, op: Op, len: u64) -> Begun {
        let kind = Kind::from(op);
        let len = if kind == Kind::Flush { 0 } else { len };
        let at = if kind.is_frequent() && self.until_timed > 0 {
            self.until_timed -= 1;
            None
        } else {
            if kind.is_frequent() {
                self.until_timed = TIMED_EVERY - 1;
            }
            Some(Instant::now())
        };
        Begun { kind, len, at }
    }

    /// A request ends.
    #[inline]
    pub(crate) fn end(&self, begun: Begun, is_ok: bool) {
        self.counters.ended(begun.kind, begun.len, is_ok, begun.at);
    }

    /// The counters, for what is counted on the way.
    #[inline]
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }
}

impl Drop for QueueStats {
    fn drop(&mut self) {
        let mut queues = self.set.queues.lock();
        let Queues { live, retired } = &mut *queues;
        self.counters.add_to(retired);
        let own = Arc::as_ptr(&self.counters);
        live.retain(|counters| !std::ptr::eq(counters.as_ptr(), own));
    }
}
