//! The active layer: the one qcow2 file that takes the guest's writes.
//!
//! Its L1 table is in memory; pages of its L2 entries are in the metadata cache, as raw words. What the cache and
//! the image say of a cluster, and changes not yet in the image ([`crate::changes`]), are brought together here, so
//! that a lookup sees every change that was published and a page can be evicted at any time.
//!
//! A page's entries are changed, and a page is filled, only under the page's lock. Lookups take none.
//!
//! Lock order: page lock, then L1 lock, then the allocator's or the changes' lock.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vmstrata_qcow2::entry::COPIED;
use vmstrata_qcow2::{Header, L2Entry};
use vmstrata_store::{FileIdentity, Store};
use vmstrata_types::{GuestOffset, HostOffset, LayerIndex};

use crate::alloc::Allocator;
use crate::cache::{PAGE_SHIFT, PAGE_WORDS, PageCache, PageKey};
use crate::changes::{Changes, CommitTarget, Freed, Noted};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::flusher::Flusher;
use crate::journal::{Record, Slot};
use crate::layer::{Tables, table_of, words};
use crate::resources::Resources;

const PAGE_LOCKS: usize = 64;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) path: PathBuf,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) identity: FileIdentity,
    pub(crate) index: LayerIndex,
    pub(crate) tables: Tables,
    /// Virtual size in bytes.
    pub(crate) size: u64,
    pub(crate) alloc: Allocator,
    pub(crate) changes: Changes,
    owner: u32,
    cache: Arc<PageCache>,
    /// Raw entries.
    l1: Box<[AtomicU64]>,
    l1_lock: Mutex<()>,
    page_locks: [Mutex<()>; PAGE_LOCKS],
}

impl Drop for Active {
    fn drop(&mut self) {
        self.cache.forget(self.owner);
    }
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
        resources: &Resources,
    ) -> Result<Self> {
        let tables = Tables::of(header);
        if header.size >> header.cluster_bits.get() >> PAGE_SHIFT >= PageKey::MAX_PAGES {
            let kind = ErrorKind::TooLarge { size: header.size, unit: header.cluster_bits.size() };
            return Err(kind.into());
        }
        let mut bytes = vec![0; header.l1_size as usize * 8];
        let l1_at = header.l1_table_offset;
        store.read_exact(&mut bytes, l1_at).while_trying("read the L1 table").map_err(|e| e.at(l1_at))?;
        let mut l2_tables = Vec::new();
        for (index, raw) in words(&bytes).enumerate() {
            let table =
                table_of(&tables, raw, identity.len).map_err(|error| error.at(l1_at + index as u64 * 8))?;
            l2_tables.extend(table);
        }
        let flusher = Arc::new(Flusher::new(Arc::clone(&store)));
        let (bytes_of, flushes) = (Arc::clone(&store), Arc::clone(&flusher));
        let alloc = Allocator::open(bytes_of, flushes, header, l2_tables.into_iter(), identity.len)?;
        Ok(Self {
            path: path.to_owned(),
            identity,
            index,
            tables,
            size: header.size,
            alloc,
            changes: Changes::new(header.cluster_bits),
            owner: resources.new_owner()?,
            cache: Arc::clone(resources.cache()),
            l1: words(&bytes).map(AtomicU64::new).collect(),
            l1_lock: Mutex::new(()),
            page_locks: std::array::from_fn(|_| Mutex::new(())),
            flusher,
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
        (PageKey::new(self.owner, cluster >> PAGE_SHIFT), cluster as usize & (PAGE_WORDS - 1))
    }

    /// A cluster's raw entry; `None` when its page must be filled first ([`Active::fill`]).
    #[inline]
    pub(crate) fn lookup(&self, cluster: u64) -> Option<u64> {
        let (key, slot) = self.key(cluster);
        self.cache.get(key, slot)
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

    /// Excludes other changes of the entries of the cluster's page.
    pub(crate) fn lock_page(&self, cluster: u64) -> MutexGuard<'_, ()> {
        self.page_locks[(cluster >> PAGE_SHIFT) as usize % PAGE_LOCKS].lock()
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

    /// As [`Active::entry`], for a caller that holds the page's lock.
    pub(crate) fn entry_locked(&self, cluster: u64, _page: &MutexGuard<'_, ()>) -> Result<u64> {
        if let Some(raw) = self.lookup(cluster) {
            return Ok(raw);
        }
        let (key, slot) = self.key(cluster);
        let first = cluster - slot as u64;
        // Changes are looked at before the image: one that a commit writes meanwhile, and then forgets, is seen in
        // one of the two places. (No others can be noted: the caller holds the page's lock.)
        let mut changed: Vec<(u64, u64)> = Vec::new();
        self.changes.overlay(first..first + PAGE_WORDS as u64, |cluster, raw| changed.push((cluster, raw)));
        let mut page = [0; PAGE_WORDS];
        self.read_entries(first, &mut page).map_err(|e| e.in_layer(self.index).in_file(&self.path))?;
        for (cluster, raw) in changed {
            page[(cluster - first) as usize] = raw;
        }
        self.cache.fill(key, &page);
        Ok(page[slot])
    }

    /// What the image says of the clusters from `first` on.
    fn read_entries(&self, first: u64, page: &mut [u64; PAGE_WORDS]) -> Result<()> {
        let l2_bits = self.tables.geometry.l2_bits;
        let mut bytes = [0; PAGE_WORDS * 8];
        let mut done = 0;
        while done < PAGE_WORDS {
            let cluster = first + done as u64;
            let within = cluster & ((1 << l2_bits) - 1);
            let count = (PAGE_WORDS - done).min((1 << l2_bits) - within as usize);
            let raw = self.l1.get((cluster >> l2_bits) as usize).map_or(0, |raw| raw.load(Ordering::Acquire));
            let table = table_of(&self.tables, raw, u64::MAX)?;
            if let Some(table) = table {
                let bytes = &mut bytes[..count * 8];
                let at = table + within * 8;
                self.store.read_exact(bytes, at).while_trying("read an L2 table").map_err(|e| e.at(at))?;
                page[done..done + count].iter_mut().zip(words(bytes)).for_each(|(to, raw)| *to = raw);
            }
            done += count;
        }
        Ok(())
    }

    /// Clusters from `cluster` on whose entries lie in the same page and the same L2 table: one lock and one table
    /// cover them.
    pub(crate) fn run_limit(&self, cluster: u64) -> u64 {
        let granule_bits = PAGE_SHIFT.min(self.tables.geometry.l2_bits);
        (1 << granule_bits) - (cluster & ((1 << granule_bits) - 1))
    }

    /// Makes sure that the cluster's L2 table exists and belongs to this image alone.
    ///
    /// # Errors
    /// No space, or a host that cannot write.
    pub(crate) fn ensure_table(&self, cluster: u64) -> Result<()> {
        let index = cluster >> self.tables.geometry.l2_bits;
        let cell = &self.l1[index as usize];
        if cell.load(Ordering::Acquire) & COPIED != 0 {
            return Ok(());
        }
        let _l1 = self.l1_lock.lock();
        let raw = cell.load(Ordering::Acquire);
        if raw & COPIED != 0 {
            return Ok(());
        }
        let old = table_of(&self.tables, raw, u64::MAX)?;
        let bits = self.tables.geometry.cluster_bits;
        let mut bytes = vec![0; bits.size() as usize];
        if let Some(old) = old {
            self.store.read_exact(&mut bytes, old).while_trying("read an L2 table").map_err(|e| e.at(old))?;
        }
        let at = self.alloc.allocate(1)?.at;
        if let Err(error) = self.store.write_all(&bytes, at).while_trying("write a new L2 table") {
            let _ = self.alloc.free(at, bits.size());
            return Err(error.at(at));
        }
        let new = at.get() | COPIED;
        let freed = old.map(|at| Freed { at, len: bits.size() });
        let record = Record { slot: Slot::L1(index), old: raw, new };
        let noted = self.changes.note(&[record], freed.as_slice());
        // Only now: whoever sees the table notes entries in it, and a journal that has those must have this one.
        cell.store(new, Ordering::Release);
        self.settle(noted)
    }

    /// Publishes changes of entries that lie in one page and one L2 table. The data they lead to is written.
    ///
    /// # Errors
    /// A commit that failed where the changes could not be journalled.
    pub(crate) fn publish(
        &self,
        changed: &[Change],
        freed: &[Freed],
        _page: &MutexGuard<'_, ()>,
    ) -> Result<()> {
        let records: smallvec::SmallVec<[Record; 4]> = changed
            .iter()
            .map(|change| Record { slot: Slot::L2(change.cluster), old: change.old, new: change.new })
            .collect();
        let noted = self.changes.note(&records, freed);
        for change in changed {
            let (key, slot) = self.key(change.cluster);
            self.cache.update(key, slot, change.new);
        }
        self.settle(noted)
    }

    fn settle(&self, noted: Noted) -> Result<()> {
        match noted {
            Noted::Safe => Ok(()),
            Noted::MustCommit => self.changes.commit(self),
        }
    }

    /// The clusters that an entry refers to, to be freed when it is replaced.
    pub(crate) fn clusters_of(&self, raw: u64) -> Result<Option<Freed>> {
        let len = self.tables.geometry.cluster_bits.size();
        Ok(match self.decode(raw)? {
            L2Entry::Data { host: at, .. } | L2Entry::Zero { host: Some(at), .. } => Some(Freed { at, len }),
            L2Entry::Compressed { host: at, len } => Some(Freed { at, len }),
            L2Entry::Unallocated | L2Entry::Zero { host: None, .. } => None,
        })
    }

    /// Takes up what a killed process left in its journal, if the image is still what it was then.
    ///
    /// Returns false, having changed nothing, when it is not.
    ///
    /// # Errors
    /// Tables or refcounts that cannot be read.
    pub(crate) fn take_up(&self, found: &[Record]) -> Result<bool> {
        let mut histories: BTreeMap<Slot, Vec<u64>> = BTreeMap::new();
        for record in found {
            histories.entry(record.slot).or_default().extend([record.old, record.new]);
        }
        for (slot, history) in &histories {
            let new = *history.last().expect("two values a record");
            let (now, sole_user) = match *slot {
                Slot::L1(index) => (self.l1_entry(index), self.is_sole_table(new)?),
                Slot::L2(cluster) if self.is_in_own_table(cluster, &histories) => {
                    (Some(self.entry(cluster)?), self.is_sole_user(new)?)
                }
                Slot::L2(_) => (None, false),
            };
            if !sole_user || now.is_none_or(|now| !history.contains(&now)) {
                return Ok(false);
            }
        }
        // Pages were filled through the old tables.
        self.cache.forget(self.owner);
        // Slots are in order, L1 first: L2 entries may be in tables that they lead to.
        for (&slot, history) in &histories {
            self.take_up_one(slot, *history.last().expect("two values a record"))?;
        }
        Ok(true)
    }

    fn take_up_one(&self, slot: Slot, new: u64) -> Result<()> {
        match slot {
            Slot::L1(index) => {
                let old = self.l1[index as usize].swap(new, Ordering::AcqRel);
                if old != new {
                    let len = self.tables.geometry.cluster_bits.size();
                    let freed = table_of(&self.tables, old, u64::MAX)?.map(|at| Freed { at, len });
                    self.settle(self.changes.note(&[Record { slot, old, new }], freed.as_slice()))?;
                }
                Ok(())
            }
            Slot::L2(cluster) => {
                let page = self.lock_page(cluster);
                let old = self.entry_locked(cluster, &page)?;
                if old == new {
                    return Ok(());
                }
                // A zero entry may keep the cluster that the data entry before it had, and the other way round.
                let kept = self.clusters_of(new)?;
                let freed = self.clusters_of(old)?.filter(|freed| Some(*freed) != kept);
                self.publish(&[Change { cluster, old, new }], freed.as_slice(), &page)
            }
        }
    }

    /// Whether a cluster of the disk has its entry in a table of this image alone, once `histories` are taken up.
    fn is_in_own_table(&self, cluster: u64, histories: &BTreeMap<Slot, Vec<u64>>) -> bool {
        let geometry = self.tables.geometry;
        let index = cluster >> geometry.l2_bits;
        let table = histories.get(&Slot::L1(index)).and_then(|history| history.last().copied());
        let table = table.or_else(|| self.l1_entry(index)).unwrap_or(0);
        cluster < self.size.div_ceil(geometry.cluster_bits.size()) && table & COPIED != 0
    }

    fn l1_entry(&self, index: u64) -> Option<u64> {
        Some(self.l1.get(index as usize)?.load(Ordering::Acquire))
    }

    fn is_sole_table(&self, raw: u64) -> Result<bool> {
        match self.tables.entries.l1(raw) {
            Ok(entry) => entry.table.map_or(Ok(false), |table| Ok(self.alloc.refcount(table)? == 1)),
            Err(_) => Ok(false),
        }
    }

    /// Whether the cluster that an entry of ours leads to, if any, is counted exactly once.
    fn is_sole_user(&self, raw: u64) -> Result<bool> {
        match self.tables.entries.l2(raw) {
            Ok(L2Entry::Data { host, .. } | L2Entry::Zero { host: Some(host), .. }) => {
                Ok(self.alloc.refcount(host)? == 1)
            }
            Ok(L2Entry::Unallocated | L2Entry::Zero { host: None, .. }) => Ok(true),
            // Never written by us.
            Ok(L2Entry::Compressed { .. }) | Err(_) => Ok(false),
        }
    }
}

impl CommitTarget for Active {
    fn flush(&self) -> Result<()> {
        self.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&self.path))
    }

    fn write_entries(&self, entries: &BTreeMap<Slot, u64>) -> Result<()> {
        let mut run: Vec<u8> = Vec::new();
        let mut run_at = HostOffset::ZERO;
        let write = |run: &mut Vec<u8>, at: HostOffset| -> Result<()> {
            if !run.is_empty() {
                let written = self.store.write_all(run, at).while_trying("write table entries");
                written.map_err(|error| error.at(at).in_file(&self.path))?;
                run.clear();
            }
            Ok(())
        };
        for (&slot, raw) in entries {
            let at = self.place_of(slot)?;
            if run_at + run.len() as u64 != at {
                write(&mut run, run_at)?;
                run_at = at;
            }
            run.extend_from_slice(&raw.to_be_bytes());
        }
        write(&mut run, run_at)
    }
}

impl Active {
    /// Where an entry lies in the image.
    fn place_of(&self, slot: Slot) -> Result<HostOffset> {
        match slot {
            Slot::L1(index) => Ok(self.tables.l1_at + index * 8),
            Slot::L2(cluster) => {
                let l2_bits = self.tables.geometry.l2_bits;
                let raw = self.l1[(cluster >> l2_bits) as usize].load(Ordering::Acquire);
                let table = table_of(&self.tables, raw, u64::MAX)?;
                let table = table.expect("a change was published only after its table existed");
                Ok(table + (cluster & ((1 << l2_bits) - 1)) * 8)
            }
        }
    }
}
