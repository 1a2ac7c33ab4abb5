//! A frozen layer: a file that no one changes while a disk stands on it.
//!
//! A layer that no one reads costs its path and a few dozen bytes. Its file is opened on first use, and closed
//! again when more files are open than the process allows itself ([`crate::files`]); when it is opened again it must
//! still be the file it was. Layers are shared: every disk that stands on a file holds the same [`Layer`].

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use parking_lot::RwLock;
pub(crate) use vmstrata_qcow2::entry::words;
use vmstrata_qcow2::{CompressionType, EntryFormat, Geometry, Header, RawEntry};
use vmstrata_store::{FileIdentity, OpenStore, Store};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, HostOffset};

use crate::error::{ErrorKind, IoContext as _, Result};
use crate::head::{raw_size, read_head};
pub use crate::names::Format;
use crate::window::Window;

/// What is needed to walk the tables of a qcow2 file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) version: u32,
    pub(crate) l1_at: HostOffset,
    pub(crate) l1_entries: u32,
    pub(crate) entries: EntryFormat,
    pub(crate) geometry: Geometry,
    pub(crate) compression: CompressionType,
}

impl Tables {
    pub(crate) fn of(header: &Header) -> Self {
        Self {
            version: header.version,
            l1_at: header.l1_table_offset,
            l1_entries: header.l1_size,
            entries: header.entry_format(),
            geometry: header.geometry(),
            compression: header.compression_type,
        }
    }

    /// Where the L2 entry of the cluster that holds `at` lies, in the table that this L1 entry leads to, if there is one.
    pub(crate) fn entry_place(&self, l1_entry: u64, at: GuestOffset) -> Result<Option<HostOffset>> {
        let table = table_of(self, l1_entry, u64::MAX)?;
        Ok(table.map(|table| table + (self.geometry.l2_index(at) * self.entries.entry_len()) as u64))
    }
}

/// Who writes entries of a layer's tables excludes those who read them: the host does not keep the two words of an extended entry
/// together.
pub(crate) type TablesLock = Arc<RwLock<()>>;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) path: Box<Path>,
    pub(crate) identity: FileIdentity,
    /// Virtual size in bytes.
    pub(crate) size: u64,
    /// `None` for a raw file.
    pub(crate) tables: Option<Tables>,
    /// What of the file it is; `None` for all.
    pub(crate) window: Option<Window>,
    /// Present while its file may get longer: a snapshot is bringing it to stable storage, or a merge writes it. The file stays open.
    pub(crate) growing: Option<TablesLock>,
    /// Whether size and tables are what an index says, and the file has not been asked yet.
    is_unverified: AtomicBool,
    file: ArcSwapOption<OpenStore>,
    /// Set on use, cleared by the table's clock hand.
    used: AtomicBool,
    /// Whether the file stays open, and so locked, also while it is not read.
    held: AtomicBool,
}

/// Bytes of a table looked at together while scanning: a cache line.
const LINE: usize = 64;
/// L1 entries read in one go while scanning.
const L1_BATCH: usize = 4096;

impl Layer {
    /// A layer whose file is not open yet.
    pub(crate) fn new(path: PathBuf, identity: FileIdentity, size: u64, tables: Option<Tables>) -> Self {
        Self {
            path: path.into_boxed_path(),
            identity,
            size,
            tables,
            window: None,
            growing: None,
            is_unverified: AtomicBool::new(false),
            file: ArcSwapOption::empty(),
            used: AtomicBool::new(false),
            held: AtomicBool::new(false),
        }
    }

    /// The same layer in a part of the file.
    pub(crate) fn in_window(self, window: Option<Window>) -> Self {
        Self { window, ..self }
    }

    /// The same layer while its file may get longer.
    pub(crate) fn growing(&self) -> Self {
        let layer = Self::new(self.path.to_path_buf(), self.identity, self.size, self.tables);
        Self { growing: Some(TablesLock::default()), ..layer }
    }

    /// Bytes before which its tables and clusters lie.
    pub(crate) fn len_max(&self) -> u64 {
        if self.growing.is_some() { u64::MAX } else { self.identity.len }
    }

    /// The same, known from an index only: the file is asked when it is opened.
    pub(crate) fn into_unverified(self) -> Self {
        Self { is_unverified: AtomicBool::new(true), ..self }
    }

    /// Whether it has not been compared with its file's header yet.
    pub(crate) fn is_unverified(&self) -> bool {
        self.is_unverified.load(Ordering::Relaxed)
    }

    /// Makes sure that the file says of itself what this layer says.
    ///
    /// # Errors
    /// [`ErrorKind::Changed`], and a header that cannot be read.
    pub(crate) fn confirm(&self, store: &dyn Store, file_len: u64) -> Result<()> {
        if !self.is_unverified() {
            return Ok(());
        }
        let (size, tables) = match self.tables {
            Some(_) => {
                let header = read_head(store, file_len)?.header;
                (header.size, Some(Tables::of(&header)))
            }
            None => (raw_size(file_len), None),
        };
        if (size, tables) != (self.size, self.tables) {
            return Err(ErrorKind::Changed.into());
        }
        self.is_unverified.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Whether both read the same file in the same way.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (&self.path, self.identity, self.size, self.tables, self.window)
            == (&other.path, other.identity, other.size, other.tables, other.window)
    }

    pub(crate) fn format(&self) -> Format {
        if self.tables.is_some() { Format::Qcow2 } else { Format::Raw }
    }

    /// Size of its clusters; a raw file has none.
    pub(crate) fn cluster_bits(&self) -> Option<ClusterBits> {
        self.tables.as_ref().map(|tables| tables.geometry.cluster_bits)
    }

    /// The smallest run that its tables tell apart, a cluster or a subcluster; a raw file has none.
    pub(crate) fn unit(&self) -> Option<ClusterBits> {
        self.tables.as_ref().map(|tables| tables.geometry.unit())
    }

    /// The open file, if it is open.
    #[inline]
    pub(crate) fn open_file(&self) -> Option<Arc<OpenStore>> {
        let store = self.file.load_full()?;
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        Some(store)
    }

    /// Puts the open file in, or takes it out; requests under way keep theirs.
    pub(crate) fn put_file(&self, file: Option<Arc<OpenStore>>) {
        self.file.store(file);
    }

    /// Asks for the file to stay open, and so locked, as long as there is room for any.
    pub(crate) fn hold(&self) {
        self.held.store(true, Ordering::Relaxed);
    }

    /// Whether the file was used since the last call, or is wanted open in any case.
    pub(crate) fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed) || self.held.load(Ordering::Relaxed)
    }

    /// Calls `visit` with guest offset and raw L2 entry of every cluster in `range` that the layer's tables say
    /// anything about.
    ///
    /// Reads only the tables that the range needs, in as few reads as they allow; `scratch` is reused.
    ///
    /// # Errors
    /// A file that cannot be read, or an L1 entry that breaks the format or points past the end of the file.
    ///
    /// # Panics
    /// On a raw layer, which has no tables.
    pub(crate) fn scan(
        &self,
        store: &dyn Store,
        range: GuestRange,
        scratch: &mut Scratch,
        visit: &mut impl FnMut(GuestOffset, RawEntry),
    ) -> Result<()> {
        let tables = self.tables.as_ref().expect("a raw layer has no tables");
        let geometry = tables.geometry;
        let end = range.end().get().min(self.size);
        if range.start.get() >= end {
            return Ok(());
        }
        let first = geometry.l1_index(range.start);
        let last = geometry.l1_index(GuestOffset::new(end - 1)).min(tables.l1_entries as usize - 1);
        let mut batch = first;
        while batch <= last {
            let count = (last - batch + 1).min(L1_BATCH);
            let at = tables.l1_at + batch as u64 * 8;
            scratch.l1.resize(count * 8, 0);
            store.read_padded(&mut scratch.l1, at).while_trying("read the L1 table").map_err(|e| e.at(at))?;
            for (number, raw) in words(&scratch.l1).enumerate().filter(|&(_, raw)| raw != 0) {
                let l1_index = batch + number;
                let table =
                    table_of(tables, raw, self.len_max()).map_err(|e| e.at(at + number as u64 * 8))?;
                let Some(table) = table else { continue };
                self.scan_table(store, table, l1_index, range, &mut scratch.l2, visit)?;
            }
            batch += count;
        }
        Ok(())
    }

    fn scan_table(
        &self,
        store: &dyn Store,
        table: HostOffset,
        l1_index: usize,
        range: GuestRange,
        buf: &mut Vec<u8>,
        visit: &mut impl FnMut(GuestOffset, RawEntry),
    ) -> Result<()> {
        let Tables { geometry, entries, .. } = *self.tables.as_ref().expect("a raw layer has no tables");
        let len = entries.entry_len();
        let span_start = geometry.guest_offset(l1_index, 0);
        let start = range.start.max(span_start);
        let end = range.end().get().min(span_start.get() + geometry.l2_span()).min(self.size);
        let first = geometry.l2_index(start);
        let count = geometry.l2_index(GuestOffset::new(end - 1)) + 1 - first;
        buf.resize(count * len, 0);
        let at = table + (first * len) as u64;
        let whole = self.growing.as_ref().map(|lock| lock.read());
        store.read_padded(buf, at).while_trying("read an L2 table").map_err(|e| e.at(at))?;
        drop(whole);
        for (line, bytes) in buf.chunks(LINE).enumerate() {
            // Most of a long chain's entries are zero: skip them a cache line at a time.
            if words(bytes).fold(0, |any, raw| any | raw) == 0 {
                continue;
            }
            for (number, raw) in entries.raw_entries(bytes).enumerate().filter(|(_, raw)| !raw.is_empty()) {
                visit(geometry.guest_offset(l1_index, first + line * (LINE / len) + number), raw);
            }
        }
        Ok(())
    }

    /// Where the L2 entry of the cluster that holds `at` lies, if its table is there.
    ///
    /// # Errors
    /// As [`Layer::scan`].
    pub(crate) fn entry_place(&self, store: &dyn Store, at: GuestOffset) -> Result<Option<HostOffset>> {
        let Some(tables) = &self.tables else { return Ok(None) };
        let mut entry = [0; 8];
        let place = tables.l1_at + tables.geometry.l1_index(at) as u64 * 8;
        store.read_padded(&mut entry, place).while_trying("read the L1 table").map_err(|e| e.at(place))?;
        tables.entry_place(u64::from_be_bytes(entry), at)
    }

    /// The raw L2 entry of the cluster that holds `at`; empty where there is no table.
    ///
    /// # Errors
    /// As [`Layer::scan`].
    pub(crate) fn l2_entry(&self, store: &dyn Store, at: GuestOffset) -> Result<RawEntry> {
        let mut found = RawEntry::EMPTY;
        self.scan(store, GuestRange::new(at, 1), &mut Scratch::default(), &mut |_, raw| found = raw)?;
        Ok(found)
    }
}

/// Buffers that scans reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    l1: Vec<u8>,
    l2: Vec<u8>,
}

/// Decodes an L1 entry and makes sure that its table begins in the file; what is missing of the last one reads as zeros. A
/// table that begins past the end is an error, though QEMU reads zeros: what the file had there is lost.
pub(crate) fn table_of(tables: &Tables, raw: u64, file_len: u64) -> Result<Option<HostOffset>> {
    let entry = tables.entries.l1(raw).map_err(|entry| ErrorKind::Entry { table: "L1 table", entry })?;
    match entry.table {
        Some(at) if at.get() >= file_len => {
            Err(ErrorKind::Truncated { what: "an L2 table", at, file_len }.into())
        }
        table => Ok(table),
    }
}
