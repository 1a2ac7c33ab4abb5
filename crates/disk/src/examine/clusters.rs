//! The guest clusters that one layer has something for, from its own tables, whatever lies above and below it.
//!
//! Bounded for hostile images: an L2 table is read once however many L1 entries lead to it, and not at all where the
//! file has a hole, so that no more is read than the file really takes; the L1 table is read in pieces.

use std::collections::HashSet;
use std::path::Path;

use vmstrata_qcow2::L2Entry;
use vmstrata_store::{Gate, Store};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use crate::chain::probe;
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::{Tables, table_of, words};
use crate::opener::{LocalFiles, Opener as _, Role};

/// L1 entries read in one go.
const L1_BATCH: usize = 4096;

/// A guest cluster that a layer answers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnCluster {
    /// The guest's bytes, cut at the end of the disk.
    pub range: GuestRange,
    /// Bytes of the file that nothing but this cluster needs; 0 for zeros without a cluster, and where a refcount
    /// above one lets an internal snapshot keep them.
    pub host_bytes: u64,
}

/// Calls `visit` with every cluster that the qcow2 file `path` has something for, in order of the guest's offsets.
///
/// A raw file has no clusters, and nothing is visited. No lock is taken.
///
/// # Errors
/// A file that cannot be opened or read, or a header or table entry that breaks the format.
pub fn own_clusters(path: &Path, gate: &Gate, mut visit: impl FnMut(OwnCluster)) -> Result<()> {
    let opened = LocalFiles.open(path, Role::Inspected, gate)?;
    let mut scan = || -> Result<()> {
        let store = &*opened.store;
        let Some(head) = probe(store, opened.identity.len)? else { return Ok(()) };
        let scan = Scan {
            store,
            tables: Tables::of(&head.header),
            size: head.header.size,
            file_len: opened.identity.len,
            has_snapshots: head.header.snapshot_count > 0,
        };
        scan.run(&mut visit)
    };
    scan().map_err(|error| error.in_file(path))
}

struct Scan<'a> {
    store: &'a dyn Store,
    tables: Tables,
    size: u64,
    file_len: u64,
    has_snapshots: bool,
}

impl Scan<'_> {
    fn run(&self, visit: &mut impl FnMut(OwnCluster)) -> Result<()> {
        let mut seen = HashSet::new();
        let mut table_bytes = vec![0; self.cluster() as usize];
        let mut bytes = Vec::new();
        let entries = self.tables.l1_entries as usize;
        for first in (0..entries).step_by(L1_BATCH) {
            let at = self.tables.l1_at + first as u64 * 8;
            bytes.resize((entries - first).min(L1_BATCH) * 8, 0);
            self.store.read_exact(&mut bytes, at).while_trying("read the L1 table").map_err(|e| e.at(at))?;
            for (number, raw) in words(&bytes).enumerate().filter(|&(_, raw)| raw != 0) {
                let table = table_of(&self.tables, raw, self.file_len)
                    .map_err(|error| error.at(at + number as u64 * 8))?;
                if let Some(table) = table.filter(|table| seen.insert(*table)) {
                    self.table(table, first + number, &mut table_bytes, visit)?;
                }
            }
        }
        Ok(())
    }

    fn cluster(&self) -> u64 {
        self.tables.geometry.cluster_bits.size()
    }

    fn table(
        &self,
        table: HostOffset,
        l1_index: usize,
        bytes: &mut [u8],
        visit: &mut impl FnMut(OwnCluster),
    ) -> Result<()> {
        let mut read = || -> std::io::Result<bool> {
            let (is_data, end) = self.store.extent(table)?;
            if !is_data && end >= table + self.cluster() {
                return Ok(false);
            }
            self.store.read_exact(bytes, table).map(|()| true)
        };
        if !read().while_trying("read an L2 table").map_err(|error| error.at(table))? {
            return Ok(());
        }
        for (index, raw) in words(bytes).enumerate().filter(|&(_, raw)| raw != 0) {
            let at = self.tables.geometry.guest_offset(l1_index, index);
            if at.get() >= self.size {
                break;
            }
            let entry = self.tables.entries.l2(raw).map_err(|entry| {
                crate::Error::from(ErrorKind::Entry { table: "L2 table", entry }).at(table + index as u64 * 8)
            })?;
            if let Some(host_bytes) = self.host_bytes(entry) {
                visit(OwnCluster { range: self.range(at), host_bytes });
            }
        }
        Ok(())
    }

    fn range(&self, at: GuestOffset) -> GuestRange {
        GuestRange::new(at, self.cluster().min(self.size - at.get()))
    }

    /// `None` where the entry says nothing.
    fn host_bytes(&self, entry: L2Entry) -> Option<u64> {
        match entry {
            L2Entry::Unallocated => None,
            L2Entry::Data { copied: true, .. } | L2Entry::Zero { host: Some(_), copied: true } => {
                Some(self.cluster())
            }
            L2Entry::Data { .. } | L2Entry::Zero { .. } => Some(0),
            // A compressed cluster's entry does not tell its refcount.
            L2Entry::Compressed { .. } if self.has_snapshots => Some(0),
            L2Entry::Compressed { len, .. } => Some(len),
        }
    }
}
