//! Locks of the pages of the active layer's entries.

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::cache::PAGE_SHIFT;

const LOCKS: usize = 64;

/// A lock for each page; pages share them.
#[derive(Debug)]
pub(super) struct PageLocks([Mutex<()>; LOCKS]);

/// Several pages, locked.
pub(crate) struct PageGuards<'locks>(SmallVec<[(usize, MutexGuard<'locks, ()>); 8]>);

impl Default for PageLocks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::new(())))
    }
}

impl PageLocks {
    /// Locks the page of `cluster`.
    pub(super) fn lock(&self, cluster: u64) -> MutexGuard<'_, ()> {
        self.0[number(cluster)].lock()
    }

    /// Locks the page of `cluster` if no one has.
    pub(super) fn try_lock(&self, cluster: u64) -> Option<MutexGuard<'_, ()>> {
        self.0[number(cluster)].try_lock()
    }

    /// Locks the pages of `clusters`, each lock once and in order, so that no two callers wait for each other.
    pub(super) fn lock_all(&self, clusters: impl Iterator<Item = u64>) -> PageGuards<'_> {
        let mut numbers: SmallVec<[usize; 8]> = clusters.map(number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        PageGuards(numbers.into_iter().map(|number| (number, self.0[number].lock())).collect())
    }
}

impl<'locks> PageGuards<'locks> {
    /// The lock of the page of `cluster`.
    ///
    /// # Panics
    /// When that page was not locked.
    pub(crate) fn of(&self, cluster: u64) -> &MutexGuard<'locks, ()> {
        let found = self.0.iter().find(|(held, _)| *held == number(cluster));
        &found.expect("the page of each cluster asked for was locked").1
    }
}

fn number(cluster: u64) -> usize {
    (cluster >> PAGE_SHIFT) as usize % LOCKS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_share_a_lock_are_locked_once() {
        let locks = PageLocks::default();
        let pages = [70, 3, 6, 3, 67, 6].map(|page| page << PAGE_SHIFT);
        let guards = locks.lock_all(pages.into_iter());
        assert_eq!(guards.0.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [3, 6]);
        assert!(locks.0[3].try_lock().is_none() && locks.0[4].try_lock().is_some());
        assert!(std::ptr::eq(guards.of(67 << PAGE_SHIFT), guards.of((3 << PAGE_SHIFT) + 1)));
        drop(guards);
        assert!(locks.0[3].try_lock().is_some());
    }
}
