//! The layer table: what must be known of a layer to serve it without opening its file, and to notice its change.
//!
//! A page is the index of its first layer (4 bytes), the number of its records (4 bytes), and the records, packed;
//! a record never crosses pages. A record holds the name of the layer *below* it, as its own header gives it, so that
//! whoever reads the table from its last page on always knows the file in which the next page lies.

use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

use super::{Home, IndexError, PAGE_LEN, Page, le, wrong};
use crate::bytes::pad8;
use crate::entry::EntryFormat;
use crate::feature::CompressionType;
use crate::geometry::{Geometry, MIN_EXTENDED};
use crate::header::{MAX_BACKING_NAME_LEN, MAX_L1_ENTRIES};

const PAGE_HEADER: usize = 8;
/// Formats of a layer: a raw file, qcow2 with L2 entries of 8 bytes, and with those of 16.
const RAW: u8 = 0;
const STANDARD: u8 = 1;
const EXTENDED: u8 = 2;

/// Where each field lies in a record. The name follows, padded to 8 bytes.
mod field {
    pub(super) const LEN: usize = 0;
    pub(super) const FORMAT: usize = 2;
    pub(super) const VERSION: usize = 3;
    pub(super) const CLUSTER_BITS: usize = 4;
    pub(super) const COMPRESSION: usize = 5;
    pub(super) const HOME: usize = 6;
    pub(super) const MTIME_KNOWN: usize = 7;
    pub(super) const SIZE: usize = 8;
    pub(super) const L1_AT: usize = 16;
    pub(super) const L1_ENTRIES: usize = 24;
    pub(super) const BACKING_FORMAT: usize = 28;
    pub(super) const NAME_LEN: usize = 30;
    pub(super) const FILE_LEN: usize = 32;
    pub(super) const MTIME: usize = 40;
    pub(super) const DIGEST: usize = 48;
    pub(super) const NAME: usize = 80;
}

/// What tells, without reading a file, that it was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Bytes of the file, its index included.
    pub len: u64,
    /// Time of the last change, in ns since 1970; `None` when it could not be told from that of a later change.
    pub mtime_ns: Option<i64>,
}

/// Where a qcow2 layer's tables lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordTables {
    /// 2 or 3.
    pub version: u32,
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Whether L2 entries have subclusters.
    pub is_extended: bool,
    /// How compressed clusters are compressed.
    pub compression: CompressionType,
    /// The active L1 table.
    pub l1_at: HostOffset,
    /// Its entries.
    pub l1_entries: u32,
}

impl RecordTables {
    /// How the entries are to be read.
    pub const fn entry_format(&self) -> EntryFormat {
        match self.is_extended {
            true => EntryFormat::extended(self.cluster_bits),
            false => EntryFormat::new(self.version, self.cluster_bits),
        }
    }

    /// The shape of the tables.
    pub const fn geometry(&self) -> Geometry {
        if self.is_extended {
            Geometry::extended(self.cluster_bits)
        } else {
            Geometry::new(self.cluster_bits)
        }
    }
}

/// The format a header gives for its backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingFormat {
    /// `raw` and its synonyms.
    Raw,
    /// `qcow2`.
    Qcow2,
}

/// The file below, as a layer's header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordBacking {
    /// The name, not resolved.
    pub name: Vec<u8>,
    /// The format, if the header gives one.
    pub format: Option<BackingFormat>,
    /// Where the layer below keeps its own index: what must be known to go on reading there.
    pub home: Home,
}

/// What the table says of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRecord {
    /// Virtual size in bytes.
    pub size: u64,
    /// `None` for a raw file.
    pub tables: Option<RecordTables>,
    /// The layer below; `None` at the base.
    pub backing: Option<RecordBacking>,
    /// Its file when the index was made.
    pub stamp: Stamp,
    /// SHA-256 of what the layer's header and tables say, as `docs/format.md` defines it.
    pub digest: [u8; 32],
}

impl LayerRecord {
    fn encode(&self) -> Vec<u8> {
        let name = self.backing.as_ref().map_or(&[][..], |backing| &backing.name);
        let mut out = vec![0; pad8(field::NAME + name.len())];
        let len = out.len() as u16;
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(field::LEN, &len.to_le_bytes());
        if let Some(tables) = &self.tables {
            put(field::FORMAT, &[if tables.is_extended { EXTENDED } else { STANDARD }]);
            put(field::VERSION, &[tables.version as u8]);
            put(field::CLUSTER_BITS, &[tables.cluster_bits.get() as u8]);
            put(field::COMPRESSION, &[tables.compression.to_byte()]);
            put(field::L1_AT, &tables.l1_at.get().to_le_bytes());
            put(field::L1_ENTRIES, &tables.l1_entries.to_le_bytes());
        }
        put(field::HOME, &[self.backing.as_ref().map_or(Home::None, |backing| backing.home) as u8]);
        put(field::MTIME_KNOWN, &[u8::from(self.stamp.mtime_ns.is_some())]);
        put(field::SIZE, &self.size.to_le_bytes());
        put(
            field::BACKING_FORMAT,
            &[match self.backing.as_ref().and_then(|backing| backing.format) {
                None => 0,
                Some(BackingFormat::Raw) => 1,
                Some(BackingFormat::Qcow2) => 2,
            }],
        );
        put(field::NAME_LEN, &(name.len() as u16).to_le_bytes());
        put(field::FILE_LEN, &self.stamp.len.to_le_bytes());
        put(field::MTIME, &self.stamp.mtime_ns.unwrap_or(0).to_le_bytes());
        put(field::DIGEST, &self.digest);
        put(field::NAME, name);
        out
    }

    /// Reads the record at the start of `bytes`; returns its length too.
    fn parse(bytes: &[u8]) -> Result<(Self, usize), IndexError> {
        if bytes.len() < field::NAME {
            return wrong("room for a record", bytes.len() as u64);
        }
        let len = usize::from(le::u16(bytes, field::LEN));
        let name_len = usize::from(le::u16(bytes, field::NAME_LEN));
        if len != pad8(field::NAME + name_len)
            || len > bytes.len()
            || name_len > MAX_BACKING_NAME_LEN as usize
        {
            return wrong("length of a record", len as u64);
        }
        let size = le::u64(bytes, field::SIZE);
        let mtime = le::u64(bytes, field::MTIME).cast_signed();
        let record = Self {
            size,
            tables: tables(bytes, size)?,
            backing: backing(bytes, name_len)?,
            stamp: Stamp {
                len: le::u64(bytes, field::FILE_LEN),
                mtime_ns: (bytes[field::MTIME_KNOWN] == 1).then_some(mtime),
            },
            digest: le::chunk(bytes, field::DIGEST),
        };
        Ok((record, len))
    }
}

fn tables(bytes: &[u8], size: u64) -> Result<Option<RecordTables>, IndexError> {
    let is_extended = match bytes[field::FORMAT] {
        RAW => return Ok(None),
        STANDARD => false,
        EXTENDED => true,
        other => return wrong("format", other),
    };
    let version = u32::from(bytes[field::VERSION]);
    let bits = bytes[field::CLUSTER_BITS];
    let Some(cluster_bits) = ClusterBits::new(bits.into()) else { return wrong("cluster bits", bits) };
    let kind = bytes[field::COMPRESSION];
    let Some(compression) = CompressionType::from_byte(kind) else { return wrong("compression", kind) };
    let l1_at = HostOffset::new(le::u64(bytes, field::L1_AT));
    let l1_entries = le::u32(bytes, field::L1_ENTRIES);
    if !(2..=3).contains(&version) {
        return wrong("version", version);
    }
    if is_extended && (version < 3 || cluster_bits < MIN_EXTENDED) {
        return wrong("cluster bits", bits);
    }
    let tables = RecordTables { version, cluster_bits, is_extended, compression, l1_at, l1_entries };
    let needed = tables.geometry().l1_entries(size);
    if !l1_at.is_aligned(cluster_bits) || l1_at.get() > i64::MAX as u64 {
        return wrong("L1 table", l1_at.get());
    }
    if u64::from(l1_entries) < needed || l1_entries > MAX_L1_ENTRIES {
        return wrong("L1 entries", l1_entries);
    }
    Ok(Some(tables))
}

fn backing(bytes: &[u8], name_len: usize) -> Result<Option<RecordBacking>, IndexError> {
    let format = match bytes[field::BACKING_FORMAT] {
        0 => None,
        1 => Some(BackingFormat::Raw),
        2 => Some(BackingFormat::Qcow2),
        other => return wrong("backing format", other),
    };
    let home = match bytes[field::HOME] {
        0 => Home::None,
        1 => Home::File,
        2 => Home::Sidecar,
        other => return wrong("home", other),
    };
    match &bytes[field::NAME..field::NAME + name_len] {
        [] => Ok(None),
        name if name.contains(&0) => wrong("backing name", name_len as u64),
        name => Ok(Some(RecordBacking { name: name.to_vec(), format, home })),
    }
}

/// A page of the layer table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePage {
    /// The layer of the first record.
    pub first: LayerIndex,
    /// Records of that layer and those above it, one or more.
    pub records: Vec<LayerRecord>,
}

impl TablePage {
    /// Reads a page.
    ///
    /// # Errors
    /// A record that cannot be, or none.
    pub fn parse(page: &Page) -> Result<Self, IndexError> {
        let (first, count) = (le::u32(page, 0), le::u32(page, 4));
        let Ok(index) = u16::try_from(first) else { return wrong("first layer", first) };
        if count == 0 || count as usize > (PAGE_LEN - PAGE_HEADER) / field::NAME {
            return wrong("records in a page", count);
        }
        let mut records = Vec::with_capacity(count as usize);
        let mut at = PAGE_HEADER;
        for _ in 0..count {
            let (record, len) = LayerRecord::parse(&page[at..])?;
            records.push(record);
            at += len;
        }
        Ok(Self { first: LayerIndex::new(index), records })
    }
}

/// Packs the records of all layers, base first, into pages: each with the number of its records.
///
/// Pages are filled from the base up, so those of a chain are those of a longer one, but for the last.
///
/// # Panics
/// When a backing name is longer than the format allows.
pub fn pack(records: &[LayerRecord]) -> Vec<(usize, Box<Page>)> {
    let mut pages: Vec<(usize, Box<Page>)> = Vec::new();
    let mut at = PAGE_LEN;
    for (index, record) in records.iter().enumerate() {
        let bytes = record.encode();
        assert!(PAGE_HEADER + bytes.len() <= PAGE_LEN, "backing names are at most 1023 bytes");
        if at + bytes.len() > PAGE_LEN {
            let mut page = Box::new([0; PAGE_LEN]);
            page[..4].copy_from_slice(&(index as u32).to_le_bytes());
            pages.push((0, page));
            at = PAGE_HEADER;
        }
        let (count, page) = pages.last_mut().expect("pushed above");
        page[at..at + bytes.len()].copy_from_slice(&bytes);
        at += bytes.len();
        *count += 1;
        page[4..8].copy_from_slice(&(*count as u32).to_le_bytes());
    }
    pages
}
