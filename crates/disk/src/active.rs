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

mod growth;
mod l1;
mod locks;
mod recover;
pub(crate) mod session;

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use vmstrata_qcow2::{Header, L2Entry, RawEntry};
use vmstrata_store::{FileIdentity, LocalFile, Logged, OpenStore, Store};
use vmstrata_types::{GuestOffset, HostOffset, LayerIndex};

use crate::alloc::{Allocated, Allocator};
use crate::cache::{Owner, PAGE_SHIFT, PAGE_WORDS, PageCache, PageKey};
use crate::changes::{Changes, CommitTarget, Freed, Noted, Recorded};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::flusher::Flusher;
use crate::journal::{Record, Slot};
use crate::layer::{Tables, TablesLock, table_of};
use growth::Growth;
use l1::L1;
use locks::EntryLocks;

pub(crate) use locks::EntryGuard;
pub use recover::Mismatch;
pub(crate) use recover::host_of;

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
    /// The other feature bits of the header, incompatible and compatible ones.
    pub(crate) features: [u64; 2],
    /// Present while others read the tables from the file, which a merge writes.
    pub(crate) tables_lock: Option<TablesLock>,
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
    pub(crate) old: RawEntry,
    pub(crate) new: RawEntry,
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
        if header.size >> header.cluster_bits.get() >> entries_shift(&tables) >= PageKey::MAX_PAGES {
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
            features: [header.incompatible.bits(), header.compatible.bits()],
            tables_lock: None,
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

    /// Whether its entries are two words long.
    #[inline]
    pub(crate) fn has_subclusters(&self) -> bool {
        self.tables.entries.is_extended()
    }

    /// The page that has a cluster's entry, and where in it the entry begins.
    #[inline]
    fn key(&self, cluster: u64) -> (PageKey, usize) {
        let shift = entries_shift(&self.tables);
        let number = cluster as usize & ((1 << shift) - 1);
        (self.owner.key(cluster >> shift), number << (PAGE_SHIFT - shift))
    }

    /// A cluster's raw entry in the words of its page.
    pub(crate) fn entry_of(&self, page: &[u64; PAGE_WORDS], cluster: u64) -> RawEntry {
        let slot = self.key(cluster).1;
        let subclusters = if self.has_subclusters() { page[slot + 1] } else { 0 };
        RawEntry { word: page[slot], subclusters }
    }

    /// A cluster's raw entry; `None` when its page must be filled first ([`Active::entry`]).
    #[inline]
    pub(crate) fn lookup(&self, cluster: u64) -> Option<RawEntry> {
        let (key, slot) = self.key(cluster);
        if self.has_subclusters() {
            let [word, subclusters] = self.cache.get_pair(key, slot)?;
            return Some(RawEntry { word, subclusters });
        }
        self.cache.get(key, slot).map(RawEntry::standard)
    }

    /// Has the processor fetch what [`Active::lookup`] will look at.
    #[inline]
    pub(crate) fn prefetch(&self, cluster: u64) {
        let (key, slot) = self.key(cluster);
        self.cache.prefetch(key, slot);
    }

    /// Decodes a cluster's entry.
    ///
    /// # Errors
    /// An entry that breaks the format.
    #[inline]
    pub(crate) fn decode(&self, cluster: u64, raw: RawEntry) -> Result<L2Entry> {
        self.tables.entries.l2(raw).map_err(|entry| {
            let error = Error::from(ErrorKind::Entry { table: "L2 table", entry });
            let error = match self.entry_place(cluster) {
                Ok(Some(place)) => error.at(place),
                _ => error,
            };
            error.in_layer(self.index).in_file(&self.path)
        })
    }

    /// Where a cluster's entry lies in the image, if its table is there.
    pub(crate) fn entry_place(&self, cluster: u64) -> Result<Option<HostOffset>> {
        let geometry = self.tables.geometry;
        let l1_entry = self.l1_entry(cluster >> geometry.l2_bits).unwrap_or(0);
        self.tables.entry_place(l1_entry, GuestOffset::new(cluster << geometry.cluster_bits.get()))
    }

    /// The raw entry that says so.
    pub(crate) fn encode(&self, entry: L2Entry) -> RawEntry {
        self.tables.entries.encode_l2(entry)
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
    pub(crate) fn entry(&self, cluster: u64) -> Result<RawEntry> {
        if let Some(raw) = self.lookup(cluster) {
            return Ok(raw);
        }
        let guard = self.lock_page(cluster);
        self.entry_locked(cluster, &guard)
    }

    /// As [`Active::entry`], without waiting; `None` where that would be needed.
    fn entry_now(&self, cluster: u64) -> Option<RawEntry> {
        if let Some(raw) = self.lookup(cluster) {
            return Some(raw);
        }
        let guard = self.locks.try_lock_page(cluster)?;
        let read =
            |bytes: &mut [u8], at| match self.store.local().is_some_and(|file| file.read_now(bytes, at)) {
                true => Ok(()),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
        self.read_entry(cluster, &guard, &read).ok()
    }

    /// As [`Active::entry`], for a caller that holds the lock of the cluster or of its page.
    pub(crate) fn entry_locked(&self, cluster: u64, guard: &EntryGuard<'_>) -> Result<RawEntry> {
        if let Some(raw) = self.lookup(cluster) {
            return Ok(raw);
        }
        self.read_entry(cluster, guard, &|bytes, at| self.store.read_padded(bytes, at))
    }

    /// Clusters from `cluster` on whose entries lie in the same page and the same L2 table: one lock and one table
    /// cover them.
    pub(crate) fn run_limit(&self, cluster: u64) -> u64 {
        let granule_bits = entries_shift(&self.tables).min(self.tables.geometry.l2_bits);
        (1 << granule_bits) - (cluster & ((1 << granule_bits) - 1))
    }

    /// The clusters that a cluster's entry refers to, to be freed when it is replaced.
    pub(crate) fn clusters_of(&self, cluster: u64, raw: RawEntry) -> Result<Option<Freed>> {
        let len = self.tables.geometry.cluster_bits.size();
        Ok(match self.decode(cluster, raw)? {
            L2Entry::Compressed { host: at, len } => Some(Freed { at, len }),
            entry => entry.host().map(|at| Freed { at, len }),
        })
    }
}

/// Reads a part of a table.
type ReadTable<'a> = dyn Fn(&mut [u8], HostOffset) -> io::Result<()> + 'a;

impl Active {
    /// The same clusters, those whose entries lie in one page at a time.
    pub(crate) fn by_page(&self, clusters: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let shift = entries_shift(&self.tables);
        let pages = clusters.start >> shift..clusters.end.div_ceil(1 << shift);
        pages.map(move |page| clusters.start.max(page << shift)..clusters.end.min((page + 1) << shift))
    }

    /// The raw entries of the page that holds the cluster, if they are in memory or there are no tables for any of them.
    pub(crate) fn page_now(&self, cluster: u64) -> Option<[u64; PAGE_WORDS]> {
        let mut entries = [0; PAGE_WORDS];
        let count = 1 << entries_shift(&self.tables);
        let first = cluster - cluster % count;
        let mut tables = (first..first + count).step_by(1 << self.tables.geometry.l2_bits);
        if !tables.any(|cluster| self.has_table(cluster)) {
            return Some(entries);
        }
        self.cache.copy(self.key(cluster).0, &mut entries).then_some(entries)
    }

    /// As [`Active::page_now`], from the image if need be.
    ///
    /// # Errors
    /// As [`Active::entry`].
    pub(crate) fn page(&self, cluster: u64) -> Result<[u64; PAGE_WORDS]> {
        loop {
            if let Some(entries) = self.page_now(cluster) {
                return Ok(entries);
            }
            self.entry(cluster)?;
        }
    }

    /// A cluster's raw entry from the image; fills the page if all of it is locked.
    pub(super) fn read_entry(
        &self,
        cluster: u64,
        guard: &EntryGuard<'_>,
        read: &ReadTable<'_>,
    ) -> Result<RawEntry> {
        let (key, _) = self.key(cluster);
        let count = 1 << entries_shift(&self.tables);
        let first = cluster - cluster % count;
        // Changes are looked at before the image: one that a commit writes meanwhile, and then forgets, is seen in
        // one of the two places. (No others of what is locked can be noted.)
        let mut changed: Vec<(u64, RawEntry)> = Vec::new();
        self.changes.overlay(first..first + count, |cluster, raw| changed.push((cluster, raw)));
        let mut page = [0; PAGE_WORDS];
        self.read_entries(first, &mut page, read).map_err(|e| e.in_layer(self.index).in_file(&self.path))?;
        for (cluster, raw) in changed {
            self.put_entry(&mut page, cluster, raw);
        }
        if guard.is_of_page() {
            self.cache.fill(key, &page);
        }
        Ok(self.entry_of(&page, cluster))
    }

    /// Puts a cluster's raw entry into the words of its page.
    fn put_entry(&self, page: &mut [u64; PAGE_WORDS], cluster: u64, raw: RawEntry) {
        let slot = self.key(cluster).1;
        page[slot] = raw.word;
        if self.has_subclusters() {
            page[slot + 1] = raw.subclusters;
        }
    }

    /// What the image says of the clusters from `first` on.
    fn read_entries(&self, first: u64, page: &mut [u64; PAGE_WORDS], read: &ReadTable<'_>) -> Result<()> {
        let (l2_bits, entries) = (self.tables.geometry.l2_bits, self.tables.entries);
        let mut bytes = [0; PAGE_WORDS * 8];
        let (mut done, all) = (0, 1 << entries_shift(&self.tables));
        while done < all {
            let cluster = first + done as u64;
            let within = cluster & ((1 << l2_bits) - 1);
            let count = (all - done).min((1 << l2_bits) - within as usize);
            let raw = self.l1_entry(cluster >> l2_bits).unwrap_or(0);
            let table = table_of(&self.tables, raw, u64::MAX)?;
            if let Some(table) = table {
                let bytes = &mut bytes[..count * entries.entry_len()];
                let at = table + within * entries.entry_len() as u64;
                read(bytes, at).while_trying("read an L2 table").map_err(|e| e.at(at))?;
                let found = entries.raw_entries(bytes);
                (cluster..).zip(found).for_each(|(cluster, raw)| self.put_entry(page, cluster, raw));
            }
            done += count;
        }
        Ok(())
    }

    /// Publishes changes of entries that lie in one page and one L2 table and are locked. The data they lead to is written.
    ///
    /// # Errors
    /// A commit that failed, or a journal that cannot be written: in the latter case nothing is published.
    pub(crate) fn publish(&self, changed: &[Change], freed: &[Freed], guard: &EntryGuard<'_>) -> Result<()> {
        self.publish_recorded(changed, freed, guard, Recorded::Now)
    }

    /// As [`Active::publish`]; the caller says when the journal is given the records.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn publish_recorded(
        &self,
        changed: &[Change],
        freed: &[Freed],
        guard: &EntryGuard<'_>,
        recorded: Recorded,
    ) -> Result<()> {
        let noted = self.changes.note_or_commit((&records(changed), recorded), freed, self)?;
        // Commit first: a request that sees a new cluster writes into it and completes without a commit of its own.
        self.commit_if_due(noted)?;
        self.show(changed, guard);
        Ok(())
    }

    /// Shows lookups what was noted.
    fn show(&self, changed: &[Change], _guard: &EntryGuard<'_>) {
        for change in changed {
            let (key, slot) = self.key(change.cluster);
            let RawEntry { word, subclusters } = change.new;
            match self.has_subclusters() {
                true => self.cache.update_pair(key, slot, [word, subclusters]),
                false => self.cache.update(key, slot, word),
            }
        }
    }

    /// Commits where what was noted asks for it.
    pub(super) fn commit_if_due(&self, noted: Noted) -> Result<()> {
        if noted == Noted::MustCommit { self.changes.commit(self) } else { Ok(()) }
    }

    /// Gives back clusters that nothing leads to any more; `wait` returns once no request can still see them.
    ///
    /// # Errors
    /// Refcounts that cannot be read or written: what was not given back is leaked.
    pub(crate) fn reclaim(&self, wait: impl FnOnce()) -> Result<()> {
        let freed = self.changes.take_reclaimable();
        if freed.is_empty() {
            return Ok(());
        }
        wait();
        freed
            .into_iter()
            .try_for_each(|run| self.alloc.free(run.at, run.len))
            .map_err(|error| error.in_file(&self.path))
    }
}

/// Base-2 logarithm of the entries in a page.
#[inline]
fn entries_shift(tables: &Tables) -> u32 {
    PAGE_SHIFT - u32::from(tables.entries.is_extended())
}

fn records(changed: &[Change]) -> SmallVec<[Record; 4]> {
    let record =
        |change: &Change| Record { slot: Slot::L2(change.cluster), old: change.old, new: change.new };
    changed.iter().map(record).collect()
}

impl CommitTarget for Active {
    fn flush(&self) -> Result<()> {
        self.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&self.path))
    }

    fn write_entries(&self, entries: &BTreeMap<Slot, RawEntry>) -> Result<()> {
        let _whole = self.tables_lock.as_ref().map(|lock| lock.write());
        for (at, run) in self.runs_of(entries)? {
            let written = self.store.write_all(&run, at).while_trying("write table entries");
            written.map_err(|error| error.at(at).in_file(&self.path))?;
        }
        Ok(())
    }

    fn commit_to_log(&self, entries: &BTreeMap<Slot, RawEntry>) -> Result<bool> {
        let Some(log) = self.log().filter(|log| log.has_joined()) else { return Ok(false) };
        let runs = self.runs_of(entries)?;
        let _whole = self.tables_lock.as_ref().map(|lock| lock.write());
        let committed = self.flusher.flush_by(|_| log.commit(&runs));
        committed.while_trying("flush to the flush log").map_err(|error| error.in_file(&self.path))?;
        Ok(true)
    }
}

impl Active {
    /// The log that may make flushes of the file durable.
    pub(crate) fn log(&self) -> Option<&dyn Logged> {
        self.store.local().and_then(LocalFile::log)
    }

    /// Entries as they lie in the image, those side by side in one piece.
    fn runs_of(&self, entries: &BTreeMap<Slot, RawEntry>) -> Result<Vec<(HostOffset, Vec<u8>)>> {
        let mut runs: Vec<(HostOffset, Vec<u8>)> = Vec::new();
        for (&slot, &raw) in entries {
            let at = self.place_of(slot)?;
            let joins = |(start, run): &&mut (HostOffset, Vec<u8>)| *start + run.len() as u64 == at;
            match runs.last_mut().filter(joins) {
                Some((_, run)) => self.tables.entries.put_raw(raw, run),
                None => {
                    let mut run = Vec::new();
                    self.tables.entries.put_raw(raw, &mut run);
                    runs.push((at, run));
                }
            }
        }
        Ok(runs)
    }
}

impl Active {
    /// Where an entry lies in the image.
    fn place_of(&self, slot: Slot) -> Result<HostOffset> {
        match slot {
            Slot::L1(index) => Ok(self.l1.load().at + index * 8),
            Slot::L2(cluster) => {
                let place = self.entry_place(cluster)?;
                Ok(place.expect("a change was published only after its table existed"))
            }
        }
    }
}

/// Clusters that no entry leads to yet; what is not kept is given back.
#[derive(Debug)]
pub(crate) struct NewClusters<'a> {
    active: &'a Active,
    space: Allocated,
}

impl Active {
    /// As [`crate::alloc::Allocator::allocate`].
    ///
    /// # Errors
    /// The same.
    pub(crate) fn allocate(&self, clusters: u64) -> Result<NewClusters<'_>> {
        let space = self.alloc.allocate(clusters).map_err(|error| error.in_file(&self.path))?;
        Ok(NewClusters { active: self, space })
    }

    /// As [`crate::alloc::Allocator::try_allocate`].
    pub(crate) fn try_allocate(&self) -> Option<NewClusters<'_>> {
        Some(NewClusters { active: self, space: self.alloc.try_allocate()? })
    }
}

impl NewClusters<'_> {
    /// Entries lead to all of them now.
    pub(crate) fn keep(mut self) {
        self.space.clusters = 0;
    }
}

impl Deref for NewClusters<'_> {
    type Target = Allocated;

    fn deref(&self) -> &Allocated {
        &self.space
    }
}

impl Drop for NewClusters<'_> {
    /// Once the disk is lost they stay counted: a broken journal may still name them, and would then be refused.
    fn drop(&mut self) {
        if self.space.clusters > 0 && !self.active.is_lost() {
            let bits = self.active.tables.geometry.cluster_bits;
            // What cannot be given back is leaked.
            let _ = self.active.alloc.free(self.space.at, self.space.clusters << bits.get());
        }
    }
}
