use proptest::prelude::*;
use vmstrata_types::{ClusterBits, HostOffset};

use super::*;
use crate::create::{CreateOptions, new_image};
use crate::extension::magic;
use crate::feature::CompressionType;

const CHAIN: ChainId = ChainId(*b"0123456789abcdef");

fn root() -> Root {
    let page: Page = [7; PAGE_LEN];
    let pointer = |at| PagePointer::new(&CHAIN, LayerIndex::new(3), HostOffset::new(at), 9, &page);
    Root {
        chain: CHAIN,
        generation: 9,
        layer: LayerIndex::new(3),
        unit: ClusterBits::DEFAULT,
        fine_unit: ClusterBits::from_size(4096).unwrap(),
        size: 50 << 30,
        at: HostOffset::new(0x9000),
        area: HostOffset::new(0x4000)..HostOffset::new(0xa000),
        len_before: 0x3f00,
        table_pages: 1,
        map: pointer(0x5000),
        table: pointer(0x6000),
        fine: pointer(0x7000),
        full: LayerIndex::new(1),
        deltas: vec![DeltaPointer { top: pointer(0x7000), runs: 300 }, DeltaPointer::default()],
    }
}

fn record(name: &str) -> LayerRecord {
    LayerRecord {
        size: 1 << 30,
        tables: Some(RecordTables {
            version: 3,
            cluster_bits: ClusterBits::DEFAULT,
            is_extended: false,
            compression: CompressionType::Zstd,
            l1_at: HostOffset::new(0x3_0000),
            l1_entries: 2,
        }),
        backing: Some(RecordBacking {
            name: name.as_bytes().to_vec(),
            format: Some(BackingFormat::Qcow2),
            home: Home::Sidecar,
        }),
        stamp: Stamp { len: 12345, mtime_ns: Some(-5) },
        digest: [3; 32],
    }
}

#[test]
fn a_root_survives_encoding() {
    let root = root();
    let (page, crc) = root.encode();
    assert_eq!(Root::parse(&page, root.at), Ok((root, crc)));
}

#[test]
fn every_byte_of_a_root_is_guarded() {
    let root = root();
    let (page, _) = root.encode();
    for at in 0..PAGE_LEN {
        let mut broken = page.clone();
        broken[at] ^= 0x10;
        assert!(Root::parse(&broken, root.at).is_err(), "byte {at}");
    }
}

#[test]
fn a_root_found_in_another_place_is_refused() {
    let (page, _) = root().encode();
    let error = Root::parse(&page, HostOffset::new(0x8000)).unwrap_err();
    assert_eq!(error, IndexError::Field { field: "place of the root", value: 0x9000 });
}

#[test]
fn roots_that_cannot_be_are_refused_though_their_checksum_matches() {
    let changes: [fn(&mut Root); 12] = [
        |root| root.size = u64::MAX,
        |root| root.size = 9 << 40,
        |root| root.fine_unit = ClusterBits::MAX,
        |root| root.area.start = HostOffset::new(0x4001),
        |root| root.area.end = root.at,
        |root| root.len_before = 0x4001,
        |root| root.table_pages = 5,
        |root| root.table = PagePointer::HOLE,
        |root| root.full = LayerIndex::new(2),
        |root| root.full = LayerIndex::new(u16::MAX),
        |root| root.deltas.truncate(1),
        |root| root.deltas[1].runs = MAX_DELTA_RUNS - 299,
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut root = root();
        change(&mut root);
        let (page, _) = root.encode();
        assert!(matches!(Root::parse(&page, root.at), Err(IndexError::Field { .. })), "{number}");
    }
}

#[test]
fn a_later_version_is_named() {
    let (mut page, _) = root().encode();
    page[8] = 3;
    assert_eq!(Root::parse(&page, root().at), Err(IndexError::Version { found: 3 }));
}

/// What lies in its bytes from 128 on has no meaning.
#[test]
fn a_root_of_version_1_has_no_fine_tree_and_no_delta_records() {
    let root = root();
    let (mut page, _) = root.encode();
    page[8] = 1;
    page[12..16].fill(0);
    let crc = crc32c::crc32c(&page[..]);
    page[12..16].copy_from_slice(&crc.to_le_bytes());
    let (read, _) = Root::parse(&page, root.at).unwrap();
    assert_eq!(read.fine_leaves(), 0);
    let (fine_unit, fine) = (root.unit, PagePointer::HOLE);
    assert_eq!(read, Root { fine_unit, fine, full: root.layer, deltas: Vec::new(), ..root });
}

#[test]
fn a_root_holds_as_many_delta_records_as_it_may() {
    let deltas = vec![DeltaPointer { top: root().map, runs: MAX_DELTA_RUNS / 64 }; MAX_DELTAS];
    let root = Root { layer: LayerIndex::new(65), deltas, ..root() };
    let (mut page, crc) = root.encode();
    assert_eq!(Root::parse(&page, root.at), Ok((root.clone(), crc)));
    page[148] = 65;
    page[12..16].fill(0);
    let crc = crc32c::crc32c(&page[..]);
    page[12..16].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(Root::parse(&page, root.at), Err(IndexError::Field { field: "delta records", value: 65 }));
}

#[test]
fn runs_survive_encoding() {
    let last = DeltaRun::new(DeltaRun::FIRST_END - 1, DeltaRun::MAX_UNITS, u64::MAX);
    assert_eq!((last.first(), last.units(), last.word()), ((1 << 40) - 1, 1 << 23, u64::MAX));
    let runs: Vec<DeltaRun> = (0..PAGE_RUNS as u64).map(|unit| DeltaRun::new(unit * 3, 2, unit)).collect();
    assert_eq!(decode_runs(&encode_runs(&runs)).collect::<Vec<_>>(), runs);
    let page = encode_runs(&[last]);
    assert_eq!((page[..8].to_vec(), &page[16..]), (vec![255, 255, 255, 255, 255, 0, 0, 128], &[0; 4080][..]));
    assert_eq!(decode_runs(&page).next(), Some(last));
}

#[test]
fn a_pointer_believes_only_its_own_page() {
    let page: Page = [1; PAGE_LEN];
    let make = |chain: &ChainId, layer, at, generation| {
        PagePointer::new(chain, LayerIndex::new(layer), HostOffset::new(at), generation, &page)
    };
    let pointer = make(&CHAIN, 5, 0x7000, 1);
    assert_eq!((pointer.layer().get(), pointer.at().get()), (5, 0x7000));
    assert_eq!(pointer.check(&CHAIN, &page, "leaf"), Ok(()));
    assert!(pointer.check(&ChainId([0; 16]), &page, "leaf").is_err());
    // The same bytes elsewhere, or of another time, have another checksum.
    let others = [make(&CHAIN, 5, 0x8000, 1), make(&CHAIN, 6, 0x7000, 1), make(&CHAIN, 5, 0x7000, 2)];
    assert!(others.iter().all(|other| other.to_bytes()[12..] != pointer.to_bytes()[12..]));
}

#[test]
fn inner_pages_hold_pointers_and_holes() {
    let pointer = PagePointer::new(&CHAIN, LayerIndex::new(1), HostOffset::new(0x1000), 1, &[0; PAGE_LEN]);
    let page = encode_inner(&[PagePointer::HOLE, pointer]);
    let read = decode_inner(&page).unwrap();
    assert_eq!(read[..3], [PagePointer::HOLE, pointer, PagePointer::HOLE]);
    let mut nowhere = page;
    nowhere[16..22].fill(0);
    assert!(decode_inner(&nowhere).is_err(), "a pointer to page 0");
}

#[test]
fn layer_tables_are_packed_from_the_base_up() {
    let names: Vec<String> = (0..100).map(|number| "x".repeat(1 + number * 10 % 1023)).collect();
    let records: Vec<LayerRecord> = names.iter().map(|name| record(name)).collect();
    let pages = pack(&records);
    let mut read = Vec::new();
    for (count, page) in &pages {
        let page = TablePage::parse(page).unwrap();
        assert_eq!((page.first.index(), page.records.len()), (read.len(), *count));
        read.extend(page.records);
    }
    assert_eq!(read, records);
    let shorter = pack(&records[..60]);
    assert_eq!(shorter[..shorter.len() - 1], pages[..shorter.len() - 1], "full pages do not change");
}

#[test]
fn the_longest_name_fits_and_raw_layers_have_no_tables() {
    let long = record(&"n".repeat(1023));
    let raw = LayerRecord { tables: None, backing: None, ..record("") };
    let records = [raw, long];
    let pages = pack(&records);
    assert_eq!(TablePage::parse(&pages[0].1).unwrap().records, records);
}

#[test]
fn links_are_found_in_new_images_and_nowhere_else() {
    let with_room = CreateOptions { index_room: true, ..CreateOptions::new(1 << 30) };
    let image = new_image(&with_room).unwrap();
    let cluster = &image.parts[2].1;
    let place = link_place(cluster, &image.header).expect("room").get() as usize;
    assert!(place + IndexLink::LEN <= 512, "one sector holds it");
    assert_eq!(cluster[place - 8..place - 4], magic::INDEX.to_be_bytes());
    assert_eq!(IndexLink::parse(&cluster[place..place + IndexLink::LEN]), None);
    let stock = new_image(&CreateOptions::new(1 << 30)).unwrap();
    assert_eq!(link_place(&stock.parts[2].1, &stock.header), None);
    let version_2 = new_image(&CreateOptions { version: 2, ..with_room }).unwrap();
    assert_eq!(link_place(&version_2.parts[2].1, &version_2.header), None);
}

#[test]
fn a_link_survives_encoding() {
    let link = IndexLink { root: HostOffset::new(0x8000), generation: 77, root_crc: 0xdead_beef };
    assert_eq!(IndexLink::parse(&IndexLink::encode(Some(link))), Some(link));
    let mut unknown = IndexLink::encode(Some(link));
    unknown[23] = 1;
    assert_eq!(IndexLink::parse(&unknown), None, "what a later version may say");
}

fn any_page() -> impl Strategy<Value = Box<Page>> {
    // Mostly zeros and small numbers, so that many pass the first checks.
    proptest::collection::vec((0..PAGE_LEN, 0u8..4), 0..60).prop_map(|bytes| {
        let mut page = Box::new([0; PAGE_LEN]);
        bytes.into_iter().for_each(|(at, value)| page[at % 256] = value);
        page
    })
}

proptest! {
    #[test]
    fn no_page_makes_a_parser_panic(page in any_page(), count in 0u8..60) {
        let _ = decode_inner(&page);
        let mut table = page.clone();
        table[4..8].copy_from_slice(&[count, 0, 0, 0]);
        table[8] = 80;
        let _ = TablePage::parse(&table);
        let mut root = page;
        root[..12].copy_from_slice(b"VMSINDEX\x02\0\0\0");
        let _ = Root::parse(&root, HostOffset::ZERO);
    }
}
