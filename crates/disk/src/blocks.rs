//! Order between writes of whole blocks and of parts of blocks, for files used around the page cache.
//!
//! A direct write moves whole blocks. To write a part of one, the store reads the block, changes it, and writes it
//! back; a request that wrote the rest of the block meanwhile would be undone. So a partial write runs alone: it
//! stops new whole writes, waits for those under way, and lets them go on when it is done. Guests write whole blocks
//! nearly always, so this costs them two additions on a counter.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct BlockOrder {
    /// Partial writes waiting or running.
    partial: AtomicU32,
    /// Whole writes running.
    whole: AtomicU32,
    one_partial: Mutex<()>,
}

const POLL: Duration = Duration::from_micros(20);

impl BlockOrder {
    /// Begins a write of whole blocks; false while a partial write runs or waits.
    #[must_use]
    pub(crate) fn try_enter(&self) -> bool {
        self.whole.fetch_add(1, Ordering::SeqCst);
        // Either this sees the partial write's count, or the partial write sees this one's.
        if self.partial.load(Ordering::SeqCst) == 0 {
            return true;
        }
        self.leave();
        false
    }

    /// Ends what [`BlockOrder::try_enter`] began.
    pub(crate) fn leave(&self) {
        self.whole.fetch_sub(1, Ordering::SeqCst);
    }

    /// Runs a write of whole blocks.
    pub(crate) fn whole<T>(&self, write: impl FnOnce() -> T) -> T {
        while !self.try_enter() {
            std::thread::sleep(POLL);
        }
        let written = write();
        self.leave();
        written
    }

    /// Runs a write of parts of blocks, alone.
    pub(crate) fn partial<T>(&self, write: impl FnOnce() -> T) -> T {
        self.partial.fetch_add(1, Ordering::SeqCst);
        let one = self.one_partial.lock();
        while self.whole.load(Ordering::SeqCst) != 0 {
            std::thread::sleep(POLL);
        }
        let written = write();
        drop(one);
        self.partial.fetch_sub(1, Ordering::SeqCst);
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_partial_write_runs_alone() {
        let order = BlockOrder::default();
        let (inside, alone) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        order.whole(|| {
                            inside.fetch_add(1, Ordering::SeqCst);
                            assert!(!alone.load(Ordering::SeqCst), "a whole write met a partial one");
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..200 {
                    order.partial(|| {
                        alone.store(true, Ordering::SeqCst);
                        assert_eq!(inside.load(Ordering::SeqCst), 0, "a partial write met a whole one");
                        alone.store(false, Ordering::SeqCst);
                    });
                }
            });
        });
        assert!(order.try_enter());
    }
}
