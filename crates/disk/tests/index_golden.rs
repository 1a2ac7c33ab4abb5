//! Indices that each version of the format wrote, kept for ever: whatever is changed, they are still read, and mean the same.
//!
//! `index_golden/v1`: `0` and `1` have their index in the file, `2` (qcow2 version 2) in a sidecar; `3` is the active layer.
//! `index_golden/v2`: `0`, with subclusters, has a full index in a sidecar, `1` a delta record in the file; `2` is the active
//! layer. They were made by `VMSTRATA_WRITE_GOLDEN=DIR cargo test --test index_golden`, which only a new format version needs.
//! What is made on top of them is of the version of now.

use std::path::{Path, PathBuf};

use crate::common::{open, scratch};
use crate::index_support::{Chain, Maker, name_of, root_of};
use tempfile::TempDir;
use vmstrata_disk::index::{IndexOptions, verify};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_qcow2::Header;
use vmstrata_qcow2::index::{Home, IndexLink, PAGE_LEN, Root, TablePage, link_place};
use vmstrata_types::{ClusterBits, HostOffset};

const V1: [&str; 5] = ["0", "1", "2", "2.vmsx", "3"];
const V2: [&str; 4] = ["0", "0.vmsx", "1", "2"];
/// Subclusters of 512 bytes.
const SPLIT: ClusterBits = ClusterBits::new(14).expect("16 KiB");

fn golden(version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/index_golden").join(version)
}

fn copies(version: &str, files: &[&str]) -> TempDir {
    let dir = scratch();
    for name in files {
        std::fs::copy(golden(version).join(name), dir.path().join(name)).expect("copies");
    }
    dir
}

fn make() -> Chain {
    let mut chain = Chain::new();
    for (number, maker) in [Maker::Subclusters, Maker::Ours].into_iter().enumerate() {
        chain.add(maker, 1 << 20, SPLIT);
        chain.write(number, &[&format!("write -q -P 5 {}k 3k", number * 200)]);
    }
    chain.add(Maker::Ours, 1 << 20, SPLIT);
    chain.build();
    chain
}

fn assert_good(top: &Path, indices: usize) {
    let files = verify(top, &IndexOptions::default()).expect("reads");
    let verdicts: Vec<&str> = files.iter().map(|file| name_of(&file.verdict)).collect();
    assert_eq!(verdicts, vec!["good"; indices]);
}

/// Takes a snapshot of a disk; the layer that it froze.
fn snapshot_of(disk: &Path) -> PathBuf {
    let disk = open(disk);
    let taken =
        disk.snapshot(&SnapshotInfo { name: "now".into(), ..SnapshotInfo::default() }).expect("taken");
    disk.close().expect("closes");
    taken.layer
}

#[test]
fn indices_of_each_version_are_read() {
    if let Some(to) = std::env::var_os("VMSTRATA_WRITE_GOLDEN") {
        let chain = make();
        for name in V2 {
            std::fs::copy(chain.dir.path().join(name), Path::new(&to).join(name)).expect("copies");
        }
    }
    assert_good(&copies("v1", &V1).path().join("3"), 3);
    assert_good(&copies("v2", &V2).path().join("2"), 2);
}

#[test]
fn an_index_on_top_of_version_1_takes_its_pages() {
    let dir = copies("v1", &V1);
    let frozen = snapshot_of(&dir.path().join("3"));
    let (root, _) = root_of(&frozen);
    assert_eq!((root.layer.get(), root.unit, root.fine_unit), (3, ClusterBits::MIN, ClusterBits::MIN));
    assert_eq!((root.full.get(), root.deltas.len()), (2, 1), "a delta record stands on it");
    // Of an empty layer: a page of the table and the one above it, and the root.
    assert_eq!(root.area.end - root.area.start, 3 * PAGE_LEN as u64);
    assert_good(&dir.path().join("3"), 4);
}

#[test]
fn an_index_on_top_of_version_2_takes_its_delta_records() {
    let dir = copies("v2", &V2);
    let frozen = snapshot_of(&dir.path().join("2"));
    let ((below, _), (root, _)) = (root_of(&dir.path().join("1")), root_of(&frozen));
    assert_eq!((root.unit, root.fine_unit, root.full.get()), (SPLIT, ClusterBits::MIN, 0));
    assert_eq!((below.deltas.len(), below.deltas[0].runs, root.deltas.len()), (1, 1, 2));
    assert_eq!((root.deltas[0], root.map, root.fine), (below.deltas[0], below.map, below.fine));
    assert!(!root.fine.is_hole(), "the base has a cluster that is written in part");
    assert_good(&dir.path().join("2"), 3);
}

/// The bytes, without the engine.
#[test]
fn the_root_of_version_1_says_what_it_said() {
    let bytes = std::fs::read(golden("v1").join("1")).expect("reads");
    let header = Header::parse(&bytes, bytes.len() as u64).expect("a header");
    let place = link_place(&bytes, &header).expect("room").get() as usize;
    assert_eq!(place, 136);
    let link = IndexLink::parse(&bytes[place..place + IndexLink::LEN]).expect("a link");
    let page = |at: HostOffset| -> &[u8; PAGE_LEN] {
        bytes[at.get() as usize..][..PAGE_LEN].try_into().expect("a page")
    };
    let (root, crc) = Root::parse(page(link.root), link.root).expect("a root");
    assert_eq!((link.root_crc, link.generation, root.generation), (crc, 2, 2));
    assert_eq!((root.layer.get(), root.unit, root.size), (1, ClusterBits::MIN, 1 << 20));
    assert_eq!((root.leaves(), root.table_pages), (4, 1));
    assert_eq!(root.area.end.get(), bytes.len() as u64);
    // The table's page lies before its inner page, and that before the root.
    let table = HostOffset::new(link.root.get() - 2 * PAGE_LEN as u64);
    let records = TablePage::parse(page(table)).expect("a table").records;
    assert_eq!(records.len(), 2);
    let below = records[1].backing.as_ref().expect("a backing file");
    assert_eq!((&*below.name, below.home), (&b"0"[..], Home::File));
    assert_eq!(records[1].stamp.len, bytes.len() as u64);
}
