//! Locks of the active layer's entries.
//!
//! ```text
//!   a page     to fill it, or to change several of its entries      excludes all others of the page
//!   a cluster  to change that cluster's entry and no other          excludes the page, and that cluster
//! ```
//!
//! After a snapshot a guest writes to many clusters of few pages, through several queues: with one lock for the page these would
//! be in each other's way.
//!
//! Lock order: the page, then the cluster.

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::cache::PAGE_SHIFT;

const PAGE_LOCKS: usize = 64;
const CLUSTER_LOCKS: usize = 256;

/// A lock for each page and each cluster; pages share them, and so do clusters.
#[derive(Debug)]
pub(super) struct EntryLocks {
    pages: [RwLock<()>; PAGE_LOCKS],
    clusters: [Mutex<()>; CLUSTER_LOCKS],
}

/// While this is held, no other thread changes the entry of the cluster that it was taken for.
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
        EntryGuard(Held::Page { _page: self.pages[page_number(cluster)].write() })
    }

    /// Locks the page of `cluster` if no one has it or one of its clusters locked.
    pub(super) fn try_lock_page(&self, cluster: u64) -> Option<EntryGuard<'_>> {
        let page = self.pages[page_number(cluster)].try_write()?;
        Some(EntryGuard(Held::Page { _page: page }))
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
    /// Whether it excludes changes of every entry of the page.
    pub(super) fn is_of_page(&self) -> bool {
        matches!(self.0, Held::Page { .. })
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
