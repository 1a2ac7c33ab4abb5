//! Reading the table of internal snapshots as far as it makes sense.

use vmstrata_qcow2::snapshot::{self, MAX_TABLE_LEN, Snapshot};
use vmstrata_qcow2::{Header, ParseError, ParseErrorKind};
use vmstrata_types::HostOffset;

use crate::error::{IoContext as _, Result};
use crate::finding::FindingKind;
use crate::image::Image;
use crate::report::Tally;

/// Bytes of the table read at first.
const FIRST_READ: u64 = 1 << 20;
/// Extra data that version 3 requires: VM state size and disk size.
const EXTRA_LEN_V3: u32 = 16;

/// The snapshots whose L1 tables can be walked.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    pub(crate) list: Vec<Snapshot>,
    /// Bytes of the table.
    pub(crate) table_len: u64,
}

/// Reads the snapshot table; nothing but a finding comes of one that is not readable.
///
/// # Errors
/// Whatever the store reports.
pub(crate) fn read_snapshots(image: &Image<'_>, tally: &mut Tally) -> Result<Snapshots> {
    let header = &image.header;
    if header.snapshot_count == 0 {
        return Ok(Snapshots::default());
    }
    let at = header.snapshots_offset;
    let len_max = MAX_TABLE_LEN.min(image.file_len.saturating_sub(at.get()));
    let mut len = FIRST_READ.min(len_max);
    loop {
        let mut table = vec![0; len as usize];
        image
            .store
            .read_padded(&mut table, at)
            .while_trying("read the snapshot table")
            .map_err(|e| e.at(at))?;
        let mut found = image.new_tally();
        match parse(image, &table, &mut found) {
            Err(error) if len < len_max && matches!(error.kind, ParseErrorKind::Truncated { .. }) => {
                len = (len * 4).min(len_max);
            }
            Err(error) => {
                tally.add(HostOffset::new(error.offset), FindingKind::SnapshotTable(error));
                return Ok(Snapshots::default());
            }
            Ok(snapshots) => {
                tally.merge(found);
                return Ok(snapshots);
            }
        }
    }
}

/// Parses entry by entry, so that one with a bad L1 table does not hide the others.
fn parse(image: &Image<'_>, table: &[u8], tally: &mut Tally) -> Result<Snapshots, ParseError> {
    let lenient = image.file_len.saturating_add(image.bits().size() - 1);
    let mut one = Header { snapshot_count: 1, ..image.header.clone() };
    let mut snapshots = Snapshots::default();
    let mut at = 0;
    for _ in 0..image.header.snapshot_count {
        let entry = table.get(at..).unwrap_or_default();
        one.snapshots_offset = image.header.snapshots_offset + at as u64;
        let parsed = snapshot::parse_table(entry, &one, lenient);
        match parsed {
            Ok(list) => {
                at += list[0].entry_len;
                let extra_len = extra_len(entry);
                if image.header.version >= 3 && extra_len < EXTRA_LEN_V3 {
                    tally.add(one.snapshots_offset, FindingKind::SnapshotIncomplete { extra_len });
                }
                snapshots.list.extend(list);
            }
            Err(error) if matches!(error.field, "snapshot l1_size" | "snapshot l1_table_offset") => {
                tally.add(one.snapshots_offset, FindingKind::Snapshot(error));
                at += entry_len(entry);
            }
            Err(error) => return Err(error),
        }
    }
    snapshots.table_len = at as u64;
    Ok(snapshots)
}

fn extra_len(entry: &[u8]) -> u32 {
    u32::from_be_bytes(*entry[36..].first_chunk().expect("parsed before"))
}

/// Bytes of an entry whose lengths were checked.
fn entry_len(entry: &[u8]) -> usize {
    let name_bytes = [12, 14].map(|at| usize::from(u16::from_be_bytes([entry[at], entry[at + 1]])));
    let len = snapshot::MIN_ENTRY_LEN + extra_len(entry) as usize + name_bytes[0] + name_bytes[1];
    len.next_multiple_of(8)
}
