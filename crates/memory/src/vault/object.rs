//! An object of pages: a header, extents in any order, then what finds them.
//!
//! ```text
//!  header │ extent │ extent │ ... │ hashes of all pages │ table of extents │ tail
//! ```
//!
//! A reader begins at the tail. Where the tail or the table is damaged, the extents are found one after another from the
//! header on ([`scan`]): each says how long it is.

use vmstrata_repo::ObjectReader;

use super::bytes::{Malformed, Put, Take};
use super::extent;
use super::name::{ObjectId, SnapshotId};

/// Tells a page's content: 128 bits of its BLAKE3 hash.
pub(super) type Hash = [u8; 16];

/// The hash of a page's bytes.
pub(super) fn hash(page: &[u8]) -> Hash {
    let whole = blake3::hash(page);
    whole.as_bytes()[..16].try_into().expect("32 bytes have 16")
}

mod scan;
pub(super) use scan::scan;

pub(super) const HEADER: usize = 64;
const MAGIC: &[u8; 8] = b"VMSPAGES";
const VERSION: u32 = 1;

pub(super) const TAIL: usize = 40;
const TAIL_MAGIC: &[u8; 8] = b"VMSPGEND";
const ENTRY: usize = 16;
/// Extents of an object; 2^24 of 64 pages are 4 TiB.
pub(super) const MAX_EXTENTS: u32 = 1 << 24;

/// The first bytes of an object.
pub(super) fn header(name: ObjectId) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..32].copy_from_slice(&name.owner.to_bytes());
    bytes[32] = name.kind as u8;
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Checks the first bytes of the object `name`.
pub(super) fn check_header(name: ObjectId, bytes: &[u8; HEADER]) -> Result<(), Malformed> {
    let mut take = Take(bytes);
    if take.bytes(8)? != MAGIC {
        return Err(Malformed("not an object of pages"));
    }
    if take.u32()? != VERSION {
        return Err(Malformed("its version is not known"));
    }
    let crc = take.u32()?;
    let mut summed = *bytes;
    summed[12..16].fill(0);
    if crc != crc32c::crc32c(&summed) {
        return Err(Malformed("the header's checksum does not match"));
    }
    let is_named = SnapshotId::from_bytes(take.id()?) == name.owner && take.u8()? == name.kind as u8;
    if is_named { Ok(()) } else { Err(Malformed("another object is in its place")) }
}

/// Where an extent lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ExtentPlace {
    pub(super) offset: u64,
    /// Bytes, its header included; 0 while it is not known.
    pub(super) len: u32,
    pub(super) pages: u8,
}

/// What an object's end says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    /// `[extent number]`.
    pub(super) extents: Vec<ExtentPlace>,
}

impl Contents {
    /// Where an extent lies; of length 0 when it is not there.
    pub(super) fn place(&self, extent: u32) -> ExtentPlace {
        self.extents.get(extent as usize).copied().unwrap_or_default()
    }
}

/// The end of an object whose extents end at `offset`.
pub(super) fn trailer(offset: u64, extents: &[ExtentPlace], hashes: &[Vec<Hash>]) -> Vec<u8> {
    let mut put = Put::default();
    hashes.iter().flatten().for_each(|hash| put.bytes(hash));
    let (pages, crc_hashes) = (put.0.len() / size_of::<Hash>(), crc32c::crc32c(&put.0));
    let table = put.0.len();
    for extent in extents {
        put.u64(extent.offset);
        put.u32(extent.len);
        put.u8(extent.pages);
        put.bytes(&[0; 3]);
    }
    let crc_table = crc32c::crc32c(&put.0[table..]);
    let tail = put.0.len();
    put.bytes(TAIL_MAGIC);
    put.u64(offset);
    put.u32(u32::try_from(extents.len()).expect("extents are counted in 32 bits"));
    put.u32(u32::try_from(pages).expect("at most 2^24 extents of 64 pages"));
    put.u32(crc_hashes);
    put.u32(crc_table);
    put.u32(0);
    let crc = crc32c::crc32c(&put.0[tail..]);
    put.u32(crc);
    put.0
}

/// The length of an end with so many extents and pages.
pub(super) fn trailer_len(extents: usize, pages: usize) -> u64 {
    (pages * size_of::<Hash>() + extents * ENTRY + TAIL) as u64
}

struct Tail {
    hashes: u64,
    extents: u32,
    pages: u32,
    crc_hashes: u32,
    crc_table: u32,
}

impl Tail {
    fn parse(bytes: &[u8; TAIL], object_len: u64) -> Result<Self, Malformed> {
        let mut take = Take(bytes);
        if take.bytes(8)? != TAIL_MAGIC {
            return Err(Malformed("it has no tail"));
        }
        let hashes = take.u64()?;
        let [extents, pages, crc_hashes, crc_table, _, crc] = read_numbers(&mut take)?;
        if crc != crc32c::crc32c(&bytes[..TAIL - 4]) {
            return Err(Malformed("the tail's checksum does not match"));
        }
        let between = u64::from(pages) * size_of::<Hash>() as u64 + u64::from(extents) * ENTRY as u64;
        let fits = hashes.checked_add(between).and_then(|end| end.checked_add(TAIL as u64));
        if fits != Some(object_len) || extents > MAX_EXTENTS || hashes < HEADER as u64 {
            return Err(Malformed("it has another length than its tail says"));
        }
        Ok(Self { hashes, extents, pages, crc_hashes, crc_table })
    }

    fn table_at(&self) -> u64 {
        self.hashes + u64::from(self.pages) * size_of::<Hash>() as u64
    }
}

fn read_numbers(take: &mut Take<'_>) -> Result<[u32; 6], Malformed> {
    let mut numbers = [0; 6];
    for number in &mut numbers {
        *number = take.u32()?;
    }
    Ok(numbers)
}

/// Reads from an object; what the medium does not give is as good as damaged.
fn read(reader: &dyn ObjectReader, at: u64, len: usize) -> Result<Vec<u8>, Malformed> {
    let mut bytes = vec![0; len];
    reader.read_at(at, &mut bytes).map_err(|_| Malformed("it cannot be read"))?;
    Ok(bytes)
}

fn first(reader: &dyn ObjectReader) -> Result<[u8; HEADER], Malformed> {
    Ok(read(reader, 0, HEADER)?.try_into().expect("just that many"))
}

fn tail(reader: &dyn ObjectReader) -> Result<Tail, Malformed> {
    Ok(tail_bytes(reader)?.1)
}

fn tail_bytes(reader: &dyn ObjectReader) -> Result<([u8; TAIL], Tail), Malformed> {
    let at = reader.len().checked_sub(TAIL as u64).ok_or(Malformed("it ends too early"))?;
    let bytes = read(reader, at, TAIL)?.try_into().expect("just that many");
    Ok((bytes, Tail::parse(&bytes, reader.len())?))
}

/// The table of extents of an object that is whole as far as its ends go.
pub(super) fn contents(name: ObjectId, reader: &dyn ObjectReader) -> Result<Contents, Malformed> {
    check_header(name, &first(reader)?)?;
    table(reader)
}

/// The table of extents, also of an object whose first bytes cannot be read at all: whose it is, each extent says too.
pub(super) fn contents_of_rest(name: ObjectId, reader: &dyn ObjectReader) -> Result<Contents, Malformed> {
    if let Ok(first) = first(reader) {
        check_header(name, &first)?;
    }
    table(reader)
}

/// The last bytes of an object that is whole as far as its ends go: copies with the same have the same table and hashes.
pub(super) fn ends(name: ObjectId, reader: &dyn ObjectReader) -> Result<[u8; TAIL], Malformed> {
    check_header(name, &first(reader)?)?;
    Ok(tail_bytes(reader)?.0)
}

fn table(reader: &dyn ObjectReader) -> Result<Contents, Malformed> {
    let tail = tail(reader)?;
    let bytes = read(reader, tail.table_at(), tail.extents as usize * ENTRY)?;
    if crc32c::crc32c(&bytes) != tail.crc_table {
        return Err(Malformed("the checksum of its table does not match"));
    }
    let mut take = Take(&bytes);
    let mut extents = Vec::with_capacity(tail.extents as usize);
    for _ in 0..tail.extents {
        let place = ExtentPlace { offset: take.u64()?, len: take.u32()?, pages: take.u8()? };
        take.bytes(3)?;
        let inside = place.offset.checked_add(place.len.into()).is_some_and(|end| end <= tail.hashes);
        if !inside || place.len as usize > extent::MAX_LEN || usize::from(place.pages) > extent::MAX_PAGES {
            return Err(Malformed("an extent lies outside of it"));
        }
        extents.push(place);
    }
    Ok(Contents { extents })
}

/// The hashes of all pages, in order of extents and places in them.
pub(super) fn hashes(name: ObjectId, reader: &dyn ObjectReader) -> Result<Vec<Hash>, Malformed> {
    check_header(name, &first(reader)?)?;
    let tail = tail(reader)?;
    let bytes = read(reader, tail.hashes, tail.pages as usize * size_of::<Hash>())?;
    if crc32c::crc32c(&bytes) != tail.crc_hashes {
        return Err(Malformed("the checksum of its hashes does not match"));
    }
    Ok(bytes.as_chunks().0.to_vec())
}

#[cfg(test)]
mod tests;
