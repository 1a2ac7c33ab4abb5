//! The active layer: the one qcow2 file that takes the guest's writes.
//!
//! Its L1 table is in memory, and moves when the disk outgrows it ([`Active::grow_l1`]); pages of its L2 entries are in the
//! metadata cache, as raw words. What the cache and the image say of a cluster, and changes not yet in the image
//! ([`crate::changes`]), are brought together here, so that a lookup sees every change that was published and a page can
//! be evicted at any time.
//!
//! A page's entries are changed under the page's lock or the cluster's ([`locks`]), and a page is filled only under its own.
//! Lookups take none.
//!
//! Lock order: page lock, then cluster lock, then L1 lock, then the allocator's or the changes' lock.

mod backoff;
mod commit;
mod growth;
mod l1;
mod locks;
mod page;
mod publish;
mod recover;
mod refusal;
pub(crate) mod session;
mod space;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use vmstrata_qcow2::{Header, L2Entry};
use vmstrata_store::{FileIdentity, OpenStore, Store};
use vmstrata_types::{GuestOffset, LayerIndex};

use crate::alloc::Allocator;
use crate::cache::{Owner, PAGE_SHIFT, PAGE_WORDS, PageCache, PageKey};
use crate::changes::{Changes, Freed};
use crate::error::{Error, ErrorKind, Result};
use crate::flusher::Flusher;
use crate::layer::Tables;
use growth::Growth;
use l1::L1;
use locks::EntryLocks;

use crate::partial::Partial;
pub(crate) use backoff::Backoff;
pub(crate) use locks::EntryGuard;
pub use recover::Mismatch;
pub(crate) use recover::host_of;
pub(crate) use refusal::Refusal;
pub(crate) use space::NewClusters;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) path: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    /// The same store, for rings.
    pub(crate) file: Arc<OpenStore>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) identity: FileIdentity,
    pub(crate) index: LayerIndex,
    /// As when it was opened; [`Active::tables_now`] knows where the L1 table is now.
    pub(crate) tables: Tables,
    /// Virtual size in bytes.
    size: AtomicU64,
    pub(crate) alloc: Allocator,
    pub(crate) changes: Changes,
    /// Autoclear bits that stay set: of structures that are right although we write.
    pub(crate) autoclear: u64,
    /// Whether the host has in memory what first writes are written over.
    pub(crate) copy_up_backoff: Backoff,
    owner: Owner,
    cache: Arc<PageCache>,
    /// Another one takes its place while no writer is inside.
    l1: ArcSwap<L1>,
    l1_lock: Mutex<()>,
    locks: EntryLocks,
    growth: Mutex<Growth>,
}

/// A cluster's entry and what it was before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) cluster: u64,
    pub(crate) old: u64,
    pub(crate) new: u64,
}

impl Active {
    /// Reads the tables of an open image that no one else writes.
    ///
    /// # Errors
    /// Tables that cannot be read or break the format.
    pub(crate) fn open(
        path: &Path,
        store: Arc<dyn Store>,
        identity: FileIdentity,
        header: &Header,
        index: LayerIndex,
        (owner, cache): (Owner, Arc<PageCache>),
    ) -> Result<Self> {
        let tables = Tables::of(header);
        if header.size >> header.cluster_bits.get() >> PAGE_SHIFT >= PageKey::MAX_PAGES {
            let kind = ErrorKind::TooLarge { size: header.size, unit: header.cluster_bits.size() };
            return Err(kind.into());
        }
        let (l1, l2_tables) = l1::read(&*store, header, &tables, identity.len)?;
        l1::make_room(&*store, header);
        let flusher = Arc::new(Flusher::new(Arc::clone(&store)));
        let (bytes_of, flushes) = (Arc::clone(&store), Arc::clone(&flusher));
        let alloc = Allocator::open(bytes_of, flushes, header, l2_tables.into_iter(), identity.len)?;
        Ok(Self {
            path: path.to_owned(),
            identity,
            index,
            tables,
            size: AtomicU64::new(header.size),
            growth: Mutex::new(Growth::from(alloc.end())),
            alloc,
            changes: Changes::new(header.cluster_bits),
            autoclear: 0,
            copy_up_backoff: Backoff::default(),
            owner,
            cache,
            l1: ArcSwap::from_pointee(l1),
            l1_lock: Mutex::new(()),
            locks: EntryLocks::default(),
            flusher,
            file: OpenStore::new(Arc::clone(&store)),
            store,
        })
    }

    /// Whether a flush or a write of the tables failed: nothing more is known of what is on stable storage.
    pub(crate) fn is_lost(&self) -> bool {
        self.flusher.has_failed() || self.changes.has_failed()
    }

    /// Number of the guest cluster that holds `at`.
    pub(crate) fn cluster_of(&self, at: GuestOffset) -> u64 {
        at.get() >> self.tables.geometry.cluster_bits.get()
    }

    fn key(&self, cluster: u64) -> (PageKey, usize) {
        (self.owner.key(cluster >> PAGE_SHIFT), cluster as usize & (PAGE_WORDS - 1))
    }

    /// A cluster's raw entry; `None` when its page must be filled first ([`Active::entry`]).
    #[inline]
    pub(crate) fn lookup(&self, cluster: u64) -> Option<u64> {
        let (key, slot) = self.key(cluster);
        self.cache.get(key, slot)
    }

    /// Has the processor fetch what [`Active::lookup`] will look at.
    #[inline]
    pub(crate) fn prefetch(&self, cluster: u64) {
        let (key, slot) = self.key(cluster);
        self.cache.prefetch(key, slot);
    }

    /// Decodes an entry of this layer.
    ///
    /// # Errors
    /// An entry that breaks the format.
    pub(crate) fn decode(&self, raw: u64) -> Result<L2Entry> {
        self.tables.entries.l2(raw).map_err(|entry| {
            Error::from(ErrorKind::Entry { table: "L2 table", entry })
                .in_layer(self.index)
                .in_file(&self.path)
        })
    }

    /// What a raw entry says of a cluster that is written in part; `None` for all others.
    #[inline]
    pub(crate) fn partial(&self, raw: u64) -> Option<Partial> {
        Partial::from_word(raw, self.tables.geometry.cluster_bits)
    }

    /// Excludes other changes of the entries of the cluster's page.
    pub(crate) fn lock_page(&self, cluster: u64) -> EntryGuard<'_> {
        self.locks.lock_page(cluster)
    }

    /// Excludes other changes of the cluster's entry, once its page is in memory: under this lock it cannot be filled.
    ///
    /// # Errors
    /// As [`Active::entry`].
    pub(crate) fn lock_cluster(&self, cluster: u64) -> Result<EntryGuard<'_>> {
        self.entry(cluster)?;
        Ok(self.locks.lock_cluster(cluster))
    }

    /// As [`Active::lock_cluster`], without waiting; `None` where that would be needed, or someone else has the cluster or its
    /// page locked.
    pub(crate) fn try_lock_cluster(&self, cluster: u64) -> Option<EntryGuard<'_>> {
        self.entry_now(cluster)?;
        self.locks.try_lock_cluster(cluster)
    }

    /// A cluster's raw entry, from the image if need be. The page must not be locked by the caller.
    ///
    /// # Errors
    /// A table that cannot be read.
    pub(crate) fn entry(&self, cluster: u64) -> Result<u64> {
        if let Some(raw) = self.lookup(cluster) {
            return Ok(raw);
        }
        let guard = self.lock_page(cluster);
        self.entry_locked(cluster, &guard)
    }

    /// As [`Active::entry`], without waiting; `None` where that would be needed.
    fn entry_now(&self, cluster: u64) -> Option<u64> {
        if let Some(raw) = self.lookup(cluster) {
            return Some(raw);
        }
        let guard = self.locks.try_lock_page(cluster)?;
        let read = |bytes: &mut [u8], at| match self.store.read_now(bytes, at) {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        };
        self.read_entry(cluster, &guard, &read).ok()
    }

    /// As [`Active::entry`], for a caller that holds the lock of the cluster or of its page.
    pub(crate) fn entry_locked(&self, cluster: u64, guard: &EntryGuard<'_>) -> Result<u64> {
        if let Some(raw) = self.lookup(cluster) {
            return Ok(raw);
        }
        self.read_entry(cluster, guard, &|bytes, at| self.store.read_padded(bytes, at))
    }

    /// Clusters from `cluster` on whose entries lie in the same page and the same L2 table: one lock and one table
    /// cover them.
    pub(crate) fn run_limit(&self, cluster: u64) -> u64 {
        let granule_bits = PAGE_SHIFT.min(self.tables.geometry.l2_bits);
        (1 << granule_bits) - (cluster & ((1 << granule_bits) - 1))
    }

    /// The clusters that an entry refers to, to be freed when it is replaced.
    pub(crate) fn clusters_of(&self, raw: u64) -> Result<Option<Freed>> {
        let len = self.tables.geometry.cluster_bits.size();
        if let Some(Partial { host: at, .. }) = self.partial(raw) {
            return Ok(Some(Freed { at, len }));
        }
        Ok(match self.decode(raw)? {
            L2Entry::Data { host: at, .. } | L2Entry::Zero { host: Some(at), .. } => Some(Freed { at, len }),
            L2Entry::Compressed { host: at, len } => Some(Freed { at, len }),
            L2Entry::Unallocated | L2Entry::Zero { host: None, .. } => None,
        })
    }
}
