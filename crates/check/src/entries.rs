//! The entries of L2 tables: what they reference, and what is wrong with them.

use vmstrata_qcow2::entry::{
    COMPRESSED_FLAG, COPIED, EntryError, L2_RESERVED, L2Entry, OFFSET_MASK, ZERO_FLAG,
};
use vmstrata_qcow2::{EntryFormat, RawEntry, Subclusters};
use vmstrata_types::HostOffset;

use crate::Phase;
use crate::counts::{Counts, Use};
use crate::error::Result;
use crate::finding::FindingKind;
use crate::image::{Image, Region};
use crate::read::for_each_cluster;
use crate::refcounts::DiskRefcounts;
use crate::report::Tally;
use crate::roots::TableRef;

/// How the active tables map the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) allocated: u64,
    pub(crate) compressed: u64,
    pub(crate) fragmented: u64,
}

/// Counts what all entries of `tables` reference, on several threads.
///
/// # Errors
/// Whatever the store reports.
pub(crate) fn count_entries(
    image: &Image<'_>,
    counts: &Counts,
    disk: &DiskRefcounts,
    tables: &[TableRef],
    tally: &mut Tally,
) -> Result<Stats> {
    let offsets: Vec<u64> = tables.iter().map(|table| table.offset).collect();
    let entries = image.header.entry_format();
    let new =
        || TableWalk { image, counts, disk, entries, tally: image.new_tally(), stats: Stats::default() };
    let walks =
        for_each_cluster(image, Phase::Tables, &offsets, new, |walk: &mut TableWalk<'_>, number, bytes| {
            walk.table(&tables[number], bytes);
        })?;
    let mut stats = Stats::default();
    for walk in walks {
        tally.merge(walk.tally);
        stats.allocated += walk.stats.allocated;
        stats.compressed += walk.stats.compressed;
        stats.fragmented += walk.stats.fragmented;
    }
    Ok(stats)
}

struct TableWalk<'a> {
    image: &'a Image<'a>,
    counts: &'a Counts,
    disk: &'a DiskRefcounts,
    entries: EntryFormat,
    tally: Tally,
    stats: Stats,
}

/// The table that an entry is in, and where the cluster before it lies.
struct Position<'a> {
    table: &'a TableRef,
    at: HostOffset,
    /// Where the next cluster would lie if the file were not fragmented; 0 at the start.
    expected: u64,
}

impl TableWalk<'_> {
    fn table(&mut self, table: &TableRef, bytes: &[u8]) {
        let start = HostOffset::new(table.offset);
        let mut position = Position { table, at: start, expected: 0 };
        for (line, bytes) in bytes.chunks(64).enumerate() {
            if bytes.iter().all(|&byte| byte == 0) {
                continue;
            }
            let entries = self.entries;
            for (number, raw) in entries.raw_entries(bytes).enumerate().filter(|(_, raw)| !raw.is_empty()) {
                position.at = start + (line * 64 + number * entries.entry_len()) as u64;
                if raw.word & COMPRESSED_FLAG != 0 {
                    self.compressed(&position, raw);
                } else {
                    self.standard(&mut position, raw);
                }
            }
        }
    }

    fn note(&mut self, position: &Position<'_>, error: EntryError) {
        self.tally.add_weighted(position.at, FindingKind::L2Entry(error), position.table.weight());
    }

    fn compressed(&mut self, position: &Position<'_>, raw: RawEntry) {
        if raw.word & COPIED != 0 {
            self.note(position, EntryError::CopiedCompressed { raw: raw.word });
        }
        if raw.subclusters != 0 {
            self.note(position, EntryError::SubclustersCompressed { raw });
        }
        match self.entries.l2(RawEntry::standard(raw.word)) {
            Ok(L2Entry::Compressed { host, len }) => {
                self.reference(position, Region { start: host, len }, "a compressed cluster");
            }
            Ok(_) => unreachable!("the compressed flag is set"),
            Err(error) => self.note(position, error),
        }
        let active = u64::from(position.table.active);
        self.stats.allocated += active;
        self.stats.compressed += active;
        // They share sectors, so reading one always reads parts of others.
        self.stats.fragmented += active;
    }

    fn standard(&mut self, position: &mut Position<'_>, entry: RawEntry) {
        let raw = entry.word;
        if raw & L2_RESERVED != 0 {
            self.note(position, EntryError::Reserved { raw, bits: raw & L2_RESERVED });
        }
        if raw & ZERO_FLAG != 0 && self.image.header.version < 3 {
            self.note(position, EntryError::ZeroFlagInVersion2 { raw });
        }
        let host = HostOffset::new(raw & OFFSET_MASK);
        let states = Subclusters::from_bits(entry.subclusters);
        if host == HostOffset::ZERO {
            if states.allocated != 0 {
                self.note(position, EntryError::SubclustersNowhere { raw: entry });
            }
            return;
        }
        if !states.is_valid() {
            self.note(position, EntryError::SubclustersTwice { raw: entry });
        }
        let size = self.image.bits().size();
        if !host.is_aligned(self.image.bits()) {
            self.note(position, EntryError::Misaligned { raw, offset: host });
        }
        let active = u64::from(position.table.active);
        self.stats.allocated += active;
        if position.expected != 0 && position.expected != host.get() {
            self.stats.fragmented += active;
        }
        position.expected = host.get() + size;
        self.reference(position, Region { start: host, len: size }, "a data cluster");
        let flag = raw & COPIED != 0;
        if active > 0 && self.disk.is_one(host.get() >> self.image.bits().get()) != flag {
            self.tally.add_weighted(position.at, FindingKind::L2Copied { flag, host }, active);
        }
    }

    fn reference(&mut self, position: &Position<'_>, region: Region, what: &'static str) {
        let weight = position.table.weight();
        if !self.image.count(self.counts, region, weight, Use::Data) {
            let (start, len) = (region.start, region.len);
            self.tally.add_weighted(position.at, FindingKind::PastEnd { what, start, len }, weight);
        }
    }
}
