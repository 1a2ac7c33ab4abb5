//! The snapshot table: internal snapshots and where their L1 tables lie.
//!
//! vmstrata neither makes nor loads internal snapshots, but they hold clusters: counting references or
//! frees clusters must walk their tables too.
//!
//! Source: the specification, "Snapshots".

use vmstrata_types::HostOffset;

use crate::bytes::{be16, be32, be64, pad8};
use crate::error::{ParseError, ParseErrorKind};
use crate::geometry::ENTRY_LEN;
use crate::header::{Header, MAX_L1_ENTRIES};

/// Bytes of a table entry before its extra data.
pub const MIN_ENTRY_LEN: usize = 40;
/// Most bytes of extra data in an entry, QEMU's limit.
pub const MAX_EXTRA_LEN: u32 = 1024;
/// Most bytes of a whole table, QEMU's limit: what a caller ever needs to read for [`parse_table`].
pub const MAX_TABLE_LEN: u64 = 64 << 20;

/// An internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its L1 table. Offset 0 only with no entries.
    pub l1_table_offset: HostOffset,
    /// Entries in that table.
    pub l1_size: u32,
    /// Unique ID; bytes that are no UTF-8 are replaced.
    pub id: String,
    /// Name; bytes that are no UTF-8 are replaced.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub date_sec: u32,
    /// The rest of that time, in ns.
    pub date_nsec: u32,
    /// For how long the guest had run then, in ns.
    pub vm_clock_ns: u64,
    /// Instructions that the guest had run then, where QEMU counted them.
    pub icount: Option<u64>,
    /// Bytes of VM state stored behind the end of the disk, 0 for none.
    pub vm_state_size: u64,
    /// Size of the disk in bytes when it was taken.
    pub disk_size: u64,
    /// Bytes of this entry in the table, padding included.
    pub entry_len: usize,
}

/// Parses the snapshot table of an image, whose bytes from `header.snapshots_offset` on are `table`.
///
/// `table` should end with the file or after [`MAX_TABLE_LEN`] bytes. Memory stays in proportion to `table`.
///
/// # Errors
/// An entry cut short, with too much extra data, or with an L1 table that is too large, off a cluster
/// boundary, or past the end of the file.
pub fn parse_table(table: &[u8], header: &Header, file_len: u64) -> Result<Vec<Snapshot>, ParseError> {
    let mut snapshots = Vec::new();
    let mut at = 0;
    for _ in 0..header.snapshot_count {
        let entry =
            Entry { bytes: table.get(at..).unwrap_or_default(), at: header.snapshots_offset + at as u64 };
        let snapshot = entry.parse(header)?;
        entry.check_l1(&snapshot, header, file_len)?;
        at += snapshot.entry_len;
        snapshots.push(snapshot);
    }
    Ok(snapshots)
}

/// Bytes from the start of one entry on, and where that is in the file.
struct Entry<'a> {
    bytes: &'a [u8],
    at: HostOffset,
}

impl Entry<'_> {
    fn fail<T>(&self, field: &'static str, within: u64, kind: ParseErrorKind) -> Result<T, ParseError> {
        Err(ParseError::new(field, (self.at + within).get(), kind))
    }

    fn need(&self, len: usize) -> Result<(), ParseError> {
        let (needed, have) = (len as u64, self.bytes.len() as u64);
        if have < needed {
            return self.fail("snapshot table entry", 0, ParseErrorKind::Truncated { needed, have });
        }
        Ok(())
    }

    fn parse(&self, header: &Header) -> Result<Snapshot, ParseError> {
        self.need(MIN_ENTRY_LEN)?;
        let bytes = self.bytes;
        let extra_len = be32(bytes, 36);
        if extra_len > MAX_EXTRA_LEN {
            let kind =
                ParseErrorKind::OutOfRange { value: extra_len.into(), min: 0, max: MAX_EXTRA_LEN.into() };
            return self.fail("snapshot extra data size", 36, kind);
        }
        let id_at = MIN_ENTRY_LEN + extra_len as usize;
        let name_at = id_at + be16(bytes, 12) as usize;
        let end = name_at + be16(bytes, 14) as usize;
        self.need(end)?;
        Ok(Snapshot {
            l1_table_offset: HostOffset::new(be64(bytes, 0)),
            l1_size: be32(bytes, 8),
            id: String::from_utf8_lossy(&bytes[id_at..name_at]).into_owned(),
            name: String::from_utf8_lossy(&bytes[name_at..end]).into_owned(),
            date_sec: be32(bytes, 16),
            date_nsec: be32(bytes, 20),
            vm_clock_ns: be64(bytes, 24),
            icount: (extra_len >= 24).then(|| be64(bytes, 56)).filter(|&icount| icount != u64::MAX),
            vm_state_size: if extra_len >= 8 { be64(bytes, 40) } else { be32(bytes, 32).into() },
            disk_size: if extra_len >= 16 { be64(bytes, 48) } else { header.size },
            entry_len: pad8(end),
        })
    }

    fn check_l1(&self, snapshot: &Snapshot, header: &Header, file_len: u64) -> Result<(), ParseError> {
        let (value, max) = (u64::from(snapshot.l1_size), u64::from(MAX_L1_ENTRIES));
        if value > max {
            return self.fail("snapshot l1_size", 8, ParseErrorKind::OutOfRange { value, min: 0, max });
        }
        let field = "snapshot l1_table_offset";
        let offset = snapshot.l1_table_offset;
        if !offset.is_aligned(header.cluster_bits) {
            let alignment = header.cluster_bits.size();
            return self.fail(field, 0, ParseErrorKind::Misaligned { value: offset.get(), alignment });
        }
        if snapshot.l1_size > 0 && offset == HostOffset::ZERO {
            return self.fail(field, 0, ParseErrorKind::Overlaps { other: "header" });
        }
        let end = offset.get().saturating_add(value * ENTRY_LEN);
        if snapshot.l1_size > 0 && end > file_len {
            return self.fail(field, 0, ParseErrorKind::PastEndOfFile { end, file_len });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
