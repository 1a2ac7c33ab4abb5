//! The object that makes a snapshot: what is known of it, where its pages lie, and what the guest's devices were.
//!
//! ```text
//!  header │ table of sections │ section │ section │ ...
//! ```
//!
//! Sections are compressed, and have a checksum each; the first is [`Info`], so that a list of snapshots needs no more.

use std::collections::BTreeMap;
use std::io::Read;

use super::bytes::{Malformed, Put, Take};
use super::hiding::Hiding;
use super::home::ObjectReader;
use super::info::Info;
use super::name::SnapshotId;
use super::pages::Pages;
use super::refill::{self, Refill};
use crate::address::{Frame, PAGE_BYTES};

const MAGIC: &[u8; 8] = b"VMSMEMRY";
const VERSION: u32 = 1;
const HEADER: usize = 40;
const ENTRY: usize = 24;
const MAX_SECTIONS: usize = 64;
/// Of a section, before compression.
pub(super) const MAX_SECTION: u64 = 1 << 30;
/// Sections of a kind that only who wrote them understands.
pub(super) const MAX_BLOBS: usize = MAX_SECTIONS - 4;
/// Bytes of such a section's name.
pub(super) const MAX_BLOB_NAME: usize = 100;
/// Sections are small, and read often: worth more than the speed of level 1.
const LEVEL: i32 = 3;

const INFO: u32 = 1;
const PAGES: u32 = 2;
const HIDING: u32 = 3;
const REFILL: u32 = 4;
const BLOB: u32 = 5;

/// All that a metadata object holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) info: Info,
    pub(super) pages: Pages,
    pub(super) hiding: Hiding,
    /// In order of frames.
    pub(super) refill: Vec<(Frame, Refill)>,
    pub(super) blobs: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, Copy, Debug)]
struct Section {
    kind: u32,
    plain: u32,
    stored: u32,
    crc: u32,
    offset: u64,
}

impl Metadata {
    /// The object's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut sections = vec![
            (INFO, section(|put| self.info.encode(put))),
            (PAGES, section(|put| self.pages.encode(put))),
            (HIDING, section(|put| self.hiding.encode(put))),
            (REFILL, section(|put| refill::encode(&self.refill, put))),
        ];
        sections.extend(self.blobs.iter().map(|(name, blob)| {
            let write = |put: &mut Put| {
                put.text(name);
                put.bytes(blob);
            };
            (BLOB, section(write))
        }));
        let mut head = Put::default();
        head.bytes(MAGIC);
        head.u32(VERSION);
        head.u32(0);
        head.bytes(&self.info.id.to_bytes());
        head.u32(sections.len() as u32);
        head.u32(0);
        let (mut table, mut bytes) = (Put::default(), Vec::new());
        for (kind, plain) in &sections {
            let stored = zstd::bulk::compress(plain, LEVEL).expect("memory for a section");
            table.u32(*kind);
            table.u32(plain.len() as u32);
            table.u32(stored.len() as u32);
            table.u32(crc32c::crc32c(&stored));
            table.u64(0);
            bytes.extend(stored);
        }
        head.bytes(&table.0);
        let crc = crc32c::crc32c(&head.0);
        head.0[12..16].copy_from_slice(&crc.to_le_bytes());
        head.bytes(&bytes);
        head.0
    }

    /// Reads the whole object of the snapshot `id`.
    pub(super) fn read(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Self, Malformed> {
        let Outline { info, pages, blobs, hiding, refill } = Outline::read(id, reader)?;
        let (hiding, refill) = (hiding.decode()?, refill.decode(info.disks.len())?);
        Ok(Self { info, pages, hiding, refill, blobs })
    }
}

/// A metadata object whose large tables, which not all need, are decoded when they are asked for.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) info: Info,
    pub(super) pages: Pages,
    pub(super) blobs: BTreeMap<String, Vec<u8>>,
    pub(super) hiding: HidingSection,
    pub(super) refill: RefillSection,
}

impl Outline {
    /// Reads the object of the snapshot `id`, and checks every byte of it.
    pub(super) fn read(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Self, Malformed> {
        let sections = sections(id, reader)?;
        let (info, rest) = sections.split_first().ok_or(Malformed("it has no sections"))?;
        let info = decode_info(id, *info, reader)?;
        let count = info.layout.bytes() / PAGE_BYTES as u64;
        let (mut pages, mut blobs) = (None, BTreeMap::new());
        let (mut hiding, mut refill) = (HidingSection(None), RefillSection(None));
        for section in rest {
            let stored = Stored::read(*section, reader)?;
            match section.kind {
                PAGES => pages = Some(stored.decode(|take| Pages::decode(take, count))?),
                HIDING => hiding = HidingSection(Some(stored)),
                REFILL => refill = RefillSection(Some(stored)),
                BLOB => blobs.extend([stored.decode(decode_blob)?]),
                _ => return Err(Malformed("a section is of no known kind")),
            }
        }
        let pages = pages.ok_or(Malformed("it has no pages"))?;
        check_objects(&info, &pages)?;
        Ok(Self { info, pages, blobs, hiding, refill })
    }
}

/// What hides pages; none if there is no such section.
#[derive(Debug)]
pub(super) struct HidingSection(Option<Stored>);

impl HidingSection {
    pub(super) fn decode(&self) -> Result<Hiding, Malformed> {
        self.0.as_ref().map_or_else(|| Ok(Hiding::default()), |stored| stored.decode(Hiding::decode))
    }
}

/// What is on the guest's disks; nothing if there is no such section.
#[derive(Debug)]
pub(super) struct RefillSection(Option<Stored>);

impl RefillSection {
    /// For a guest with so many disks.
    pub(super) fn decode(&self, disks: usize) -> Result<Vec<(Frame, Refill)>, Malformed> {
        let decode = |stored: &Stored| stored.decode(|take| refill::decode(take, disks));
        self.0.as_ref().map_or_else(|| Ok(Vec::new()), decode)
    }
}

/// A section as it is stored, with a checksum that matched.
#[derive(Debug)]
struct Stored {
    bytes: Vec<u8>,
    /// Bytes before compression.
    plain: u32,
}

impl Stored {
    fn read(section: Section, reader: &dyn ObjectReader) -> Result<Self, Malformed> {
        if u64::from(section.plain) > MAX_SECTION {
            return Err(Malformed("a section is too long"));
        }
        let bytes = read(reader, section.offset, section.stored as usize)?;
        let is_whole = crc32c::crc32c(&bytes) == section.crc;
        let plain = section.plain;
        if is_whole {
            Ok(Self { bytes, plain })
        } else {
            Err(Malformed("a section's checksum does not match"))
        }
    }

    /// What `decode` makes of all of the section's bytes before compression.
    fn decode<T>(&self, decode: impl FnOnce(&mut Take<'_>) -> Result<T, Malformed>) -> Result<T, Malformed> {
        let plain = self.plain()?;
        let mut take = Take(&plain);
        let decoded = decode(&mut take)?;
        take.end()?;
        Ok(decoded)
    }

    fn plain(&self) -> Result<Vec<u8>, Malformed> {
        // Memory is taken as bytes come, not because a length asks for it.
        let mut plain = Vec::new();
        zstd::stream::read::Decoder::with_buffer(self.bytes.as_slice())
            .and_then(|decoder| decoder.take(u64::from(self.plain) + 1).read_to_end(&mut plain))
            .map_err(|_| Malformed("a section is not zstd"))?;
        if plain.len() == self.plain as usize {
            Ok(plain)
        } else {
            Err(Malformed("a section does not hold what it says"))
        }
    }
}

fn decode_blob(take: &mut Take<'_>) -> Result<(String, Vec<u8>), Malformed> {
    let name = take.text()?;
    Ok((name, take.bytes(take.0.len())?.to_vec()))
}

/// Every page lies in an object of the table, and critical ones among critical ones.
fn check_objects(info: &Info, pages: &Pages) -> Result<(), Malformed> {
    let sound = |(object, class)| {
        let object: Option<&super::info::ObjectUse> = info.objects.get(usize::from(object));
        object.is_some_and(|object| {
            class != crate::class::PageClass::Critical
                || object.name.kind == super::name::ObjectKind::Critical
        })
    };
    if pages.objects().all(sound) { Ok(()) } else { Err(Malformed("a page lies in no object")) }
}

/// Reads what is known of the snapshot `id`, and not its pages.
pub(super) fn read_info(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Info, Malformed> {
    let sections = sections(id, reader)?;
    decode_info(id, *sections.first().ok_or(Malformed("it has no sections"))?, reader)
}

fn decode_info(id: SnapshotId, section: Section, reader: &dyn ObjectReader) -> Result<Info, Malformed> {
    if section.kind != INFO {
        return Err(Malformed("it does not begin with what is known of the snapshot"));
    }
    Stored::read(section, reader)?.decode(|take| Info::decode(id, take))
}

fn section(write: impl FnOnce(&mut Put)) -> Vec<u8> {
    let mut put = Put::default();
    write(&mut put);
    put.0
}

fn read(reader: &dyn ObjectReader, at: u64, len: usize) -> Result<Vec<u8>, Malformed> {
    if at.checked_add(len as u64).is_none_or(|end| end > reader.len()) {
        return Err(Malformed("it ends too early"));
    }
    let mut bytes = vec![0; len];
    reader.read_at(at, &mut bytes).map_err(|_| Malformed("it cannot be read"))?;
    Ok(bytes)
}

fn sections(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Vec<Section>, Malformed> {
    let mut bytes = read(reader, 0, HEADER)?;
    let mut take = Take(&bytes);
    if take.bytes(8)? != MAGIC {
        return Err(Malformed("not a snapshot's metadata"));
    }
    if take.u32()? != VERSION {
        return Err(Malformed("its version is not known"));
    }
    let (crc, found, count) = (take.u32()?, SnapshotId::from_bytes(take.id()?), take.u32()? as usize);
    if count > MAX_SECTIONS {
        return Err(Malformed("it has too many sections"));
    }
    bytes.extend(read(reader, HEADER as u64, count * ENTRY)?);
    bytes[12..16].fill(0);
    if crc != crc32c::crc32c(&bytes) {
        return Err(Malformed("the header's checksum does not match"));
    }
    if found != id {
        return Err(Malformed("another snapshot is in its place"));
    }
    let mut take = Take(&bytes[HEADER..]);
    let mut offset = bytes.len() as u64;
    let mut sections = Vec::with_capacity(count);
    for _ in 0..count {
        let section =
            Section { kind: take.u32()?, plain: take.u32()?, stored: take.u32()?, crc: take.u32()?, offset };
        take.u64()?;
        offset += u64::from(section.stored);
        sections.push(section);
    }
    let is_whole = offset == reader.len();
    if is_whole { Ok(sections) } else { Err(Malformed("it has another length than its header says")) }
}

#[cfg(test)]
mod tests;
