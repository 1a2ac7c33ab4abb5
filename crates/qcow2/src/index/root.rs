//! The root: the page where an index starts.

use std::ops::Range;

use vmstrata_types::{ClusterBits, HostOffset, LayerIndex, MAX_LAYERS};

use super::{
    ChainId, DeltaPointer, IndexError, LEAF_WORDS, MAX_DELTA_RUNS, MAX_DELTAS, MAX_LEAVES, PAGE_LEN, Page,
    PagePointer, VERSION, le, wrong,
};

/// What a root begins with, and with it every sidecar.
pub const MAGIC: &[u8; 8] = b"VMSINDEX";

/// Where each field lies in the page. What follows is zero.
mod field {
    pub(super) const VERSION: usize = 8;
    pub(super) const CRC: usize = 12;
    pub(super) const CHAIN: usize = 16;
    pub(super) const GENERATION: usize = 32;
    pub(super) const LAYERS: usize = 40;
    pub(super) const UNIT: usize = 44;
    pub(super) const SIZE: usize = 48;
    pub(super) const AT: usize = 56;
    pub(super) const AREA_START: usize = 64;
    pub(super) const AREA_END: usize = 72;
    pub(super) const LEN_BEFORE: usize = 80;
    pub(super) const TABLE_PAGES: usize = 88;
    pub(super) const FINE_UNIT: usize = 92;
    pub(super) const MAP: usize = 96;
    pub(super) const TABLE: usize = 112;
    pub(super) const FINE: usize = 128;
    pub(super) const FULL_LAYERS: usize = 144;
    pub(super) const DELTA_COUNT: usize = 148;
    pub(super) const DELTAS: usize = 152;
    /// Bytes of the pointer to a delta record: that to its pages, and the number of runs.
    pub(super) const DELTA_LEN: usize = 20;
}

/// The root of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The chain it belongs to.
    pub chain: ChainId,
    /// Higher than that of any index it took pages from.
    pub generation: u64,
    /// The layer it belongs to: it answers for this one and all below.
    pub layer: LayerIndex,
    /// Bytes that one map word speaks for: the smallest cluster of those layers. (In version 1, the smallest subcluster, if that is
    /// smaller.)
    pub unit: ClusterBits,
    /// Bytes that one word of the fine tree speaks for: the smallest cluster or subcluster of those layers. The same as `unit`
    /// if there is no such tree.
    pub fine_unit: ClusterBits,
    /// Virtual size of the layer in bytes.
    pub size: u64,
    /// Where this page lies.
    pub at: HostOffset,
    /// All pages this index wrote, this one included.
    pub area: Range<HostOffset>,
    /// Bytes of the file before the area was added.
    pub len_before: u64,
    /// Pages of the layer table, 1 and more.
    pub table_pages: u32,
    /// Top of the map tree.
    pub map: PagePointer,
    /// Top of the layer table.
    pub table: PagePointer,
    /// Top of the fine tree, which has leaves where words of the map are split.
    pub fine: PagePointer,
    /// The newest layer that the map tree answers for.
    pub full: LayerIndex,
    /// The delta records of the layers above that one, the last being that of the layer itself.
    pub deltas: Vec<DeltaPointer>,
}

impl Root {
    /// Leaves that the map of a disk needs.
    pub const fn leaves_of(size: u64, unit: ClusterBits) -> u64 {
        size.div_ceil(unit.size()).div_ceil(LEAF_WORDS as u64)
    }

    /// Leaves of the map.
    pub const fn leaves(&self) -> u64 {
        Self::leaves_of(self.size, self.unit)
    }

    /// Leaves of the fine tree: as many as lie below all leaves of the map.
    pub fn fine_leaves(&self) -> u64 {
        if self.fine_unit < self.unit { self.leaves() << (self.unit.get() - self.fine_unit.get()) } else { 0 }
    }

    /// The page's bytes, and their checksum for the [`super::IndexLink`].
    ///
    /// # Panics
    /// With more than [`MAX_DELTAS`] delta records.
    pub fn encode(&self) -> (Box<Page>, u32) {
        assert!(self.deltas.len() <= MAX_DELTAS, "a root has room for {MAX_DELTAS} delta records");
        let mut page = Box::new([0; PAGE_LEN]);
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, MAGIC);
        put(field::VERSION, &VERSION.to_le_bytes());
        put(field::CHAIN, &self.chain.0);
        put(field::GENERATION, &self.generation.to_le_bytes());
        put(field::LAYERS, &(u32::from(self.layer.get()) + 1).to_le_bytes());
        put(field::UNIT, &self.unit.get().to_le_bytes());
        put(field::SIZE, &self.size.to_le_bytes());
        put(field::AT, &self.at.get().to_le_bytes());
        put(field::AREA_START, &self.area.start.get().to_le_bytes());
        put(field::AREA_END, &self.area.end.get().to_le_bytes());
        put(field::LEN_BEFORE, &self.len_before.to_le_bytes());
        put(field::TABLE_PAGES, &self.table_pages.to_le_bytes());
        put(field::FINE_UNIT, &self.fine_unit.get().to_le_bytes());
        put(field::MAP, &self.map.to_bytes());
        put(field::TABLE, &self.table.to_bytes());
        put(field::FINE, &self.fine.to_bytes());
        put(field::FULL_LAYERS, &(u32::from(self.full.get()) + 1).to_le_bytes());
        put(field::DELTA_COUNT, &(self.deltas.len() as u32).to_le_bytes());
        for (number, delta) in self.deltas.iter().enumerate() {
            let at = field::DELTAS + number * field::DELTA_LEN;
            put(at, &delta.top.to_bytes());
            put(at + PagePointer::LEN, &delta.runs.to_le_bytes());
        }
        let crc = crc32c::crc32c(&page[..]);
        page[field::CRC..field::CRC + 4].copy_from_slice(&crc.to_le_bytes());
        (page, crc)
    }

    /// Reads and checks the page at `at`; returns its checksum too.
    ///
    /// # Errors
    /// No index, a later version, a checksum that does not match, another place than the one it was made for, or a
    /// number that cannot be.
    pub fn parse(page: &Page, at: HostOffset) -> Result<(Self, u32), IndexError> {
        if &page[..8] != MAGIC {
            return Err(IndexError::Missing);
        }
        let version = le::u32(page, field::VERSION);
        if !(1..=VERSION).contains(&version) {
            return Err(IndexError::Version { found: version });
        }
        let crc = le::u32(page, field::CRC);
        let before = crc32c::crc32c(&page[..field::CRC]);
        let zeroed = crc32c::crc32c_append(before, &[0; 4]);
        if crc32c::crc32c_append(zeroed, &page[field::CRC + 4..]) != crc {
            return Err(IndexError::Checksum { what: "root" });
        }
        let number = |at| le::u64(page, at);
        let newest = layer(le::u32(page, field::LAYERS))?;
        let map_unit = unit(le::u32(page, field::UNIT))?;
        let (fine_unit, fine, full, deltas) = if version == 1 {
            (map_unit, PagePointer::HOLE, newest, Vec::new())
        } else {
            let fine = PagePointer::from_bytes(&page[field::FINE..])?;
            let (full, deltas) = deltas(page)?;
            (unit(le::u32(page, field::FINE_UNIT))?, fine, full, deltas)
        };
        let root = Self {
            chain: ChainId(le::chunk(page, field::CHAIN)),
            generation: number(field::GENERATION),
            layer: newest,
            unit: map_unit,
            fine_unit,
            size: number(field::SIZE),
            at: HostOffset::new(number(field::AT)),
            area: HostOffset::new(number(field::AREA_START))..HostOffset::new(number(field::AREA_END)),
            len_before: number(field::LEN_BEFORE),
            table_pages: le::u32(page, field::TABLE_PAGES),
            map: PagePointer::from_bytes(&page[field::MAP..])?,
            table: PagePointer::from_bytes(&page[field::TABLE..])?,
            fine,
            full,
            deltas,
        };
        root.check(at)?;
        Ok((root, crc))
    }

    fn check(&self, at: HostOffset) -> Result<(), IndexError> {
        if self.at != at {
            return wrong("place of the root", self.at.get());
        }
        if self.fine_unit > self.unit {
            return wrong("fine unit", self.fine_unit.get());
        }
        if self.leaves().max(self.fine_leaves()) > MAX_LEAVES {
            return wrong("disk size", self.size);
        }
        let area = &self.area;
        let page = PAGE_LEN as u64;
        let aligned = area.start.get().is_multiple_of(page) && area.end.get().is_multiple_of(page);
        if !aligned || area.end <= area.start || at < area.start || at >= area.end {
            return wrong("area", area.start.get());
        }
        if self.len_before > area.start.get() {
            return wrong("length before", self.len_before);
        }
        if self.table_pages == 0 || self.table_pages > u32::from(self.layer.get()) + 1 || self.table.is_hole()
        {
            return wrong("layer table pages", self.table_pages);
        }
        if self.full.index() + self.deltas.len() != self.layer.index() {
            return wrong("layers of the map tree", u32::from(self.full.get()) + 1);
        }
        let runs = self.deltas.iter().map(|delta| u64::from(delta.runs)).sum::<u64>();
        if runs > MAX_DELTA_RUNS.into() {
            return wrong("runs of delta records", runs);
        }
        Ok(())
    }
}

/// The newest layer that the map tree answers for, and the records of those above it.
fn deltas(page: &Page) -> Result<(LayerIndex, Vec<DeltaPointer>), IndexError> {
    let count = le::u32(page, field::DELTA_COUNT);
    if count as usize > MAX_DELTAS {
        return wrong("delta records", count);
    }
    let pointers = page[field::DELTAS..].chunks_exact(field::DELTA_LEN).take(count as usize);
    let delta = |bytes: &[u8]| {
        Ok(DeltaPointer { top: PagePointer::from_bytes(bytes)?, runs: le::u32(bytes, PagePointer::LEN) })
    };
    Ok((layer(le::u32(page, field::FULL_LAYERS))?, pointers.map(delta).collect::<Result<_, _>>()?))
}

fn layer(count: u32) -> Result<LayerIndex, IndexError> {
    match u16::try_from(count.wrapping_sub(1)) {
        Ok(index) if usize::from(index) < MAX_LAYERS => Ok(LayerIndex::new(index)),
        _ => wrong("layers", count),
    }
}

fn unit(bits: u32) -> Result<ClusterBits, IndexError> {
    ClusterBits::new(bits).map_or_else(|| wrong("map unit", bits), Ok)
}
