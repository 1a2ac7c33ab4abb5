//! The L1 table: reading it, and moving it when it is too short for the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmstrata_qcow2::Header;
use vmstrata_qcow2::entry::COPIED;
use vmstrata_qcow2::header::field;
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use super::{Active, NewClusters};
use crate::changes::{Freed, Noted, Recorded};
use crate::error::{Error, IoContext as _, Result};
use crate::journal::Record;
use crate::layer::{Tables, table_of, words};

/// An L1 table, where it lies and what is in it.
#[derive(Debug)]
pub(super) struct L1 {
    pub(super) at: HostOffset,
    /// Raw.
    pub(super) entries: Box<[AtomicU64]>,
}

/// The L1 table, and where the L2 tables lie that it leads to.
pub(super) fn read(
    store: &dyn Store,
    header: &Header,
    tables: &Tables,
    file_len: u64,
) -> Result<(L1, Vec<HostOffset>)> {
    let mut bytes = vec![0; header.l1_size as usize * 8];
    let at = header.l1_table_offset;
    store.read_padded(&mut bytes, at).while_trying("read the L1 table").map_err(|error| error.at(at))?;
    let mut l2_tables = Vec::new();
    for (index, raw) in words(&bytes).enumerate() {
        let table = table_of(tables, raw, file_len).map_err(|error| error.at(at + index as u64 * 8))?;
        l2_tables.extend(table);
    }
    Ok((L1 { at, entries: words(&bytes).map(AtomicU64::new).collect() }, l2_tables))
}

/// Gives an L1 table that lies in a hole of its file, as that of a new image does, its space: a commit that meets a full host
/// cannot be undone, so it must need none.
pub(super) fn make_room(store: &dyn Store, header: &Header) {
    let mut at = header.l1_table_offset;
    let end = at + u64::from(header.l1_size) * 8;
    while at < end {
        let Ok((is_data, next)) = store.extent(at) else { return };
        // Past the end of the file there is no extent.
        let (is_data, next) = if next <= at { (false, end) } else { (is_data, next.min(end)) };
        // A host that is full already has none to give: that is for the writes to find out.
        if !is_data && store.write_all(&vec![0; (next - at) as usize], at).is_err() {
            return;
        }
        at = next;
    }
}

impl Active {
    /// What leads to the tables, for readers of the file from now on.
    pub(crate) fn tables_now(&self) -> Tables {
        let l1 = self.l1.load();
        let l1_entries = u32::try_from(l1.entries.len()).expect("at most MAX_L1_ENTRIES");
        Tables { l1_at: l1.at, l1_entries, ..self.tables }
    }

    /// Virtual size in bytes, as the header says.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// A raw entry; `None` past the table's end.
    pub(super) fn l1_entry(&self, index: u64) -> Option<u64> {
        Some(self.l1.load().entries.get(index as usize)?.load(Ordering::Acquire))
    }

    /// Whether there is an L2 table for this guest cluster.
    pub(crate) fn has_table(&self, cluster: u64) -> bool {
        self.l1_entry(cluster >> self.tables.geometry.l2_bits).is_some_and(|raw| raw != 0)
    }

    /// Whether there is one that belongs to this image alone.
    pub(crate) fn has_own_table(&self, cluster: u64) -> bool {
        self.l1_entry(cluster >> self.tables.geometry.l2_bits).is_some_and(|raw| raw & COPIED != 0)
    }

    /// The guest offset from which on there are no L2 tables.
    pub(crate) fn tables_end(&self) -> u64 {
        let l1 = self.l1.load();
        let last = l1.entries.iter().rposition(|raw| raw.load(Ordering::Acquire) != 0);
        last.map_or(0, |last| (last as u64 + 1) * self.tables.geometry.l2_span())
    }

    /// Makes sure that the cluster's L2 table exists and belongs to this image alone.
    ///
    /// # Errors
    /// No space, or a host that cannot write.
    pub(crate) fn ensure_table(&self, cluster: u64) -> Result<()> {
        if self.has_own_table(cluster) {
            return Ok(());
        }
        let _l1 = self.l1_lock.lock();
        let index = cluster >> self.tables.geometry.l2_bits;
        let raw = self.l1_entry(index).unwrap_or(0);
        if raw & COPIED != 0 {
            return Ok(());
        }
        let bytes = table_of(&self.tables, raw, u64::MAX)?.map(|old| {
            let mut bytes = vec![0; self.tables.geometry.cluster_bits.size() as usize];
            let read = self.store.read_padded(&mut bytes, old).while_trying("read an L2 table");
            read.map(|()| bytes).map_err(|error| error.at(old))
        });
        let bytes = bytes.transpose()?;
        let space = self.allocate(1)?;
        self.put_table(index, raw, space, bytes.as_deref(), |record, freed| {
            self.changes.note_or_commit((std::slice::from_ref(record), Recorded::Now), freed, self)
        })
    }

    /// Makes sure of the same where there is no table yet, without waiting but for the host's page cache; `None` when someone
    /// else has to.
    pub(crate) fn try_ensure_table(&self, cluster: u64) -> Option<()> {
        if self.has_own_table(cluster) {
            return Some(());
        }
        let _l1 = self.l1_lock.try_lock()?;
        let index = cluster >> self.tables.geometry.l2_bits;
        match self.l1_entry(index)? {
            0 => {
                let space = self.try_allocate()?;
                let note = |record: &Record, freed: &[Freed]| match self.changes.note(
                    std::slice::from_ref(record),
                    freed,
                    Recorded::Now,
                ) {
                    Noted::NoRoom => Err(self.changes.no_room()),
                    noted => Ok(noted),
                };
                self.put_table(index, 0, space, None, note).ok()
            }
            raw => (raw & COPIED != 0).then_some(()),
        }
    }

    /// Writes a new L2 table, empty without `bytes`, to `space`, a cluster that was allocated for it, and puts it in place of the
    /// one that `raw` leads to. The caller holds the L1 lock.
    fn put_table(
        &self,
        index: u64,
        raw: u64,
        space: NewClusters<'_>,
        bytes: Option<&[u8]>,
        note: impl FnOnce(&Record, &[Freed]) -> Result<Noted>,
    ) -> Result<()> {
        let (at, len) = (space.at, self.tables.geometry.cluster_bits.size());
        let new = at.get() | COPIED;
        let freed = table_of(&self.tables, raw, u64::MAX)?.map(|at| Freed { at, len });
        let record = Record::of_l1(index, raw, new);
        let written = match bytes {
            Some(bytes) => self.store.write_all(bytes, at),
            // A commit that meets a full host cannot be undone: the table has its space from now on.
            None if space.zeroed && self.store.local().is_some_and(|file| file.allocate(at, len).is_ok()) => {
                Ok(())
            }
            None => self.store.write_all(&vec![0; len as usize], at),
        };
        written.while_trying("write a new L2 table").map_err(|error| error.at(at))?;
        let noted = note(&record, freed.as_slice())?;
        space.keep();
        // Only now: a thread that sees the table records entries in it, and a journal that has those must have this one.
        self.l1.load().entries[index as usize].store(new, Ordering::Release);
        self.commit_if_due(noted)
    }

    /// Makes the L1 table longer in the file if its last cluster has room for `entries`; returns whether it has. The new ones
    /// lead nowhere, and are known only after [`Active::know_longer_l1`].
    ///
    /// Writers go on meanwhile: they change what was there before. No one else changes the table's length.
    ///
    /// # Errors
    /// A host that cannot write. Once a write of the header failed, the disk must take no more writes.
    pub(crate) fn extend_l1(&self, entries: u64) -> Result<bool> {
        let (at, len) = {
            let l1 = self.l1.load();
            (l1.at, l1.entries.len() as u64 * 8)
        };
        let room = len.next_multiple_of(self.tables.geometry.cluster_bits.size());
        let last = at + len.saturating_sub(8);
        let is_own = || Ok::<_, Error>(self.alloc.refcount(last)? == 1);
        if entries * 8 > room || !is_own()? {
            return Ok(false);
        }
        let zeros = vec![0; (entries * 8 - len) as usize];
        self.store
            .write_all(&zeros, at + len)
            .while_trying("write a longer L1 table")
            .map_err(|error| error.at(at + len))?;
        self.flusher.flush().while_trying("flush a longer L1 table")?;
        self.write_l1_place(at, entries)?;
        Ok(true)
    }

    /// Lets requests know of an L1 table that was made longer where it is. The caller keeps writers out.
    pub(crate) fn know_longer_l1(&self, entries: u64) {
        let _l1 = self.l1_lock.lock();
        let old = self.l1.load_full();
        let words = old.entries.iter().map(|raw| raw.load(Ordering::Acquire)).chain(std::iter::repeat(0));
        let entries = words.take(entries as usize).map(AtomicU64::new).collect();
        self.l1.store(Arc::new(L1 { at: old.at, entries }));
    }

    fn write_l1_place(&self, at: HostOffset, entries: u64) -> Result<()> {
        let count = u32::try_from(entries).expect("checked against MAX_L1_ENTRIES");
        self.write_header(field::L1_SIZE, &[&count.to_be_bytes()[..], &at.get().to_be_bytes()].concat())
    }

    /// Moves the L1 table to new clusters if it has fewer than `entries`; the new ones lead nowhere.
    ///
    /// ```text
    ///   new table, refcounts ──► flush ──► its place and length in the header, in one sector ──► flush ──► old one freed
    /// ```
    ///
    /// The caller keeps writers out, and has committed every change: the table in the file is the one in memory.
    ///
    /// # Errors
    /// An image or a host that is full, a host that cannot write. Once a write of the header failed, the disk must take no
    /// more writes.
    pub(crate) fn grow_l1(&self, entries: u64) -> Result<()> {
        let _l1 = self.l1_lock.lock();
        let old = self.l1.load_full();
        if entries <= old.entries.len() as u64 {
            return Ok(());
        }
        let cluster = self.tables.geometry.cluster_bits.size();
        let mut bytes: Vec<u8> =
            old.entries.iter().flat_map(|raw| raw.load(Ordering::Acquire).to_be_bytes()).collect();
        bytes.resize((entries * 8).next_multiple_of(cluster) as usize, 0);
        let at = self.alloc.allocate_run(bytes.len() as u64 / cluster)?;
        let write = || -> Result<()> {
            self.store.write_all(&bytes, at).while_trying("write a longer L1 table").map_err(|e| e.at(at))?;
            self.flusher.flush().while_trying("flush a longer L1 table")
        };
        if let Err(error) = write() {
            let _ = self.alloc.free(at, bytes.len() as u64);
            return Err(error);
        }
        self.write_l1_place(at, entries)?;
        let entries = words(&bytes).take(entries as usize).map(AtomicU64::new).collect();
        self.l1.store(Arc::new(L1 { at, entries }));
        if old.entries.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.alloc.free(old.at, old.entries.len() as u64 * 8) {
            tracing::warn!(disk = %self.path.display(), %error, "cannot free the old L1 table: it is leaked until `vmstrata check --repair=leaks`");
        }
        Ok(())
    }

    /// Writes the disk's size to the header: one write inside one sector, then a flush.
    ///
    /// # Errors
    /// A host that cannot write: the disk must take no more writes.
    pub(crate) fn write_size(&self, size: u64) -> Result<()> {
        self.write_header(field::SIZE, &size.to_be_bytes())?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    fn write_header(&self, field: u64, bytes: &[u8]) -> Result<()> {
        let at = HostOffset::new(field);
        let written = self.alloc.exclusively(|| self.store.write_all(bytes, at));
        if written.is_err() {
            // Which of the two a crash would show is not known.
            self.flusher.give_up();
        }
        written.while_trying("write the header").map_err(|error| error.at(at))?;
        self.flusher.flush().while_trying("flush the header")
    }
}
