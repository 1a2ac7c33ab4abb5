//! Locks of the active layer's entries.
//!
//! ```text
//!   a page     needed by whoever fills it, or changes several of its entries     excludes all others of the page
//!   a cluster  needed by whoever changes that cluster's entry and no other       excludes the page, and that cluster
//! ```
//!
//! After a snapshot a guest writes to many clusters of few pages, while a thread copies up what it left. With one lock for
//! the page the two would be in each other's way at every seventh write.
//!
//! Lock order: the page, then the cluster.

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;

use crate::cache::PAGE_SHIFT;

const PAGE_LOCKS: usize = 64;
const CLUSTER_LOCKS: usize = 256;

/// A lock for each page and each cluster; pages share them, and so do clusters.
#[derive(Debug)]
pub(super) struct EntryLocks {
    pages: [RwLock<()>; PAGE_LOCKS],
    clusters: [Mutex<()>; CLUSTER_LOCKS],
}

/// As long as this is held nobody else changes the entry of the cluster that was asked for.
#[derive(Debug)]
pub(crate) struct EntryGuard<'locks>(Held<'locks>);

#[derive(Debug)]
enum Held<'locks> {
    /// Nor any other entry of its page.
    Page {
        _page: RwLockWriteGuard<'locks, ()>,
    },
    Cluster {
        _cluster: MutexGuard<'locks, ()>,
        _page: RwLockReadGuard<'locks, ()>,
    },
}

/// Several pages, locked.
pub(crate) struct PageGuards<'locks>(SmallVec<[(usize, EntryGuard<'locks>); 8]>);

impl Default for EntryLocks {
    fn default() -> Self {
        Self {
            pages: std::array::from_fn(|_| RwLock::new(())),
            clusters: std::array::from_fn(|_| Mutex::new(())),
        }
    }
}

impl EntryLocks {
    /// Locks the page of `cluster`.
    pub(super) fn lock_page(&self, cluster: u64) -> EntryGuard<'_> {
        self.lock_page_number(page_number(cluster))
    }

    /// Locks the page of `cluster` if no one has it or one of its clusters locked.
    pub(super) fn try_lock_page(&self, cluster: u64) -> Option<EntryGuard<'_>> {
        let page = self.pages[page_number(cluster)].try_write()?;
        Some(EntryGuard(Held::Page { _page: page }))
    }

    fn lock_page_number(&self, number: usize) -> EntryGuard<'_> {
        EntryGuard(Held::Page { _page: self.pages[number].write() })
    }

    /// Locks the pages of `clusters`, each lock once and in order, so that no two callers wait for each other.
    pub(super) fn lock_pages(&self, clusters: impl Iterator<Item = u64>) -> PageGuards<'_> {
        let mut numbers: SmallVec<[usize; 8]> = clusters.map(page_number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        PageGuards(numbers.into_iter().map(|number| (number, self.lock_page_number(number))).collect())
    }

    /// Locks `cluster`.
    pub(super) fn lock_cluster(&self, cluster: u64) -> EntryGuard<'_> {
        let page = self.pages[page_number(cluster)].read();
        let cluster = self.clusters[cluster_number(cluster)].lock();
        EntryGuard(Held::Cluster { _cluster: cluster, _page: page })
    }

    /// Locks `cluster` if no one has it or its page locked.
    pub(super) fn try_lock_cluster(&self, cluster: u64) -> Option<EntryGuard<'_>> {
        let page = self.pages[page_number(cluster)].try_read()?;
        let cluster = self.clusters[cluster_number(cluster)].try_lock()?;
        Some(EntryGuard(Held::Cluster { _cluster: cluster, _page: page }))
    }
}

impl EntryGuard<'_> {
    /// Whether nobody else changes any entry of the page.
    pub(super) fn is_of_page(&self) -> bool {
        matches!(self.0, Held::Page { .. })
    }
}

impl<'locks> PageGuards<'locks> {
    /// The lock of the page of `cluster`.
    ///
    /// # Panics
    /// When that page was not locked.
    pub(crate) fn of(&self, cluster: u64) -> &EntryGuard<'locks> {
        let found = self.0.iter().find(|(held, _)| *held == page_number(cluster));
        &found.expect("the page of each cluster asked for was locked").1
    }
}

fn page_number(cluster: u64) -> usize {
    (cluster >> PAGE_SHIFT) as usize % PAGE_LOCKS
}

fn cluster_number(cluster: u64) -> usize {
    cluster as usize % CLUSTER_LOCKS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_share_a_lock_are_locked_once() {
        let locks = EntryLocks::default();
        let pages = [70, 3, 6, 3, 67, 6].map(|page| page << PAGE_SHIFT);
        let guards = locks.lock_pages(pages.into_iter());
        assert_eq!(guards.0.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [3, 6]);
        let is_free = |page: u64| locks.try_lock_cluster(page << PAGE_SHIFT).is_some();
        assert!(!is_free(3) && is_free(4));
        assert!(std::ptr::eq(guards.of(67 << PAGE_SHIFT), guards.of((3 << PAGE_SHIFT) + 1)));
        drop(guards);
        assert!(is_free(3));
    }

    #[test]
    fn a_cluster_excludes_itself_and_its_page_but_no_other_cluster() {
        let locks = EntryLocks::default();
        let guard = locks.lock_cluster(5);
        assert!(!guard.is_of_page());
        assert!(locks.try_lock_cluster(5).is_none() && locks.pages[0].try_write().is_none());
        let other = locks.try_lock_cluster(6).expect("another cluster");
        drop(guard);
        assert!(locks.pages[0].try_write().is_none(), "the other cluster is locked still");
        drop(other);
        assert!(locks.lock_page(5).is_of_page());
    }
}
