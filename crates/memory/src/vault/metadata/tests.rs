use super::super::bytes::Bytes;
use super::super::info::example;
use super::super::pages::Content;
use super::super::tables::Tables;
use super::*;

/// Metadata whose tables are of no further interest: each page lies at the next place.
fn metadata() -> Metadata {
    let info = example();
    let (pages, hiding) = (Pages::default(), Hiding::default());
    let blobs = BTreeMap::from([("state".to_owned(), vec![7; 10_000]), ("empty".to_owned(), Vec::new())]);
    let tables = Tables { pages: &pages, hiding: &hiding, refill: &[], blobs: &blobs };
    let mut slot = 0;
    let put = |_: &[u8; PAGE_BYTES]| {
        slot += 1;
        Ok(Content::At(Place { object: 7, extent: 0, slot }))
    };
    let tables = tables.write(&mut { put }).unwrap();
    Metadata { info, tables }
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
fn tables_never_lie_among_clean_pages() {
    let mut metadata = metadata();
    metadata.info.objects.get_mut(&7).unwrap().name.kind = ObjectKind::Clean;
    let read = Metadata::read(metadata.info.id, &Bytes(metadata.encode()));
    assert_eq!(read, Err(Malformed("a page lies in no object")));
}

#[test]
fn what_is_out_of_bounds_is_refused() {
    let read = |change: fn(&mut Info)| {
        let mut metadata = metadata();
        change(&mut metadata.info);
        Metadata::read(metadata.info.id, &Bytes(metadata.encode()))
    };
    read(|_| ()).unwrap();
    read(|info| info.critical_copies = 0).unwrap_err();
    read(|info| info.clean_copies = info.critical_copies + 1).unwrap_err();
    read(|info| info.name = "a/b".to_owned()).unwrap_err();
    read(|info| info.labels = vec![Default::default(); 33]).unwrap_err();
    read(|info| info.objects.get_mut(&7).unwrap().name.kind = ObjectKind::Metadata).unwrap_err();
}
