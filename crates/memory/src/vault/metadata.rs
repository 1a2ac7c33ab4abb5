//! The object that makes a snapshot: what is known of it, and where its tables lie.
//!
//! ```text
//!  header │ table of sections │ info │ index of the tables
//! ```
//!
//! Sections are compressed, and have a checksum each; the first is [`Info`], so that a list of snapshots needs no more.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use super::Vault;
use super::bytes::{Malformed, Put, Take};
use super::hiding::Hiding;
use super::info::Info;
use super::name::{ObjectKind, ObjectName, SnapshotId};
use super::pages::{Pages, Place};
use super::refill::Refill;
use super::repository::ObjectReader;
use super::sources::Sources;
use super::survey::Survey;
use super::tables::Index;
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;

const MAGIC: &[u8; 8] = b"VMSMEMRY";
const VERSION: u32 = 2;
const HEADER: usize = 40;
const ENTRY: usize = 24;
const SECTIONS: usize = 2;
/// Of a section, before compression.
const MAX_SECTION: u64 = 1 << 30;
/// Sections are small, and read often: worth more than the speed of level 1.
const LEVEL: i32 = 3;

const INFO: u32 = 1;
const TABLES: u32 = 2;

/// What a metadata object holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) info: Info,
    pub(super) tables: Index,
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
        let sections =
            [(INFO, section(|put| self.info.encode(put))), (TABLES, section(|put| self.tables.encode(put)))];
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

    /// Reads the object of the snapshot `id`, and checks every byte of it.
    pub(super) fn read(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Self, Malformed> {
        let [info, tables] = sections(id, reader)?;
        let info = Stored::read(info, INFO, reader)?.decode(|take| Info::decode(id, take))?;
        let count = info.layout.bytes() / PAGE_BYTES as u64;
        let tables = Stored::read(tables, TABLES, reader)?.decode(|take| Index::decode(take, count))?;
        check_objects(&info, tables.objects())?;
        Ok(Self { info, tables })
    }
}

/// What a snapshot says of its guest's pages. Large tables, which not all need, are read when they are asked for.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) info: Info,
    pub(super) pages: Pages,
    pub(super) tables: Index,
}

impl Outline {
    /// Reads it from whichever copies are whole; returns the objects that its tables lie in with it.
    ///
    /// # Errors
    /// Each copy with what was wrong.
    pub(super) fn read(
        vault: &Vault,
        survey: &Survey,
        id: SnapshotId,
    ) -> Result<(Self, Sources), Vec<String>> {
        let name = ObjectName { owner: id, kind: ObjectKind::Metadata };
        let metadata = survey.first_good(vault, name, |reader| Metadata::read(id, reader))?;
        let used: BTreeSet<u16> = metadata.tables.objects().map(|(object, _)| object).collect();
        let objects = metadata.info.objects.iter().filter(|(number, _)| used.contains(number));
        let sources = Sources::open(vault, survey, &objects.map(|(at, object)| (*at, *object)).collect());
        Ok((Self::of(metadata, &sources)?, sources))
    }

    /// Reads it, and every page of its tables.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn read_whole(vault: &Vault, survey: &Survey, id: SnapshotId) -> Result<Self, Vec<String>> {
        let (outline, sources) = Self::read(vault, survey, id)?;
        outline.tables.check(&sources)?;
        Ok(outline)
    }

    /// What the snapshot with this metadata says; its tables lie in `sources`.
    ///
    /// # Errors
    /// As [`Self::read_whole`].
    pub(super) fn of(metadata: Metadata, sources: &Sources) -> Result<Self, Vec<String>> {
        let Metadata { info, tables } = metadata;
        let pages = tables.pages(sources, info.layout.bytes() / PAGE_BYTES as u64)?;
        check_objects(&info, pages.objects()).map_err(|malformed| vec![malformed.0.to_owned()])?;
        Ok(Self { info, pages, tables })
    }

    /// Where in its objects all it needs is stored, the pages of its tables too; each with how many that follow one another.
    pub(super) fn places(&self) -> impl Iterator<Item = (Place, u64)> + '_ {
        self.tables.places().chain(self.pages.places())
    }

    /// What hides pages.
    ///
    /// # Errors
    /// As [`Self::read_whole`].
    pub(super) fn hiding(&self, sources: &Sources) -> Result<Hiding, Vec<String>> {
        self.tables.hiding(sources)
    }

    /// Clean pages that lie on the guest's disks.
    ///
    /// # Errors
    /// As [`Self::read_whole`].
    pub(super) fn refill(&self, sources: &Sources) -> Result<Vec<(Frame, Refill)>, Vec<String>> {
        self.tables.refill(sources, self.info.disks.len())
    }

    /// What only who wrote it understands, by name.
    ///
    /// # Errors
    /// As [`Self::read_whole`].
    pub(super) fn blobs(&self, sources: &Sources) -> Result<BTreeMap<String, Vec<u8>>, Vec<String>> {
        self.tables.blobs(sources)
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
    fn read(section: Section, kind: u32, reader: &dyn ObjectReader) -> Result<Self, Malformed> {
        if section.kind != kind {
            return Err(Malformed("a section is of another kind"));
        }
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

/// Every page lies in an object of the table, and critical ones among critical ones.
fn check_objects(info: &Info, mut used: impl Iterator<Item = (u16, PageClass)>) -> Result<(), Malformed> {
    let sound = |(object, class)| {
        info.objects
            .get(&object)
            .is_some_and(|object| class != PageClass::Critical || object.name.kind == ObjectKind::Critical)
    };
    if used.all(sound) { Ok(()) } else { Err(Malformed("a page lies in no object")) }
}

/// Reads what is known of the snapshot `id`, and not its pages.
pub(super) fn read_info(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Info, Malformed> {
    let [info, _] = sections(id, reader)?;
    Stored::read(info, INFO, reader)?.decode(|take| Info::decode(id, take))
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

fn sections(id: SnapshotId, reader: &dyn ObjectReader) -> Result<[Section; SECTIONS], Malformed> {
    let mut bytes = read(reader, 0, HEADER)?;
    let mut take = Take(&bytes);
    if take.bytes(8)? != MAGIC {
        return Err(Malformed("not a snapshot's metadata"));
    }
    if take.u32()? != VERSION {
        return Err(Malformed("its version is not known"));
    }
    let (crc, found, count) = (take.u32()?, SnapshotId::from_bytes(take.id()?), take.u32()? as usize);
    bytes.extend(read(reader, HEADER as u64, SECTIONS * ENTRY)?);
    bytes[12..16].fill(0);
    if crc != crc32c::crc32c(&bytes) {
        return Err(Malformed("the header's checksum does not match"));
    }
    if count != SECTIONS {
        return Err(Malformed("it has another number of sections"));
    }
    if found != id {
        return Err(Malformed("another snapshot is in its place"));
    }
    let mut take = Take(&bytes[HEADER..]);
    let mut offset = bytes.len() as u64;
    let mut next = || -> Result<Section, Malformed> {
        let section =
            Section { kind: take.u32()?, plain: take.u32()?, stored: take.u32()?, crc: take.u32()?, offset };
        take.u64()?;
        offset += u64::from(section.stored);
        Ok(section)
    };
    let sections = [next()?, next()?];
    let is_whole = offset == reader.len();
    if is_whole { Ok(sections) } else { Err(Malformed("it has another length than its header says")) }
}

#[cfg(test)]
mod tests;
