//! Flushing the file that is written: one at a time, and never again after a failure.
//!
//! A kernel reports a failed write-back once, to one caller, and then takes the lost pages for clean: the next flush
//! succeeds. The allocator and commits flush the same file, so the next caller after a failure must get it, too.

use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use vmstrata_store::Store;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Flusher {
    store: Arc<dyn Store>,
    /// A leaf lock, held during a flush by [`Flusher::flush`].
    state: Mutex<State>,
    /// Signalled when a claim ends.
    ended: Condvar,
}

#[derive(Debug)]
enum State {
    Idle,
    /// A queue's ring flushes: [`FlushClaim`].
    Claimed,
    /// Why the first flush that failed did.
    Failed(String),
}

impl Flusher {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, state: Mutex::new(State::Idle), ended: Condvar::new() }
    }

    /// Returns once everything written before the call is on stable storage. A flush that is claimed ends first: if that
    /// fails, this one must, too.
    ///
    /// # Errors
    /// The host's failure; after it, every call fails.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.flush_by(|store| store.flush())
    }

    /// As [`Flusher::flush`], by other means.
    pub(crate) fn flush_by(&self, flush: impl FnOnce(&dyn Store) -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state.lock();
        self.ended.wait_while(&mut state, |state| matches!(state, State::Claimed));
        if let State::Failed(why) = &*state {
            return Err(io::Error::other(format!("an earlier flush of this file failed: {why}")));
        }
        let flushed = flush(&*self.store);
        if let Err(error) = &flushed {
            *state = State::Failed(error.to_string());
        }
        flushed
    }

    /// Leaves the next flush to the caller; `None` while another one is under way, and after a failure. Never waits.
    ///
    /// Who flushes otherwise waits for the claim's end, so its owner must not.
    pub(crate) fn try_claim(self: &Arc<Self>) -> Option<FlushClaim> {
        let mut state = self.state.try_lock()?;
        matches!(*state, State::Idle).then(|| {
            *state = State::Claimed;
            let result = Err(io::Error::other("its end was not seen"));
            FlushClaim { flusher: Arc::clone(self), result }
        })
    }

    /// Whether a flush is claimed, and so may have to be waited for by the thread that ends it.
    pub(crate) fn is_claimed(&self) -> bool {
        self.state.try_lock().is_some_and(|state| matches!(*state, State::Claimed))
    }

    /// Nothing more is known of what the file holds: no flush may succeed any more.
    pub(crate) fn give_up(&self) {
        *self.state.lock() = State::Failed("what the file holds is unknown".to_owned());
    }

    /// Whether flushes fail from now on.
    pub(crate) fn has_failed(&self) -> bool {
        matches!(*self.state.lock(), State::Failed(_))
    }
}

/// The right to flush a file, by other means than its [`Flusher`].
#[derive(Debug)]
pub(crate) struct FlushClaim {
    flusher: Arc<Flusher>,
    result: io::Result<()>,
}

impl FlushClaim {
    /// Tells how the flush ended.
    pub(crate) fn end(mut self, result: io::Result<()>) {
        self.result = result;
    }
}

impl Drop for FlushClaim {
    fn drop(&mut self) {
        let mut state = self.flusher.state.lock();
        if matches!(*state, State::Claimed) {
            *state = match &self.result {
                Ok(()) => State::Idle,
                Err(error) => State::Failed(error.to_string()),
            };
        }
        self.flusher.ended.notify_all();
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

    #[test]
    fn who_flushes_waits_for_a_claim_and_shares_its_failure() {
        let plan = FaultPlan::new();
        let store = FaultStore::new(Arc::new(MemoryStore::new()), &plan, StoreId(0));
        let flusher = Arc::new(Flusher::new(Arc::new(store)));
        let flushes = || plan.count(Some(OperationKind::Flush));
        let end_while_another_flushes = |result: io::Result<()>| {
            let claim = flusher.try_claim().unwrap();
            assert!(flusher.is_claimed() && flusher.try_claim().is_none());
            std::thread::scope(|scope| {
                let other = scope.spawn(|| flusher.flush());
                let before = flushes();
                claim.end(result);
                (before, other.join().unwrap())
            })
        };
        let (before, flushed) = end_while_another_flushes(Ok(()));
        assert!(flushed.is_ok() && (before, flushes()) == (0, 1), "flushed beside the claim");
        let (_, flushed) = end_while_another_flushes(Err(io::Error::from_raw_os_error(5)));
        let error = flushed.unwrap_err().to_string();
        assert!(error.contains("os error 5") && flushes() == 1, "{error}");
        assert!(flusher.has_failed() && flusher.try_claim().is_none());
    }

    #[test]
    fn a_claim_that_is_lost_is_a_failed_flush() {
        let flusher = Arc::new(Flusher::new(Arc::new(MemoryStore::new())));
        drop(flusher.try_claim().unwrap());
        assert!(flusher.has_failed() && flusher.flush().is_err());
    }
}
