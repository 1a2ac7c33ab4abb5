//! The guest clusters that one layer has something for, from its own tables, whatever lies above and below it.
//!
//! Bounded for hostile images: an L2 table is read once however many L1 entries lead to it, and not at all where the
//! file has a hole, so that no more is read than the file really takes; the L1 table is read in pieces.

use std::collections::HashSet;
use std::path::Path;

use vmstrata_qcow2::{Header, L2Entry, RawEntry, SubclusterState, Subclusters};
use vmstrata_store::{Gate, Store};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset, LayerIndex};

use crate::chain::{has_magic, read_head};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::{Tables, table_of, words};
use crate::map::{Run, Source};
use crate::merging::holes::Holes;
use crate::opener::{LocalFiles, Opener as _, Role};

/// L1 entries read in one go.
const L1_BATCH: usize = 4096;

/// A guest cluster that a layer answers for, or subclusters of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnCluster {
    /// The guest's bytes, cut at the end of the disk.
    pub range: GuestRange,
    /// Bytes that the host has for the file and that nothing but these needs; none in its holes, for zeros without a
    /// cluster, and where a refcount above one lets an internal snapshot keep them.
    pub host_bytes: u64,
}

/// Calls `visit` with every cluster that the qcow2 file `path` has something for, in order of the guest's offsets.
///
/// A raw file has no clusters, and nothing is visited. No lock is taken.
///
/// # Errors
/// A file that cannot be opened or read, a header or table entry that breaks the format, or a cluster past the file's end.
pub fn own_clusters(path: &Path, gate: &Gate, mut visit: impl FnMut(OwnCluster)) -> Result<()> {
    let opened = LocalFiles.open(path, Role::Inspected, gate)?;
    let mut scan = || -> Result<()> {
        let store = &*opened.store;
        if !has_magic(store)? {
            return Ok(());
        }
        let head = read_head(store, opened.identity.len)?;
        Scan::new(store, &head.header)?.run(&mut visit)
    };
    scan().map_err(|error| error.in_file(path))
}

/// Makes sure that every L2 table lies within the file.
///
/// # Errors
/// A file that cannot be read, an L1 entry that breaks the format or leads past the file's end.
pub(super) fn check_l1(store: &dyn Store, header: &Header) -> Result<()> {
    Scan::new(store, header)?.l1(&mut |_, _| Ok(()))
}

struct Scan<'a> {
    store: &'a dyn Store,
    tables: Tables,
    size: u64,
    file_len: u64,
    has_snapshots: bool,
    holes: Holes,
}

impl<'a> Scan<'a> {
    fn new(store: &'a dyn Store, header: &Header) -> Result<Self> {
        Ok(Self {
            store,
            tables: Tables::of(header),
            size: header.size,
            file_len: store.len().while_trying("read the file's length")?,
            has_snapshots: header.snapshot_count > 0,
            holes: Holes::default(),
        })
    }

    fn run(&self, visit: &mut impl FnMut(OwnCluster)) -> Result<()> {
        let mut seen = HashSet::new();
        let mut table_bytes = vec![0; self.cluster() as usize];
        self.l1(&mut |l1_index, table| match seen.insert(table) {
            true => self.table(table, l1_index, &mut table_bytes, visit),
            false => Ok(()),
        })
    }

    /// Calls `visit` with the index and the L2 table of every L1 entry that has one.
    fn l1(&self, visit: &mut impl FnMut(usize, HostOffset) -> Result<()>) -> Result<()> {
        let mut bytes = Vec::new();
        let entries = self.tables.l1_entries as usize;
        for first in (0..entries).step_by(L1_BATCH) {
            let at = self.tables.l1_at + first as u64 * 8;
            bytes.resize((entries - first).min(L1_BATCH) * 8, 0);
            if self.is_hole(at, bytes.len() as u64).while_trying("read the L1 table").map_err(|e| e.at(at))? {
                continue;
            }
            self.store.read_padded(&mut bytes, at).while_trying("read the L1 table").map_err(|e| e.at(at))?;
            for (number, raw) in words(&bytes).enumerate().filter(|&(_, raw)| raw != 0) {
                let table = table_of(&self.tables, raw, self.file_len)
                    .map_err(|error| error.at(at + number as u64 * 8))?;
                if let Some(table) = table {
                    visit(first + number, table)?;
                }
            }
        }
        Ok(())
    }

    fn cluster(&self) -> u64 {
        self.tables.geometry.cluster_bits.size()
    }

    /// Whether the file has nothing but a hole in the `len` bytes at `at`.
    fn is_hole(&self, at: HostOffset, len: u64) -> std::io::Result<bool> {
        let (is_data, end) = self.store.extent(at)?;
        Ok(!is_data && end >= at + len)
    }

    fn table(
        &self,
        table: HostOffset,
        l1_index: usize,
        bytes: &mut [u8],
        visit: &mut impl FnMut(OwnCluster),
    ) -> Result<()> {
        let mut read = || -> std::io::Result<bool> {
            if self.is_hole(table, self.cluster())? {
                return Ok(false);
            }
            self.store.read_padded(bytes, table).map(|()| true)
        };
        if !read().while_trying("read an L2 table").map_err(|error| error.at(table))? {
            return Ok(());
        }
        let entries = self.tables.entries;
        for (index, raw) in entries.raw_entries(bytes).enumerate().filter(|(_, raw)| !raw.is_empty()) {
            let at = self.tables.geometry.guest_offset(l1_index, index);
            if at.get() >= self.size {
                break;
            }
            let place = table + (index * entries.entry_len()) as u64;
            match self.entry(raw).map_err(|error| error.at(place))? {
                L2Entry::Subclusters { host, copied, states } => {
                    self.subclusters(at, host.filter(|_| copied), states, visit);
                }
                entry => {
                    if let Some(host_bytes) = self.host_bytes(entry) {
                        visit(OwnCluster { range: self.range(at, self.cluster()), host_bytes });
                    }
                }
            }
        }
        Ok(())
    }

    /// Visits the subclusters of the cluster at `at` for which the layer has something; `host` is a cluster of its own.
    fn subclusters(
        &self,
        at: GuestOffset,
        host: Option<HostOffset>,
        states: Subclusters,
        visit: &mut impl FnMut(OwnCluster),
    ) {
        let unit = self.tables.geometry.unit().size();
        for (first, count, state) in states.runs() {
            let (start, len) = (u64::from(first) * unit, u64::from(count) * unit);
            if state != SubclusterState::Unallocated && at.get() + start < self.size {
                let host_bytes = host.map_or(0, |host| self.on_host(host + start, len));
                visit(OwnCluster { range: self.range(at + start, len), host_bytes });
            }
        }
    }

    /// The last cluster of a file may be cut short, and reads as zeros behind that; none begins past the end.
    fn entry(&self, raw: RawEntry) -> Result<L2Entry> {
        let entry =
            self.tables.entries.l2(raw).map_err(|entry| ErrorKind::Entry { table: "L2 table", entry })?;
        let (what, at) = match entry {
            L2Entry::Data { host, .. } => ("a data cluster", host),
            L2Entry::Compressed { host, .. } => ("a compressed cluster", host),
            L2Entry::Subclusters { host: Some(host), states, .. } if states.allocated != 0 => {
                ("a data cluster", host)
            }
            L2Entry::Unallocated | L2Entry::Zero { .. } | L2Entry::Subclusters { .. } => return Ok(entry),
        };
        if at.get() >= self.file_len {
            return Err(ErrorKind::Truncated { what, at, file_len: self.file_len }.into());
        }
        Ok(entry)
    }

    fn range(&self, at: GuestOffset, len: u64) -> GuestRange {
        GuestRange::new(at, len.min(self.size - at.get()))
    }

    /// Bytes that the host has for `len` bytes at `at`.
    fn on_host(&self, at: HostOffset, len: u64) -> u64 {
        let (mut done, mut there) = (0, 0);
        while done < len {
            let run = Run { source: Source::Data(LayerIndex::BASE, at + done), len: len - done };
            let run = self.holes.cut(run, |_, at| self.store.extent(at).ok());
            there += if run.source.is_zero() { 0 } else { run.len };
            done += run.len;
        }
        there
    }

    /// `None` where the entry says nothing; of a cluster that is one thing.
    fn host_bytes(&self, entry: L2Entry) -> Option<u64> {
        match entry {
            L2Entry::Unallocated | L2Entry::Subclusters { .. } => None,
            L2Entry::Data { host, copied: true } | L2Entry::Zero { host: Some(host), copied: true } => {
                Some(self.on_host(host, self.cluster()))
            }
            L2Entry::Data { .. } | L2Entry::Zero { .. } => Some(0),
            // A compressed cluster's entry does not tell its refcount.
            L2Entry::Compressed { .. } if self.has_snapshots => Some(0),
            L2Entry::Compressed { len, .. } => Some(len),
        }
    }
}
