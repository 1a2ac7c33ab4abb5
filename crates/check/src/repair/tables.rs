//! Mending entries of L1 and L2 tables: copied flags, and bits that must not be set.

use parking_lot::Mutex;
use vmstrata_qcow2::entry::{COMPRESSED_FLAG, COPIED, L1_RESERVED, L2_RESERVED, OFFSET_MASK, ZERO_FLAG};
use vmstrata_qcow2::{EntryFormat, RawEntry, Subclusters};
use vmstrata_store::Store;
use vmstrata_types::{ClusterBits, HostOffset};

use super::{flush, write};
use crate::counts::{Counts, Use};
use crate::error::{IoContext as _, Result};
use crate::image::Image;
use crate::read::for_each_cluster;
use crate::refcounts::DiskRefcounts;
use crate::scan::Scan;
use crate::snapshots::read_snapshots;
use crate::{Options, Phase, Repair};

/// L1 entries mended at once.
const L1_PIECE: u64 = 1 << 20;
/// All tables but those of extended entries have words of 8 bytes.
const L1_FORMAT: EntryFormat = EntryFormat::new(3, ClusterBits::DEFAULT);

/// Mends the entries of all tables by the refcounts the image has now; returns how many were changed.
///
/// # Errors
/// Whatever the store reports.
pub(super) fn mend(store: &dyn Store, options: &Options, scan: &Scan) -> Result<u64> {
    // The refcounts have just been written, perhaps to another place.
    let image = Image::read(store, options)?;
    let disk = DiskRefcounts::load(&image)?;
    let mender =
        Mender { image: &image, counts: &scan.counts, disk: &disk, entries: image.header.entry_format() };
    let mut changed = mender.l2_tables(scan)?;
    changed += mender.l1_table(image.header.l1_table_offset, image.header.l1_size, true)?;
    if options.repair == Repair::All {
        let snapshots = read_snapshots(&image, &mut image.new_tally())?;
        for snapshot in &snapshots.list {
            changed += mender.l1_table(snapshot.l1_table_offset, snapshot.l1_size, false)?;
        }
    }
    if changed > 0 {
        flush(store)?;
    }
    Ok(changed)
}

struct Mender<'a> {
    image: &'a Image<'a>,
    /// As before the refcounts were written.
    counts: &'a Counts,
    /// As they are now.
    disk: &'a DiskRefcounts,
    entries: EntryFormat,
}

impl Mender<'_> {
    fn l2_tables(&self, scan: &Scan) -> Result<u64> {
        let bits = self.image.bits();
        // A table that shares its cluster with data is not written: see `moves`.
        let safe = |at: u64| {
            let count = self.counts.get(at >> bits.get());
            HostOffset::new(at).is_aligned(bits) && count.is(Use::Table) && !count.overlaps()
        };
        let tables: Vec<_> = scan.tables.iter().filter(|table| safe(table.offset)).collect();
        let offsets: Vec<u64> = tables.iter().map(|table| table.offset).collect();
        let failed = Mutex::new(None);
        let changed = for_each_cluster(
            self.image,
            Phase::Repair,
            &offsets,
            || 0,
            |changed, number, bytes| {
                let at = HostOffset::new(tables[number].offset);
                let active = tables[number].active > 0;
                match self.rewrite(at, bytes, &self.entries, |raw| self.l2_entry(raw, active)) {
                    Ok(entries) => *changed += entries,
                    Err(error) => *failed.lock() = Some(error),
                }
            },
        )?;
        match failed.into_inner() {
            Some(error) => Err(error),
            None => Ok(changed.into_iter().sum()),
        }
    }

    fn l1_table(&self, start: HostOffset, entries: u32, active: bool) -> Result<u64> {
        let (mut changed, len) = (0, u64::from(entries) * 8);
        let mut buf = Vec::new();
        for skip in (0..len).step_by(L1_PIECE as usize) {
            let (at, piece) = (start + skip, L1_PIECE.min(len - skip));
            let clusters =
                at.get() >> self.image.bits().get()..=(at.get() + piece - 1) >> self.image.bits().get();
            let shared = clusters.into_iter().any(|cluster| self.counts.get(cluster).overlaps());
            if shared || self.image.is_hole(at, piece)? {
                continue;
            }
            buf.resize(piece as usize, 0);
            self.image
                .store
                .read_padded(&mut buf, at)
                .while_trying("read an L1 table")
                .map_err(|e| e.at(at))?;
            let map = |raw: RawEntry| RawEntry::standard(self.l1_entry(raw.word, active));
            changed += self.rewrite(at, &buf, &L1_FORMAT, map)?;
        }
        Ok(changed)
    }

    /// Maps all entries of a piece of a table and writes those that changed, in one go.
    fn rewrite(
        &self,
        at: HostOffset,
        bytes: &[u8],
        format: &EntryFormat,
        map: impl Fn(RawEntry) -> RawEntry,
    ) -> Result<u64> {
        let mut new = Vec::with_capacity(bytes.len());
        let (mut first, mut last, mut changed) = (None, 0, 0);
        for (number, raw) in format.raw_entries(bytes).enumerate() {
            let right = if raw.is_empty() { raw } else { map(raw) };
            format.put_raw(right, &mut new);
            if right != raw {
                first.get_or_insert(number);
                last = number;
                changed += 1;
            }
        }
        if let Some(first) = first {
            let len = format.entry_len();
            write(
                self.image.store,
                at + (first * len) as u64,
                &new[first * len..(last + 1) * len],
                "write a table",
            )?;
        }
        Ok(changed)
    }

    fn l1_entry(&self, raw: u64, active: bool) -> u64 {
        let all = self.image.options.repair == Repair::All;
        let raw = if all { raw & !L1_RESERVED } else { raw };
        match raw & OFFSET_MASK {
            0 => {
                if all {
                    0
                } else {
                    raw
                }
            }
            offset if active => self.copied(raw, offset),
            _ => raw,
        }
    }

    fn l2_entry(&self, raw: RawEntry, active: bool) -> RawEntry {
        let all = self.image.options.repair == Repair::All;
        if raw.word & COMPRESSED_FLAG != 0 {
            return if all { RawEntry::standard(raw.word & !COPIED) } else { raw };
        }
        let raw = if all { without_damage(raw) } else { raw };
        let offset = raw.word & OFFSET_MASK;
        if offset == 0 {
            return if all { RawEntry { word: raw.word & !COPIED, ..raw } } else { raw };
        }
        let misaligned = raw.word & self.entries.l2_invalid_bits() & OFFSET_MASK != 0;
        let has_data = match self.entries.is_extended() {
            true => Subclusters::from_bits(raw.subclusters).allocated != 0,
            false => raw.word & ZERO_FLAG == 0,
        };
        if misaligned && !has_data && all {
            // Reads the same with or without a cluster kept for it.
            return RawEntry { word: raw.word & ZERO_FLAG, ..raw };
        }
        if active { RawEntry { word: self.copied(raw.word, offset), ..raw } } else { raw }
    }

    /// Makes the copied flag follow from the refcount, once that is right.
    fn copied(&self, raw: u64, offset: u64) -> u64 {
        let cluster = offset >> self.image.bits().get();
        let is_one = self.disk.is_one(cluster);
        let is_right = (self.counts.get(cluster).references == 1) == is_one;
        if !is_right && self.image.options.repair != Repair::All {
            return raw;
        }
        if is_one && is_right { raw | COPIED } else { raw & !COPIED }
    }
}

/// The entry of a standard cluster without the bits that must not be set. Nothing reads a cluster of which a subcluster is both
/// allocated and zero: that one becomes zeros, and the others are readable again.
fn without_damage(raw: RawEntry) -> RawEntry {
    let mut states = Subclusters::from_bits(raw.subclusters);
    if raw.word & OFFSET_MASK != 0 {
        states.allocated &= !states.zero;
    }
    RawEntry { word: raw.word & !L2_RESERVED, subclusters: states.bits() }
}
