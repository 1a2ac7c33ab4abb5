//! Moving mapping tables away from data that lies on the same clusters.
//!
//! A table that is guest data as well cannot be mended in place: every flag written would change what the guest
//! reads. It is copied past all that is in use, under refcounts written before, and its pointer is switched; what
//! it leaves behind is then plain data, and the next scan gives back what no one references.

use vmstrata_qcow2::entry::{COPIED, L1_RESERVED, OFFSET_MASK};
use vmstrata_qcow2::header::field;
use vmstrata_types::HostOffset;

use super::{flush, write};
use crate::counts::Use;
use crate::error::{IoContext as _, Result};
use crate::image::Image;
use crate::roots::TableRef;
use crate::scan::Scan;

/// Tables moved in one round.
const MOVES_MAX: usize = 4096;

/// Moves tables that share clusters with something else; false when there are none that can be moved.
///
/// Moves the active L1 table alone if that is shared, otherwise all L2 tables that one active entry leads to.
///
/// # Errors
/// Whatever the store reports.
pub(super) fn separate(image: &Image<'_>, scan: &Scan) -> Result<bool> {
    let bits = image.bits();
    let (start, len) = (image.header.l1_table_offset, u64::from(image.header.l1_size) * 8);
    let mut l1_clusters = start.get() >> bits.get()..(start.get() + len).div_ceil(bits.size());
    if start.get() + len > image.file_len {
        return Ok(false);
    }
    if l1_clusters.any(|cluster| scan.counts.get(cluster).overlaps()) {
        return move_l1(image, scan, start, len).map(|()| true);
    }
    let shared = |table: &&TableRef| {
        let count = scan.counts.get(table.offset >> bits.get());
        (table.active, table.inactive) == (1, 0)
            && HostOffset::new(table.offset).is_aligned(bits)
            && (count.is(Use::Data) || count.is(Use::Exclusive))
    };
    let tables: Vec<u64> =
        scan.tables.iter().filter(shared).take(MOVES_MAX).map(|table| table.offset).collect();
    if tables.is_empty() {
        return Ok(false);
    }
    move_l2(image, scan, &tables).map(|()| true)
}

/// Makes room for `clusters` clusters past all that is in use, with refcounts of one; returns where.
fn reserve(image: &Image<'_>, scan: &Scan, clusters: u64) -> Result<HostOffset> {
    let reserved = scan.free_from..scan.free_from + clusters;
    let len = reserved.end << image.bits().get();
    if len > image.file_len {
        image.store.set_len(len).while_trying("extend the file")?;
    }
    let extended = Image::read(image.store, image.options)?;
    super::refcounts::rebuild(&extended, &scan.disk, reserved.clone())?;
    Ok(HostOffset::new(reserved.start << image.bits().get()))
}

fn move_l1(image: &Image<'_>, scan: &Scan, from: HostOffset, len: u64) -> Result<()> {
    let to = reserve(image, scan, len.div_ceil(image.bits().size()))?;
    copy(image, from, to, len)?;
    flush(image.store)?;
    let at = HostOffset::new(field::L1_TABLE_OFFSET);
    write(image.store, at, &to.get().to_be_bytes(), "switch to the new L1 table")?;
    flush(image.store)
}

fn move_l2(image: &Image<'_>, scan: &Scan, tables: &[u64]) -> Result<()> {
    let size = image.bits().size();
    let to = reserve(image, scan, tables.len() as u64)?;
    for (number, &from) in tables.iter().enumerate() {
        copy(image, HostOffset::new(from), to + number as u64 * size, size)?;
    }
    flush(image.store)?;
    let start = image.header.l1_table_offset;
    let mut l1 = vec![0; image.header.l1_size as usize * 8];
    image.store.read_padded(&mut l1, start).while_trying("read the L1 table").map_err(|e| e.at(start))?;
    for (index, word) in l1.as_chunks::<8>().0.iter().enumerate() {
        let raw = u64::from_be_bytes(*word);
        let Ok(number) = tables.binary_search(&(raw & OFFSET_MASK)) else { continue };
        let target = to + number as u64 * size;
        let entry = raw & !(OFFSET_MASK | L1_RESERVED) | COPIED | target.get();
        write(image.store, start + index as u64 * 8, &entry.to_be_bytes(), "switch to a new L2 table")?;
    }
    flush(image.store)
}

fn copy(image: &Image<'_>, from: HostOffset, to: HostOffset, len: u64) -> Result<()> {
    let mut bytes = vec![0; len as usize];
    image.store.read_padded(&mut bytes, from).while_trying("read a table").map_err(|error| error.at(from))?;
    write(image.store, to, &bytes, "move a table")
}
