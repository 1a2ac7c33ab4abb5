use super::super::hiding::Mask;
use super::super::home::Bytes;
use super::super::info::example;
use super::super::pages::{Content, Entry, Place};
use super::super::refill::DiskPiece;
use super::*;
use crate::address::Physical;
use crate::class::PageClass;

fn entry(class: PageClass, content: Content) -> u64 {
    Entry { class, content }.to_word()
}

fn metadata() -> Metadata {
    let place = Content::At(Place { object: 0, extent: 0, slot: 3 });
    let words = [
        entry(PageClass::Free, Content::Absent),
        entry(PageClass::Clean, Content::Absent),
        entry(PageClass::Critical, place),
        entry(PageClass::Clean, place),
        entry(PageClass::Critical, Content::Zero),
    ];
    let mask = Mask { at: Physical::new(0x1234), width: 8, clear: 8 };
    let pieces = [DiskPiece { disk: 0, offset: 1 << 30, len: 4096 }];
    Metadata {
        info: example(),
        pages: Pages::new(words.into_iter()).unwrap(),
        hiding: Hiding::new(vec![(Frame::new(1), vec![mask])]),
        refill: vec![(Frame::new(1), Refill::new(&[1; PAGE_BYTES], pieces.to_vec()))],
        blobs: BTreeMap::from([("state".to_owned(), vec![7; 1000]), ("empty".to_owned(), Vec::new())]),
    }
}

#[test]
fn it_reads_back() {
    let metadata = metadata();
    let bytes = Bytes(metadata.encode());
    assert_eq!(Metadata::read(metadata.info.id, &bytes).unwrap(), metadata);
    assert_eq!(read_info(metadata.info.id, &bytes).unwrap(), metadata.info);
    let other = SnapshotId::from_bytes([6; 16]);
    assert_eq!(Metadata::read(other, &bytes), Err(Malformed("another snapshot is in its place")));
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let id = metadata().info.id;
    let mut bytes = metadata().encode();
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Metadata::read(id, &Bytes(bytes.clone())).is_err(), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    for len in 0..bytes.len() {
        assert!(Metadata::read(id, &Bytes(bytes[..len].to_vec())).is_err(), "{len}");
    }
}

#[test]
fn critical_pages_never_lie_among_clean_ones() {
    let mut metadata = metadata();
    metadata.info.objects[0].name.kind = super::super::name::ObjectKind::Clean;
    let read = Metadata::read(metadata.info.id, &Bytes(metadata.encode()));
    assert_eq!(read, Err(Malformed("a page lies in no object")));
}
