//! The observer and the limits of a disk's requests, and what its flushes wait for.
//!
//! Each request of a guest passes an [`crate::IoQueue`], which shows it to the disk's [`IoObserver`] when it is pushed and when
//! it has ended. Queues find the observer, and the limits, in the disk's [`Hooks`]. Without either, a queue compares one number
//! per push and per reap.
//!
//! A flush that has brought everything to this host's stable storage shows that to the disk's [`Durability`], which may have it wait in
//! its slot until the bytes are somewhere else, too. No thread waits with it.
//!
//! Statistics are no observer: what they keep of a request travels in its slot, and a call would cost more than that. Limits
//! are none either: they hold requests back, which an observer cannot.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vmstrata_types::GuestRange;

use crate::error::Result;
use crate::request::Op;
use crate::throttle::Throttle;

/// Sees the requests of a disk, on the threads of its queues: what it does takes their time.
pub trait IoObserver: Debug + Send + Sync {
    /// A request was pushed. It may wait before it is carried out, and may turn out to make no sense for the disk.
    fn begin(&self, op: Op, range: GuestRange);

    /// A request has ended. A write that the disk found to be zeros ends as [`Op::WriteZeroes`].
    fn end(&self, op: Op, range: GuestRange, result: &Result<()>);
}

/// What ends a flush that waits.
pub type WhenDurable = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Where the bytes of a disk must be, beside this host, before a flush completes.
pub trait Durability: Debug + Send + Sync {
    /// A flush, or a write with FUA, is complete on this host. Gives `then` back if that is enough, or calls it, once, when it may
    /// complete; one that is never called leaves the request unanswered until its queue is dropped. Is called on the threads of queues: waits for nothing.
    fn hold(&self, then: WhenDurable) -> Option<WhenDurable>;
}

/// What queues look at with each request, which may be changed while they run.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    /// Grows with each change.
    version: AtomicU64,
    current: Mutex<Hooked>,
}

/// The observer, the limits and so on, if there are any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hooked {
    pub(crate) observer: Option<Arc<dyn IoObserver>>,
    pub(crate) throttle: Option<Arc<Throttle>>,
    pub(crate) durability: Option<Arc<dyn Durability>>,
}

impl Hooks {
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// All of them, with their version or an earlier one: a queue then looks once more.
    pub(crate) fn get(&self) -> (u64, Hooked) {
        let version = self.version();
        (version, self.current.lock().clone())
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Hooked)) {
        change(&mut self.current.lock());
        self.version.fetch_add(1, Ordering::Release);
    }
}
