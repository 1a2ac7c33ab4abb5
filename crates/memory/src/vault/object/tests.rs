use super::super::bytes::Bytes;
use super::super::extent::{ExtentId, ExtentReader};
use super::super::name::ObjectKind;
use super::scan::scan;
use super::*;
use crate::address::PAGE_BYTES;

fn name() -> ObjectId {
    ObjectId { owner: SnapshotId::from_bytes([3; 16]), kind: ObjectKind::Critical }
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
        let mut reader = ExtentReader::default();
        reader.read(ExtentId { object: name(), number }, *place, &object).unwrap();
        assert_eq!(reader.pages(), vec![number as u8; usize::from(place.pages) * PAGE_BYTES]);
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

/// An object of which some bytes cannot be read.
struct Holed(Bytes, std::ops::Range<u64>);

impl ObjectReader for Holed {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> vmstrata_repo::Result<()> {
        if at < self.1.end && self.1.start < at + into.len() as u64 {
            return Err(vmstrata_repo::Error::of("memory", "reading")(std::io::Error::other("lost")));
        }
        self.0.read_at(at, into)
    }
}

#[test]
fn an_object_without_its_first_bytes_is_found_by_its_tail() {
    let whole = object();
    let right = contents(name(), &whole).unwrap();
    let holed = Holed(whole, 0..HEADER as u64);
    assert_eq!(contents_of_rest(name(), &holed).unwrap(), right);
    // It is not whole, and nothing new is made to depend on it.
    assert!(contents(name(), &holed).is_err() && hashes(name(), &holed).is_err());
}

/// Many extents of random pages, some of which lie behind a piece that is lost or damaged.
#[test]
fn the_scan_goes_on_behind_what_is_lost_or_damaged() {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
    let mut bytes = header(name()).to_vec();
    let mut places = Vec::new();
    for number in 0..200 {
        let pages: Vec<u8> = (0..4 * PAGE_BYTES).map(|_| next()).collect();
        let packed = extent::pack(ExtentId { object: name(), number }, &pages, &mut compressor);
        places.push(ExtentPlace { offset: bytes.len() as u64, len: packed.len() as u32, pages: 4 });
        bytes.extend(packed);
    }
    let (from, to) = (places[40].offset + 100, places[77].offset + 5);
    let lost = scan(name(), &Holed(Bytes(bytes.clone()), from..to)).extents;
    assert_eq!(lost[..40], places[..40]);
    assert!(lost[40..78].iter().all(|place| place.len == 0));
    // The next may begin in the sector up to which was lost.
    assert!(lost[79..] == places[79..]);
    // One sector, or one byte, costs the extent that it lies in.
    let inside = places[100].offset + 7000;
    let one = scan(name(), &Holed(Bytes(bytes.clone()), inside..inside + 512)).extents;
    let mut flipped = bytes.clone();
    flipped[inside as usize] ^= 1;
    for found in [one, scan(name(), &Bytes(flipped)).extents] {
        let gone: Vec<usize> = (0..200).filter(|&number| found[number] != places[number]).collect();
        assert_eq!(gone, [100]);
    }
    // Damage hides the extents that it lies in.
    bytes[from as usize..to as usize].fill(0x55);
    let damaged = scan(name(), &Bytes(bytes)).extents;
    assert_eq!((&damaged[..40], &damaged[78..]), (&places[..40], &places[78..]));
    assert!(damaged[40..78].iter().all(|place| place.len == 0));
}
