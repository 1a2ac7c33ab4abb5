//! The object that makes a snapshot: what is known of it, and where its tables lie.
//!
//! ```text
//!  header │ zstd: length of the JSON │ JSON: info, kinds and lengths of the tables │ where the tables' pages lie
//! ```
//!
//! The header's checksum covers the object.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use serde::{Deserialize, Serialize};
use vmstrata_repo::ObjectReader;

use super::Vault;
use super::bytes::{Malformed, Put, Take};
use super::info::Info;
use super::name::{ObjectId, ObjectKind, SnapshotId};
use super::pages::{Pages, Place};
use super::refill::Refill;
use super::sources::Sources;
use super::survey::Survey;
use super::tables::Index;
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;
use crate::hide::Hiding;

const MAGIC: &[u8; 8] = b"VMSMEMRY";
const VERSION: u32 = 3;
const HEADER: usize = 36;
/// Bytes of the object, and of its content before compression.
const MAX_BYTES: u64 = 1 << 30;
/// Bytes of the JSON.
const MAX_JSON: usize = 16 << 20;
/// Metadata is small, and read often: worth more than the speed of level 1.
const LEVEL: i32 = 3;

/// What a metadata object holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Metadata {
    pub(super) info: Info,
    pub(super) tables: Index,
}

impl Metadata {
    /// The object's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("numbers and texts");
        let mut plain = Put::default();
        plain.u32(json.len() as u32);
        plain.bytes(&json);
        self.tables.encode_places(&mut plain);
        let mut put = Put::default();
        put.bytes(MAGIC);
        put.u32(VERSION);
        put.u32(0);
        put.bytes(&self.info.id.to_bytes());
        put.u32(plain.0.len() as u32);
        put.bytes(&zstd::bulk::compress(&plain.0, LEVEL).expect("memory for metadata"));
        let crc = crc32c::crc32c(&put.0);
        put.0[12..16].copy_from_slice(&crc.to_le_bytes());
        put.0
    }

    /// Reads the object of the snapshot `id`, and checks every byte of it.
    pub(super) fn read(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Self, Malformed> {
        let plain = plain(id, reader)?;
        let (mut metadata, mut places) = Self::parse(id, &plain)?;
        let count = metadata.info.layout.bytes() / PAGE_BYTES as u64;
        metadata.tables.decode_places(&mut places, count)?;
        check_objects(&metadata.info, metadata.tables.objects())?;
        Ok(metadata)
    }

    /// What the content says but for where the tables lie, which is left.
    fn parse(id: SnapshotId, plain: &[u8]) -> Result<(Self, Take<'_>), Malformed> {
        let mut take = Take(plain);
        let len = take.u32()? as usize;
        let json = take.bytes(len)?;
        let read = if len > MAX_JSON { None } else { serde_json::from_slice::<Self>(json).ok() };
        let metadata = read.ok_or(Malformed("what it says of the snapshot is not understood"))?;
        if metadata.info.id != id {
            return Err(Malformed("another snapshot is in its place"));
        }
        metadata.info.check_read()?;
        Ok((metadata, take))
    }
}

/// Reads what is known of the snapshot `id`, and not its pages.
pub(super) fn read_info(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Info, Malformed> {
    Ok(Metadata::parse(id, &plain(id, reader)?)?.0.info)
}

/// The content of the object before compression.
fn plain(id: SnapshotId, reader: &dyn ObjectReader) -> Result<Vec<u8>, Malformed> {
    if !(HEADER as u64..=MAX_BYTES).contains(&reader.len()) {
        return Err(Malformed("it is too short or too long"));
    }
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes).map_err(|_| Malformed("it cannot be read"))?;
    let mut take = Take(&bytes);
    if take.bytes(8)? != MAGIC {
        return Err(Malformed("not a snapshot's metadata"));
    }
    if take.u32()? != VERSION {
        return Err(Malformed("its version is not known"));
    }
    let (crc, found, len) = (take.u32()?, take.id()?, u64::from(take.u32()?));
    bytes[12..16].fill(0);
    if crc != crc32c::crc32c(&bytes) {
        return Err(Malformed("its checksum does not match"));
    }
    if found != id.to_bytes() || len > MAX_BYTES {
        return Err(Malformed("another snapshot is in its place"));
    }
    // Memory is taken as bytes come, not because a length asks for it.
    let mut plain = Vec::new();
    zstd::stream::read::Decoder::with_buffer(&bytes[HEADER..])
        .and_then(|decoder| decoder.take(len + 1).read_to_end(&mut plain))
        .map_err(|_| Malformed("not zstd"))?;
    let is_whole = plain.len() as u64 == len;
    if is_whole { Ok(plain) } else { Err(Malformed("it does not hold what it says")) }
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
        let name = ObjectId { owner: id, kind: ObjectKind::Metadata };
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

/// Every page lies in an object of the table, and critical ones among critical ones.
fn check_objects(info: &Info, mut used: impl Iterator<Item = (u16, PageClass)>) -> Result<(), Malformed> {
    let sound = |(object, class)| {
        info.objects
            .get(&object)
            .is_some_and(|object| class != PageClass::Critical || object.name.kind == ObjectKind::Critical)
    };
    if used.all(sound) { Ok(()) } else { Err(Malformed("a page lies in no object")) }
}

#[cfg(test)]
mod tests;
