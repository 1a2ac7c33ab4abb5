//! Flushing the file that is written: one at a time, and never again after a failure.
//!
//! A kernel reports a failed write-back once, to one caller, and then takes the lost pages for clean: the next flush
//! succeeds. The allocator and commits flush the same file, so the next caller after a failure must get it, too.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_store::Store;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Flusher {
    store: Arc<dyn Store>,
    /// A leaf lock, held during the flush.
    failed: Mutex<bool>,
}

impl Flusher {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, failed: Mutex::new(false) }
    }

    /// Returns once everything written before the call is on stable storage.
    ///
    /// # Errors
    /// The host's failure; after it, every call fails.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let mut failed = self.failed.lock();
        if *failed {
            return Err(io::Error::other("an earlier flush of this file failed"));
        }
        let flushed = self.store.flush();
        *failed = flushed.is_err();
        flushed
    }

    /// Nothing more is known of what the file holds: no flush may succeed any more.
    pub(crate) fn give_up(&self) {
        *self.failed.lock() = true;
    }

    /// Whether flushes fail from now on.
    pub(crate) fn has_failed(&self) -> bool {
        *self.failed.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmstrata_store::{FaultPlan, FaultStore, MemoryStore, OperationKind, StoreId};

    #[test]
    fn a_flush_after_a_failed_one_does_not_succeed() {
        let plan = FaultPlan::new();
        plan.fail_nth(Some(OperationKind::Flush), 1, 5);
        let flusher =
            Flusher::new(Arc::new(FaultStore::new(Arc::new(MemoryStore::new()), &plan, StoreId(0))));
        flusher.flush().unwrap();
        assert!(!flusher.has_failed());
        assert_eq!(flusher.flush().unwrap_err().raw_os_error(), Some(5));
        assert!(flusher.flush().is_err() && flusher.has_failed());
        assert_eq!(plan.count(Some(OperationKind::Flush)), 2, "a lost cause was flushed again");
    }
}
