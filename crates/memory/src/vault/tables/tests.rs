use std::sync::Arc;

use vmstrata_repo::{DirectoryRepository, Repository};

use super::super::Vault;
use super::super::extent::{self, ExtentId};
use super::super::info::ObjectUse;
use super::super::name::{ObjectId, ObjectKind, SnapshotId};
use super::super::object::{self, ExtentPlace};
use super::super::refill::DiskPiece;
use super::super::survey::Survey;
use super::*;
use crate::address::Physical;
use crate::hide::Clear;

const OBJECT: u16 = 3;

/// An object that has these pages, one in an extent, and its directory.
fn sources(pages: &[Vec<u8>]) -> (tempfile::TempDir, Sources) {
    let dir = tempfile::tempdir().unwrap();
    let name = ObjectId { owner: SnapshotId::from_bytes([3; 16]), kind: ObjectKind::Critical };
    let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
    let (mut bytes, mut extents, mut hashes) = (object::header(name).to_vec(), Vec::new(), Vec::new());
    for (number, page) in (0..).zip(pages) {
        let packed = extent::pack(ExtentId { object: name, number }, page, &mut compressor);
        extents.push(ExtentPlace { offset: bytes.len() as u64, len: packed.len() as u32, pages: 1 });
        hashes.push(vec![object::hash(page)]);
        bytes.extend(packed);
    }
    bytes.extend(object::trailer(bytes.len() as u64, &extents, &hashes));
    std::fs::write(dir.path().join(name.to_string()), &bytes).unwrap();
    let repository: Arc<dyn Repository> =
        Arc::new(DirectoryRepository::open(dir.path(), ObjectId::is_name).unwrap());
    let vault = Vault::open(vec![repository]);
    let object = ObjectUse { name, copies: 1, len: bytes.len() as u64 };
    let sources = Sources::open(&vault, &Survey::take(&vault).unwrap(), &BTreeMap::from([(OBJECT, object)]));
    (dir, sources)
}

/// Where the n-th page of [`sources`] is.
fn place(extent: u32) -> Content {
    Content::At(Place { object: OBJECT, extent, slot: 0 })
}

/// Tables as `write` gives them, with their pages but for those of zeros, which the writer never stores.
fn written(tables: &Tables<'_>) -> (Index, Vec<Vec<u8>>) {
    let mut pages: Vec<Vec<u8>> = Vec::new();
    let index = tables
        .write(&mut |page| {
            if page.iter().all(|byte| *byte == 0) {
                return Ok(Content::Zero);
            }
            pages.push(page.to_vec());
            Ok(place(pages.len() as u32 - 1))
        })
        .unwrap();
    (index, pages)
}

fn entry(class: PageClass, content: Content) -> u64 {
    Entry { class, content }.to_word()
}

#[test]
fn tables_read_back() {
    let words = (0..2500u32).map(|page| match page % 7 {
        0 => entry(PageClass::Free, Content::Absent),
        1 => entry(PageClass::Clean, Content::Absent),
        _ => entry(PageClass::Critical, Content::At(Place { object: 1, extent: page, slot: 3 })),
    });
    let pages = Pages::new(words).unwrap();
    let frames = (0..2500).step_by(3).map(Frame::new);
    let clear = Clear { at: Physical::new(0x1234), mask: 8 };
    let hiding = frames.clone().map(|frame| (frame, [clear])).collect();
    let pieces = vec![DiskPiece { disk: 0, offset: 1 << 30, len: 4096 }];
    let refill: Vec<_> = frames.map(|frame| (frame, Refill::new(&[1; PAGE_BYTES], pieces.clone()))).collect();
    let whole = PAGE_BYTES - LENGTH;
    let blobs: BTreeMap<String, Vec<u8>> =
        [0, 1, whole - 1, whole, whole + 1, 3 * PAGE_BYTES].map(|len| (len.to_string(), vec![7; len])).into();
    let tables = Tables { pages: &pages, hiding: &hiding, refill: &refill, blobs: &blobs };
    let (index, stored) = written(&tables);
    let mut put = Put::default();
    index.encode_places(&mut put);
    let mut read = Index { places: Pages::default(), ..index.clone() };
    read.decode_places(&mut Take(&put.0), 2500).unwrap();
    assert_eq!(read, index);
    let (_dir, sources) = sources(&stored);
    assert_eq!(index.pages(&sources, 2500).unwrap(), pages);
    assert!(index.pages(&sources, 2501).is_err() && index.pages(&sources, 2499).is_err());
    assert_eq!(index.hiding(&sources).unwrap(), hiding);
    assert_eq!(index.refill(&sources, 1).unwrap(), refill);
    assert!(index.refill(&sources, 0).is_err(), "a disk that is not there");
    assert_eq!(index.blobs(&sources).unwrap(), blobs);
    index.check(&sources).unwrap();
}

/// Of a machine with one piece of pages.
fn decoded(tables: &[(Kind, u64)], places: &[(Content, u64)]) -> Result<Index, Malformed> {
    let mut index = Index { tables: tables.to_vec(), places: Pages::default() };
    for (content, len) in places {
        index.places.push(Entry { class: PageClass::Critical, content: *content }, *len);
    }
    let mut put = Put::default();
    index.encode_places(&mut put);
    index.decode_places(&mut Take(&put.0), 1000)?;
    Ok(index)
}

#[test]
fn lengths_of_tables_are_bounded() {
    let blob = |name: &str| Kind::Blob(name.to_owned());
    let fits = |tables: &[(Kind, u64)]| {
        let sum = tables.iter().fold(0u64, |sum, (_, pages)| sum.wrapping_add(*pages));
        decoded(tables, &[(Content::Zero, sum)]).is_ok()
    };
    assert!(fits(&[(Kind::Pages, MOST_OF_PIECE), (Kind::Hiding, 1), (blob("a"), MAX_PAGES - 1)]));
    assert!(!fits(&[(Kind::Pages, MOST_OF_PIECE + 1)]));
    assert!(!fits(&[(Kind::Pages, 1), (Kind::Hiding, 2), (blob("a"), MAX_PAGES - 1)]));
    assert!(!fits(&[(Kind::Pages, 1), (blob("a"), u64::MAX), (blob("b"), 2)]));
    assert!(!fits(&[(Kind::Pages, u64::MAX)]));
    let several = |blobs: usize| {
        let fixed = [Kind::Pages, Kind::Hiding, Kind::Refill].map(|kind| (kind, 1)).into_iter();
        fixed.chain((0..blobs).map(|at| (blob(&at.to_string()), 0))).collect::<Vec<_>>()
    };
    assert!(fits(&several(MAX_BLOBS)) && !fits(&several(MAX_BLOBS + 1)));
    assert!(!fits(&[(Kind::Hiding, 1), (Kind::Pages, 1)]) && !fits(&[]), "pages come first");
    assert!(!fits(&[(Kind::Pages, 1), (blob("a"), 1), (blob("a"), 1)]), "twice");
    assert!(decoded(&[(Kind::Pages, 2)], &[(place(0), 1)]).is_err(), "places of fewer pages");
}

#[test]
fn a_piece_ends_with_its_table() {
    let page = |len: u32| [&len.to_le_bytes()[..], &[0; PAGE_BYTES - LENGTH]].concat();
    let stored = [page(u32::MAX), page(PAGE_BYTES as u32), page(8)];
    let (_dir, sources) = sources(&stored);
    for first in 0..2 {
        let index = decoded(&[(Kind::Pages, 1), (Kind::Hiding, 1)], &[(place(first), 1), (place(2), 1)]);
        let said = index.unwrap().pages(&sources, 1000).unwrap_err();
        assert_eq!(said, ["a table ends too early"]);
    }
    // A run of no pages; pages that are left out.
    for content in [place(2), Content::Zero] {
        let index = decoded(&[(Kind::Pages, 1)], &[(content, 1)]).unwrap();
        assert!(index.pages(&sources, 1000).is_err(), "{content:?}");
    }
}

#[test]
fn tables_that_could_not_be_read_are_not_written() {
    let (pages, hiding) = (Pages::default(), Hiding::default());
    let long = |bytes: usize| BTreeMap::from([("long".to_owned(), vec![0; bytes])]);
    let write = |blobs: &BTreeMap<String, Vec<u8>>| {
        Tables { pages: &pages, hiding: &hiding, refill: &[], blobs }.write(&mut |_| Ok(Content::Zero))
    };
    let most = MAX_PAGES as usize * PAGE_BYTES - LENGTH;
    assert!(write(&long(most)).is_ok());
    assert!(matches!(write(&long(most + 1)), Err(VaultError::Limit { .. })));
}
