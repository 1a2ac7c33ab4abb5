//! What of a layer's file is free: everything from the last cluster on that is counted or named.
//!
//! An index goes there, and what is left of the file when an index is taken away ends there. Refcounts alone are not
//! believed: what the active tables name is in use whatever they say.

use std::collections::HashSet;

use vmstrata_qcow2::Header;
use vmstrata_qcow2::index::{PAGE_LEN, Root};
use vmstrata_qcow2::refcount::decode_table_entry;
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use super::digest::{Content, TableBudget};
use crate::chain::Qcow2Head;
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::words;

/// Up to where a file is in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    /// The cluster boundary from which on all is free.
    end: u64,
    /// Where the last table ends; `None` if there are some that nobody looked at.
    tables_end: Option<u64>,
    /// What an index is aligned to: pages, and clusters.
    boundary: u64,
}

impl Used {
    /// Looks at the refcounts of a file whose active tables are known.
    ///
    /// # Errors
    /// Refcounts that cannot be read or break the format.
    pub(super) fn of(store: &dyn Store, head: &Qcow2Head, content: &Content) -> Result<Self> {
        let cluster = head.header.cluster_bits.size();
        let counts = Refcounts::read(store, &head.header)?;
        let counted = counts.last_counted(store, &head.header)?.map_or(0, |last| (last + 1) * cluster);
        let named = (content.highest / cluster + 1) * cluster;
        let tables_end = content.tables_end.max(counts.end);
        // Tables of internal snapshots and bitmaps are only known by their refcounts.
        let is_all = head.header.snapshot_count == 0 && head.bitmaps.is_none();
        Ok(Self {
            end: counted.max(named).max(tables_end.next_multiple_of(cluster)),
            tables_end: is_all.then_some(tables_end),
            boundary: cluster.max(PAGE_LEN as u64),
        })
    }

    /// Whether all from `at` on is free, and `at` a place for an index.
    pub(super) fn is_free_from(&self, at: HostOffset) -> bool {
        at.get() >= self.end && at.get().is_multiple_of(self.boundary)
    }

    /// The first place for an index, behind which lies nothing that any tool would miss; `None` where there may be tables that
    /// only refcounts tell of.
    pub(super) fn first_free(&self) -> Option<HostOffset> {
        self.tables_end.map(|_| HostOffset::new(self.end.next_multiple_of(self.boundary)))
    }

    /// The first place for an index behind a file of `len` bytes.
    pub(super) fn place_behind(&self, len: u64) -> HostOffset {
        HostOffset::new(len.next_multiple_of(self.boundary))
    }

    /// Where the file ends without its last index, all behind whose start is free.
    ///
    /// That is where it ended before, if nobody has used the rest of its last cluster since. Whoever writes a cluster in
    /// place leaves no trace in any table, and a table must not be cut short.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(super) fn len_without(&self, store: &dyn Store, root: &Root) -> Result<u64> {
        let (before, start) = (root.len_before, root.area.start.get());
        let is_sound = self.tables_end.is_some_and(|end| end <= before) && start - before < self.boundary;
        if !is_sound {
            return Ok(start);
        }
        let mut rest = vec![0; usize::try_from(start - before).expect("less than a cluster")];
        store.read_exact(&mut rest, HostOffset::new(before)).while_trying("read the last cluster")?;
        Ok(if rest.iter().all(|&byte| byte == 0) { before } else { start })
    }
}

/// The refcount table of a file.
struct Refcounts {
    table: Vec<u8>,
    /// Where the last block, or the table, ends.
    end: u64,
}

impl Refcounts {
    /// # Errors
    /// A table that cannot be read, breaks the format, or names a block more than once, which no tool makes and which would
    /// be read over and over.
    fn read(store: &dyn Store, header: &Header) -> Result<Self> {
        let mut table = vec![0; header.refcount_table_entries() * 8];
        let at = header.refcount_table_offset;
        store.read_padded(&mut table, at).while_trying("read the refcount table")?;
        let mut end = at.get() + table.len() as u64;
        let mut met = HashSet::new();
        for raw in words(&table).filter(|&raw| raw != 0) {
            let Some(block) = block_of(raw, header)? else { continue };
            if !met.insert(block) {
                return Err(
                    ErrorKind::NotIndexable { reason: "several entries name one refcount block" }.into()
                );
            }
            end = end.max(block.get() + header.cluster_bits.size());
        }
        Ok(Self { table, end })
    }

    /// Number of the last cluster whose refcount is not 0.
    fn last_counted(&self, store: &dyn Store, header: &Header) -> Result<Option<u64>> {
        let mut budget = TableBudget::of(store)?;
        let mut block = vec![0; usize::try_from(header.cluster_bits.size()).expect("at most 2 MiB")];
        let per_block = header.refcount_order.entries_per_block(header.cluster_bits);
        let entries: Vec<u64> = words(&self.table).collect();
        for (number, raw) in entries.into_iter().enumerate().rev() {
            let Some(at) = block_of(raw, header)? else { continue };
            budget.take(block.len() as u64)?;
            store.read_padded(&mut block, at).while_trying("read a refcount block").map_err(|e| e.at(at))?;
            // Whole words first: most blocks that are all zero are found to be so at once.
            if words(&block).all(|word| word == 0) {
                continue;
            }
            let is_counted = |&index: &usize| header.refcount_order.get(&block, index) != 0;
            let last = (0..per_block).rev().find(is_counted).expect("a bit is set");
            return Ok(Some((number * per_block + last) as u64));
        }
        Ok(None)
    }
}

fn block_of(raw: u64, header: &Header) -> Result<Option<HostOffset>> {
    let entry = decode_table_entry(raw, header.cluster_bits);
    entry.map_err(|entry| ErrorKind::Entry { table: "refcount table", entry }.into())
}
