//! Some pages as one piece of an object: compressed together, with one checksum.

use std::io;

use vmstrata_repo::ObjectReader;
use zstd::bulk::Decompressor;

use super::bytes::{Malformed, Put, Take};
use super::name::ObjectId;
use super::object::ExtentPlace;
use crate::address::PAGE_BYTES;

/// The most pages of an extent.
pub(super) const MAX_PAGES: usize = 64;
/// Bytes before the pages.
pub(super) const HEADER: usize = 16;
/// Whether a page is all zeros: such pages are not stored.
pub(super) fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    page.as_chunks::<16>().0.iter().all(|chunk| u128::from_ne_bytes(*chunk) == 0)
}

/// The most bytes of an extent.
pub(super) const MAX_LEN: usize = HEADER + MAX_PAGES * PAGE_BYTES;

const RAW: u8 = 0;
const ZSTD: u8 = 1;

/// Which extent of which object.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExtentId {
    pub(super) object: ObjectId,
    pub(super) number: u32,
}

/// The bytes of an extent: `pages` (whole ones, up to [`MAX_PAGES`]) compressed at `level`, or as they are where that
/// does not make them fewer.
pub(super) fn pack(id: ExtentId, pages: &[u8], compressor: &mut zstd::bulk::Compressor<'_>) -> Vec<u8> {
    debug_assert!(pages.len().is_multiple_of(PAGE_BYTES) && pages.len() <= MAX_PAGES * PAGE_BYTES);
    let mut bytes = vec![0; HEADER + pages.len()];
    // It fails when the result does not fit, which is when it is of no use.
    let (encoding, len) = match compressor.compress_to_buffer(pages, &mut bytes[HEADER..]) {
        Ok(len) if len < pages.len() => (ZSTD, len),
        _ => {
            bytes[HEADER..].copy_from_slice(pages);
            (RAW, pages.len())
        }
    };
    bytes.truncate(HEADER + len);
    bytes[4..8].copy_from_slice(&id.number.to_le_bytes());
    bytes[8..12].copy_from_slice(&u32::try_from(len).expect("an extent is small").to_le_bytes());
    bytes[12] = u8::try_from(pages.len() / PAGE_BYTES).expect("an extent is small");
    bytes[13] = encoding;
    let crc = checksum(id.object, &bytes);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Covers whose extent it is, so that one in the wrong place is noticed.
fn checksum(object: ObjectId, bytes: &[u8]) -> u32 {
    let mut whose = Put::default();
    whose.bytes(&object.owner.to_bytes());
    whose.u8(object.kind as u8);
    crc32c::crc32c_append(crc32c::crc32c(&whose.0), &bytes[4..])
}

/// What the first bytes of an extent say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExtentHeader {
    pub(super) number: u32,
    /// Bytes after the header.
    pub(super) stored: usize,
    pub(super) pages: usize,
    encoding: u8,
}

impl ExtentHeader {
    /// Reads it, without looking at the checksum.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut take = Take(bytes);
        take.u32()?;
        let (number, stored) = (take.u32()?, take.u32()? as usize);
        let (pages, encoding) = (usize::from(take.u8()?), take.u8()?);
        let sound = (1..=MAX_PAGES).contains(&pages)
            && take.u16()? == 0
            && match encoding {
                RAW => stored == pages * PAGE_BYTES,
                ZSTD => stored < pages * PAGE_BYTES,
                _ => false,
            };
        if sound { Ok(Self { number, stored, pages, encoding }) } else { Err(Malformed("no extent")) }
    }
}

/// Checks that `bytes` are the extent `id`.
pub(super) fn check(id: ExtentId, bytes: &[u8]) -> Result<ExtentHeader, Malformed> {
    let header = ExtentHeader::parse(bytes)?;
    if bytes.len() != HEADER + header.stored || header.number != id.number {
        return Err(Malformed("another extent is in its place"));
    }
    let crc = Take(bytes).u32()?;
    if crc == checksum(id.object, bytes) { Ok(header) } else { Err(Malformed("the checksum does not match")) }
}

/// Reads extents one after another, into memory that it keeps.
#[derive(Default)]
pub(super) struct ExtentReader {
    /// The extent as it lies in its object.
    stored: Vec<u8>,
    /// Its pages, unless they are stored as they are.
    plain: Vec<u8>,
    is_raw: bool,
    /// To make it takes as long as to decompress some pages.
    decompressor: Option<Decompressor<'static>>,
}

impl ExtentReader {
    /// Reads the extent `id`, which lies at `place` in what `reader` reads.
    pub(super) fn read(
        &mut self,
        id: ExtentId,
        place: ExtentPlace,
        reader: &dyn ObjectReader,
    ) -> Result<(), Malformed> {
        if place.len == 0 {
            return Err(Malformed("it is not there"));
        }
        self.stored.resize(place.len as usize, 0);
        reader.read_at(place.offset, &mut self.stored).map_err(|_| Malformed("it cannot be read"))?;
        self.unpack(id)
    }

    /// The extent that was read last, as it is stored; nothing after [`Self::put`].
    pub(super) fn stored(&self) -> &[u8] {
        &self.stored
    }

    /// Takes pages in place of those that were read last.
    pub(super) fn put(&mut self, pages: Vec<u8>) {
        self.stored.clear();
        (self.plain, self.is_raw) = (pages, false);
    }

    /// Leaves zeros of all pages but these places.
    pub(super) fn keep(&mut self, places: u64) {
        let mut pages = self.pages().to_vec();
        let each = pages.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().enumerate();
        each.filter(|(place, _)| places >> place & 1 == 0).for_each(|(_, page)| page.fill(0));
        self.put(pages);
    }

    /// The places of the extent that was read last whose pages are not all zeros, a bit for each.
    pub(super) fn filled(&self) -> u64 {
        let pages = self.pages().as_chunks().0.iter().enumerate();
        pages.fold(0, |filled, (place, page)| filled | u64::from(!is_zero(page)) << place)
    }

    /// The pages of the extent that was read last.
    pub(super) fn pages(&self) -> &[u8] {
        if self.is_raw { self.stored.get(HEADER..).unwrap_or_default() } else { &self.plain }
    }

    fn unpack(&mut self, id: ExtentId) -> Result<(), Malformed> {
        let header = check(id, &self.stored)?;
        self.is_raw = header.encoding == RAW;
        if self.is_raw {
            return Ok(());
        }
        let expected = header.pages * PAGE_BYTES;
        self.plain.clear();
        self.plain.reserve(expected);
        match self.decompress() {
            Ok(len) if len == expected => Ok(()),
            Ok(_) => Err(Malformed("it holds another number of pages than it says")),
            Err(_) => Err(Malformed("not zstd")),
        }
    }

    fn decompress(&mut self) -> io::Result<usize> {
        let decompressor = match &mut self.decompressor {
            Some(kept) => kept,
            none => none.insert(Decompressor::new()?),
        };
        decompressor.decompress_to_buffer(&self.stored[HEADER..], &mut self.plain)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bytes::Bytes;
    use super::super::name::{ObjectKind, SnapshotId};
    use super::*;

    fn id(number: u32) -> ExtentId {
        let owner = SnapshotId::from_bytes([7; 16]);
        ExtentId { object: ObjectId { owner, kind: ObjectKind::Critical }, number }
    }

    fn compressor() -> zstd::bulk::Compressor<'static> {
        zstd::bulk::Compressor::new(1).unwrap()
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    /// The pages of an object that is this extent.
    fn unpack(id: ExtentId, bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
        let place = ExtentPlace { offset: 0, len: bytes.len() as u32, pages: 0 };
        let mut reader = ExtentReader::default();
        reader.read(id, place, &Bytes(bytes.to_vec()))?;
        Ok(reader.pages().to_vec())
    }

    #[test]
    fn pages_read_back_whether_or_not_they_shrink() {
        for (pages, smaller) in [(vec![9; 3 * PAGE_BYTES], true), (noise(2 * PAGE_BYTES), false)] {
            let bytes = pack(id(3), &pages, &mut compressor());
            assert_eq!(bytes.len() < pages.len(), smaller);
            assert_eq!(unpack(id(3), &bytes).unwrap(), pages);
            assert_eq!(check(id(3), &bytes).unwrap().pages, pages.len() / PAGE_BYTES);
        }
    }

    #[test]
    fn one_reader_reads_extents_of_any_kind_and_size_after_one_another() {
        let mut reader = ExtentReader::default();
        for pages in [noise(9 * PAGE_BYTES), vec![3; 5 * PAGE_BYTES], noise(PAGE_BYTES), vec![4; PAGE_BYTES]]
        {
            let object = Bytes(pack(id(3), &pages, &mut compressor()));
            let place = ExtentPlace { offset: 0, len: object.0.len() as u32, pages: 0 };
            reader.read(id(3), place, &object).unwrap();
            assert!(reader.pages() == pages && reader.stored() == object.0);
            assert!(reader.read(id(4), place, &object).is_err());
        }
    }

    #[test]
    fn every_flipped_bit_and_every_wrong_place_is_noticed() {
        let mut bytes = pack(id(3), &[9; PAGE_BYTES], &mut compressor());
        assert!(unpack(id(4), &bytes).is_err());
        let mut other = id(3);
        other.object.kind = ObjectKind::Clean;
        assert!(unpack(other, &bytes).is_err());
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(unpack(id(3), &bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(unpack(id(3), &bytes[..bytes.len() - 1]).is_err());
        assert!(unpack(id(3), &[]).is_err());
    }
}
