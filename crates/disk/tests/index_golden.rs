//! Indices that version 1 of the format wrote, kept for ever: whatever is changed, they are still read, and mean the same.
//!
//! `index_golden/v1`: `0` and `1` have their index in the file, `2` (qcow2 version 2) in a sidecar; `3` is the active layer.
//! They were made by `VMSTRATA_WRITE_GOLDEN=DIR cargo test --test index_golden`, which only a new format version needs.
//! What is made on top of them is of the version of now.

mod common;
mod index_support;

use std::path::{Path, PathBuf};

use common::{open, scratch};
use index_support::{Chain, Maker, name_of, root_of};
use vmstrata_disk::index::{IndexOptions, verify};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_qcow2::Header;
use vmstrata_qcow2::index::{Home, IndexLink, PAGE_LEN, Root, TablePage, link_place};
use vmstrata_types::{ClusterBits, HostOffset};

const FILES: [&str; 5] = ["0", "1", "2", "2.vmsx", "3"];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/index_golden/v1")
}

fn make() -> Chain {
    let mut chain = Chain::new();
    let layers =
        [(Maker::Ours, ClusterBits::MIN), (Maker::Ours, ClusterBits::MIN), (Maker::Old, ClusterBits::MIN)];
    for (number, (maker, bits)) in layers.into_iter().enumerate() {
        chain.add(maker, 1 << 20, bits);
        chain.write(number, &[&format!("write -q -P 5 {}k 3k", number * 200)]);
    }
    chain.add(Maker::Ours, 1 << 20, ClusterBits::MIN);
    chain.build();
    chain
}

#[test]
fn indices_of_version_1_are_read() {
    if let Some(to) = std::env::var_os("VMSTRATA_WRITE_GOLDEN") {
        let chain = make();
        for name in FILES {
            std::fs::copy(chain.dir.path().join(name), Path::new(&to).join(name)).expect("copies");
        }
    }
    let dir = scratch();
    for name in FILES {
        std::fs::copy(golden().join(name), dir.path().join(name)).expect("copies");
    }
    let files = verify(&dir.path().join("3"), &IndexOptions::default()).expect("reads");
    let verdicts: Vec<&str> = files.iter().map(|file| name_of(&file.verdict)).collect();
    assert_eq!(verdicts, ["good"; 3]);
}

#[test]
fn an_index_on_top_of_version_1_takes_its_pages() {
    let dir = scratch();
    for name in FILES {
        std::fs::copy(golden().join(name), dir.path().join(name)).expect("copies");
    }
    let disk = open(&dir.path().join("3"));
    let taken =
        disk.snapshot(&SnapshotInfo { name: "now".into(), ..SnapshotInfo::default() }).expect("taken");
    disk.close().expect("closes");
    let (root, _) = root_of(&taken.layer);
    assert_eq!((root.layer.get(), root.unit, root.fine_unit), (3, ClusterBits::MIN, ClusterBits::MIN));
    assert_eq!((root.full.get(), root.deltas.len()), (2, 1), "a delta record stands on it");
    // Of an empty layer: a page of the table and the one above it, and the root.
    assert_eq!(root.area.end - root.area.start, 3 * PAGE_LEN as u64);
    let files = verify(&dir.path().join("3"), &IndexOptions::default()).expect("reads");
    let verdicts: Vec<&str> = files.iter().map(|file| name_of(&file.verdict)).collect();
    assert_eq!(verdicts, ["good"; 4]);
}

/// The bytes, without the engine.
#[test]
fn the_root_of_version_1_says_what_it_said() {
    let bytes = std::fs::read(golden().join("1")).expect("reads");
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
