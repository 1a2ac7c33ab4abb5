use std::io;

use super::super::name::ObjectKind;
use super::*;
use crate::address::PAGE_BYTES;

struct Bytes(Vec<u8>);

impl ObjectReader for Bytes {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.0.get(usize::try_from(at).unwrap()..).unwrap_or_default();
        into.copy_from_slice(from.get(..into.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

fn name() -> ObjectName {
    ObjectName { owner: SnapshotId::from_bytes([3; 16]), kind: ObjectKind::Critical }
}

/// Three extents, the second one first, of 2, 1 and 3 pages.
fn object() -> Bytes {
    let mut bytes = header(name()).to_vec();
    let mut extents = vec![ExtentPlace::default(); 3];
    let mut hashes = vec![Vec::new(); 3];
    let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
    for (number, count) in [(1u32, 1usize), (0, 2), (2, 3)] {
        let pages = vec![number as u8; count * PAGE_BYTES];
        let packed = extent::pack(ExtentId { object: name(), number }, &pages, &mut compressor);
        let (offset, len) = (bytes.len() as u64, packed.len() as u32);
        extents[number as usize] = ExtentPlace { offset, len, pages: count as u8 };
        hashes[number as usize] = pages.chunks(PAGE_BYTES).map(hash).collect();
        bytes.extend(packed);
    }
    let end = trailer(bytes.len() as u64, &extents, &hashes);
    bytes.extend(end);
    Bytes(bytes)
}

#[test]
fn extents_are_found_by_the_table_and_without_it() {
    let object = object();
    let found = contents(name(), &object).unwrap();
    assert_eq!(found.extents.iter().map(|extent| extent.pages).collect::<Vec<_>>(), [2, 1, 3]);
    assert_eq!(scan(name(), &object), found);
    for (number, place) in (0..).zip(&found.extents) {
        let bytes = read(&object, place.offset, place.len as usize).unwrap();
        let pages = extent::unpack(ExtentId { object: name(), number }, &bytes).unwrap();
        assert_eq!(pages, vec![number as u8; usize::from(place.pages) * PAGE_BYTES]);
    }
    let hashes = hashes(name(), &object).unwrap();
    assert_eq!(hashes[..3], [hash(&[0; PAGE_BYTES]), hash(&[0; PAGE_BYTES]), hash(&[1; PAGE_BYTES])]);
    assert_eq!(hashes.len(), 6);
}

/// Whatever bit is flipped: the table, the hashes, or an extent says so, or the bit means nothing.
#[test]
fn no_flipped_bit_is_believed() {
    let whole = object();
    let (right, right_hashes) = (contents(name(), &whole).unwrap(), hashes(name(), &whole).unwrap());
    let end = whole.0.len() - TAIL - right.extents.len() * ENTRY - right_hashes.len() * 16;
    for bit in 0..whole.0.len() * 8 {
        let mut bytes = whole.0.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let bytes = Bytes(bytes);
        let (found, found_hashes) = (contents(name(), &bytes), hashes(name(), &bytes));
        let noticed = found.is_err() || found_hashes.is_err();
        let is_extent = (HEADER..end).contains(&(bit / 8));
        assert_eq!(noticed, !is_extent, "bit {bit}");
        if is_extent {
            assert!(scan(name(), &bytes) != right, "bit {bit}");
        }
    }
}

#[test]
fn objects_cut_short_or_of_another_name_are_refused() {
    let whole = object();
    let mut other = name();
    other.kind = ObjectKind::Clean;
    assert!(contents(other, &whole).is_err());
    for len in 0..whole.0.len() {
        assert!(contents(name(), &Bytes(whole.0[..len].to_vec())).is_err(), "{len}");
    }
}
