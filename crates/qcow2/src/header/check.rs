//! Where a header's tables may lie and how large they may be.

use vmstrata_types::HostOffset;

use super::{Header, MAX_L1_ENTRIES, MAX_REFCOUNT_TABLE_BYTES, MAX_SNAPSHOTS, field};
use crate::entry::HOST_OFFSET_LIMIT;
use crate::error::{ParseError, ParseErrorKind};
use crate::geometry::ENTRY_LEN;
use crate::snapshot::MIN_ENTRY_LEN;

/// A table the header points at, and the fields that do so.
struct Table {
    name: &'static str,
    offset_field: &'static str,
    offset_at: u64,
    count_field: &'static str,
    count_at: u64,
    offset: HostOffset,
    count: u64,
    max_count: u64,
    /// Bytes of one entry, at least.
    entry_len: u64,
    /// Whether it may lie past the end of the file: it was never written then, and reads as zeros.
    may_be_past_end: bool,
}

impl Table {
    fn len(&self) -> u64 {
        self.count * self.entry_len
    }

    /// The first byte after the table; the offset is an untrusted 64-bit number.
    fn end(&self) -> u64 {
        self.offset.get().saturating_add(self.len())
    }

    fn fail(&self, kind: ParseErrorKind) -> Result<(), ParseError> {
        Err(ParseError::new(self.offset_field, self.offset_at, kind))
    }

    fn check(&self, header: &Header, file_len: u64) -> Result<(), ParseError> {
        if self.count > self.max_count {
            let kind = ParseErrorKind::OutOfRange { value: self.count, min: 0, max: self.max_count };
            return Err(ParseError::new(self.count_field, self.count_at, kind));
        }
        let (value, alignment) = (self.offset.get(), header.cluster_bits.size());
        if !self.offset.is_aligned(header.cluster_bits) {
            return self.fail(ParseErrorKind::Misaligned { value, alignment });
        }
        if self.count == 0 {
            return Ok(());
        }
        if value == 0 {
            return self.fail(ParseErrorKind::Overlaps { other: "header" });
        }
        if self.end() > if self.may_be_past_end { HOST_OFFSET_LIMIT } else { file_len } {
            return self.fail(ParseErrorKind::PastEndOfFile { end: self.end(), file_len });
        }
        Ok(())
    }

    fn check_apart(&self, other: &Table) -> Result<(), ParseError> {
        let apart = self.end() <= other.offset.get() || other.end() <= self.offset.get();
        if apart || self.count == 0 || other.count == 0 {
            return Ok(());
        }
        self.fail(ParseErrorKind::Overlaps { other: other.name })
    }
}

impl Header {
    /// Checks what the header says about its tables.
    ///
    /// # Errors
    /// The first table that is too large, misaligned, over the header or over another table; a snapshot table past the end of
    /// the file; an L1 table that does not reach the end of the disk; no refcount table at all.
    pub(super) fn check_tables(&self, file_len: u64) -> Result<(), ParseError> {
        let refcounts = self.refcount_table();
        if self.refcount_table_clusters == 0 {
            let kind = ParseErrorKind::OutOfRange { value: 0, min: 1, max: refcounts.max_count };
            return Err(ParseError::new(refcounts.count_field, refcounts.count_at, kind));
        }
        let (l1, snapshots) = (self.l1_table(), self.snapshot_table());
        refcounts.check(self, file_len)?;
        l1.check(self, file_len)?;
        self.check_l1_covers_disk()?;
        snapshots.check(self, file_len)?;
        l1.check_apart(&refcounts)?;
        snapshots.check_apart(&refcounts)?;
        snapshots.check_apart(&l1)
    }

    fn check_l1_covers_disk(&self) -> Result<(), ParseError> {
        let (have, needed) = (u64::from(self.l1_size), self.geometry().l1_entries(self.size));
        if have < needed {
            let kind = ParseErrorKind::TableTooSmall { have, needed };
            return Err(ParseError::new("l1_size", field::L1_SIZE, kind));
        }
        Ok(())
    }

    fn refcount_table(&self) -> Table {
        Table {
            name: "refcount table",
            offset_field: "refcount_table_offset",
            offset_at: field::REFCOUNT_TABLE_OFFSET,
            count_field: "refcount_table_clusters",
            count_at: field::REFCOUNT_TABLE_CLUSTERS,
            offset: self.refcount_table_offset,
            count: self.refcount_table_clusters.into(),
            max_count: MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits.get(),
            entry_len: self.cluster_bits.size(),
            may_be_past_end: true,
        }
    }

    fn l1_table(&self) -> Table {
        Table {
            name: "L1 table",
            offset_field: "l1_table_offset",
            offset_at: field::L1_TABLE_OFFSET,
            count_field: "l1_size",
            count_at: field::L1_SIZE,
            offset: self.l1_table_offset,
            count: self.l1_size.into(),
            max_count: MAX_L1_ENTRIES.into(),
            entry_len: ENTRY_LEN,
            may_be_past_end: true,
        }
    }

    fn snapshot_table(&self) -> Table {
        Table {
            name: "snapshot table",
            offset_field: "snapshots_offset",
            offset_at: field::SNAPSHOTS_OFFSET,
            count_field: "nb_snapshots",
            count_at: field::SNAPSHOT_COUNT,
            offset: self.snapshots_offset,
            count: self.snapshot_count.into(),
            max_count: MAX_SNAPSHOTS.into(),
            entry_len: MIN_ENTRY_LEN as u64,
            may_be_past_end: false,
        }
    }
}
