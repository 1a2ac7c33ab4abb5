//! Everything that references clusters without being an L2 table: the header, L1 tables, snapshots, bitmaps.
//!
//! Place in the data flow: [`count_roots`] counts what these reference and hands the L2 tables it met, each once
//! however many L1 entries lead to it, to [`super::entries`]. Work is bounded for hostile images: tables are read
//! in pieces, holes are skipped, and L1 tables or bitmaps laid over each other are given up past a fixed number
//! of bytes.

use vmstrata_qcow2::entry::{COPIED, EntryError, L1_RESERVED, OFFSET_MASK};
use vmstrata_qcow2::{ParseError, bitmap};
use vmstrata_types::HostOffset;

use crate::counts::{Counts, Use};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::finding::{FindingKind, PAST_END_L2};
use crate::image::{Image, Region};
use crate::refcounts::DiskRefcounts;
use crate::report::Tally;
use crate::snapshots::read_snapshots;
use vmstrata_qcow2::entry::words;

/// Bytes of tables read at once.
const PIECE: u64 = 1 << 20;
/// Most bytes of snapshots' L1 tables, and of bitmap tables, that are walked: sane images have far less.
const TABLE_BYTES_MAX: u64 = 4 << 30;
/// L2 tables met before duplicates are merged.
const MERGE_AT: usize = 1 << 20;
/// Most bytes of L2 tables off a cluster boundary, which may lie over each other, that are walked.
const MISALIGNED_BYTES_MAX: u64 = 32 << 20;

/// An L2 table and how many L1 entries lead to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TableRef {
    /// Where it lies.
    pub(crate) offset: u64,
    /// Entries of the active L1 table.
    pub(crate) active: u32,
    /// Entries of the L1 tables of snapshots.
    pub(crate) inactive: u32,
}

impl TableRef {
    /// L1 entries in all.
    pub(crate) fn weight(&self) -> u64 {
        u64::from(self.active) + u64::from(self.inactive)
    }
}

/// L2 tables met so far, sorted and merged now and then.
#[derive(Debug, Default)]
struct TableRefs {
    refs: Vec<TableRef>,
    merged: usize,
    misaligned_bytes: u64,
}

impl TableRefs {
    fn add(&mut self, table: TableRef) {
        self.refs.push(table);
        if self.refs.len() - self.merged >= MERGE_AT.max(self.merged) {
            self.merge();
        }
    }

    fn merge(&mut self) {
        self.refs.sort_unstable();
        self.refs.dedup_by(|next, kept| {
            let same = next.offset == kept.offset;
            if same {
                kept.active = kept.active.saturating_add(next.active);
                kept.inactive = kept.inactive.saturating_add(next.inactive);
            }
            same
        });
        self.merged = self.refs.len();
    }
}

/// Which L1 table is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tree {
    Active,
    Snapshot,
}

/// Counts everything but L2 tables' entries and the refcount structures; returns the L2 tables, sorted.
///
/// Where snapshots or bitmaps are not readable the tally says so, and what they hold will seem leaked.
///
/// # Errors
/// Whatever the store reports; more L2 tables than the memory limit allows.
pub(crate) fn count_roots(
    image: &Image<'_>,
    counts: &Counts,
    disk: &DiskRefcounts,
    tally: &mut Tally,
) -> Result<Vec<TableRef>> {
    let header = &image.header;
    let cluster = Region { start: HostOffset::ZERO, len: image.bits().size() };
    image.count_exclusive(counts, tally, cluster, "the header");
    let snapshots = read_snapshots(image, tally)?;
    let mut walk = Walk { image, counts, disk, tally, tables: TableRefs::default() };
    walk.l1_table(Tree::Active, header.l1_table_offset, header.l1_size)?;
    let table_bytes: u64 = snapshots.list.iter().map(|snapshot| u64::from(snapshot.l1_size) * 8).sum();
    if table_bytes > TABLE_BYTES_MAX {
        walk.tally.add(header.snapshots_offset, FindingKind::SnapshotsOverlap);
    } else {
        for snapshot in &snapshots.list {
            walk.l1_table(Tree::Snapshot, snapshot.l1_table_offset, snapshot.l1_size)?;
        }
    }
    let table = Region { start: header.snapshots_offset, len: snapshots.table_len };
    image.count_exclusive(counts, walk.tally, table, "the snapshot table");
    walk.bitmaps()?;
    let mut tables = walk.tables;
    tables.merge();
    Ok(tables.refs)
}

struct Walk<'a> {
    image: &'a Image<'a>,
    counts: &'a Counts,
    disk: &'a DiskRefcounts,
    tally: &'a mut Tally,
    tables: TableRefs,
}

impl Walk<'_> {
    /// Calls `visit` with offset and raw value of each entry of a table that is not zero.
    fn for_each_entry(
        &mut self,
        start: HostOffset,
        entries: u32,
        mut visit: impl FnMut(&mut Self, HostOffset, u64),
    ) -> Result<()> {
        let len = u64::from(entries) * 8;
        let mut buf = Vec::new();
        for skip in (0..len).step_by(PIECE as usize) {
            let (at, piece) = (start + skip, PIECE.min(len - skip));
            if self.image.is_hole(at, piece)? {
                continue;
            }
            buf.resize(piece as usize, 0);
            self.image.store.read_padded(&mut buf, at).while_trying("read a table").map_err(|e| e.at(at))?;
            for (number, raw) in words(&buf).enumerate().filter(|&(_, raw)| raw != 0) {
                visit(self, at + number as u64 * 8, raw);
            }
        }
        Ok(())
    }

    fn l1_table(&mut self, tree: Tree, start: HostOffset, entries: u32) -> Result<()> {
        let region = Region { start, len: u64::from(entries) * 8 };
        self.image.count_exclusive(self.counts, self.tally, region, "an L1 table");
        self.for_each_entry(start, entries, |walk, at, raw| walk.l1_entry(tree, at, raw))?;
        let tables_bytes = (self.tables.refs.len() * size_of::<TableRef>()) as u64;
        if tables_bytes > self.image.options.memory_bytes_max.max((MERGE_AT * 64) as u64) {
            return Err(ErrorKind::Memory { bytes_max: self.image.options.memory_bytes_max }.into());
        }
        Ok(())
    }

    fn l1_entry(&mut self, tree: Tree, at: HostOffset, raw: u64) {
        if raw & L1_RESERVED != 0 {
            let error = EntryError::Reserved { raw, bits: raw & L1_RESERVED };
            self.tally.add(at, FindingKind::L1Entry(error));
        }
        let (offset, flag) = (HostOffset::new(raw & OFFSET_MASK), raw & COPIED != 0);
        if offset == HostOffset::ZERO {
            if raw == COPIED {
                self.tally.add(at, FindingKind::L1Entry(EntryError::CopiedWithoutOffset { raw }));
            }
            return;
        }
        if tree == Tree::Active && self.disk.is_one(offset.get() >> self.image.bits().get()) != flag {
            self.tally.add(at, FindingKind::L1Copied { flag, table: offset });
        }
        let aligned = offset.is_aligned(self.image.bits());
        if !aligned {
            self.tally.add(at, FindingKind::L1Entry(EntryError::Misaligned { raw, offset }));
            self.tables.misaligned_bytes += self.image.bits().size();
        }
        let region = Region { start: offset, len: self.image.bits().size() };
        if !self.image.count(self.counts, region, 1, Use::Table) {
            self.tally.add(at, FindingKind::PastEnd { what: PAST_END_L2, start: offset, len: region.len });
        } else if aligned || self.tables.misaligned_bytes <= MISALIGNED_BYTES_MAX {
            let active = u32::from(tree == Tree::Active);
            self.tables.add(TableRef { offset: offset.get(), active, inactive: 1 - active });
        }
    }

    /// Counts the bitmap directory, bitmap tables and bitmaps.
    fn bitmaps(&mut self) -> Result<()> {
        let Some(extension) = self.image.bitmaps.clone() else { return Ok(()) };
        let (image, note) = (self.image, |walk: &mut Self, error: ParseError| {
            walk.tally.add(HostOffset::new(error.offset), FindingKind::Bitmaps(error));
            Ok(())
        });
        let extension = match extension {
            Ok(extension) => extension,
            Err(error) => return note(self, error),
        };
        let region = Region { start: extension.directory_offset, len: extension.directory_len };
        image.count_exclusive(self.counts, self.tally, region, "the bitmap directory");
        let mut directory = vec![0; extension.directory_len as usize];
        let read = image.store.read_padded(&mut directory, region.start);
        read.while_trying("read the bitmap directory").map_err(|error| error.at(region.start))?;
        let lenient = image.file_len.saturating_add(image.bits().size() - 1);
        let bitmaps = match extension.parse_directory(&directory, &image.header, lenient) {
            Ok(bitmaps) => bitmaps,
            Err(error) => return note(self, error),
        };
        if bitmaps.iter().map(|bitmap| u64::from(bitmap.table_size) * 8).sum::<u64>() > TABLE_BYTES_MAX {
            self.tally.add(region.start, FindingKind::BitmapsOverlap);
            return Ok(());
        }
        bitmaps.iter().try_for_each(|bitmap| self.bitmap(bitmap))
    }

    fn bitmap(&mut self, bitmap: &bitmap::Bitmap) -> Result<()> {
        let (start, bits) = (bitmap.table_offset, self.image.bits());
        let region = Region { start, len: u64::from(bitmap.table_size) * 8 };
        self.image.count_exclusive(self.counts, self.tally, region, "a bitmap table");
        self.for_each_entry(start, bitmap.table_size, |walk, at, raw| {
            match bitmap::decode_table_entry(raw, bits) {
                Ok(None) => {}
                Ok(Some(start)) => {
                    let region = Region { start, len: bits.size() };
                    walk.image.count_exclusive(walk.counts, walk.tally, region, "a bitmap");
                }
                Err(error) => walk.tally.add(at, FindingKind::BitmapEntry(error)),
            }
        })
    }
}
