//! Images of people who want an index to take for ever, or to be written where it does harm.

mod common;
mod index_support;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use common::stock::assert_clean;
use index_support::{Chain, Maker};
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build};
use vmstrata_qcow2::index::IndexLink;
use vmstrata_types::ClusterBits;

fn writable(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("opens")
}

fn number(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).expect("reads");
    u64::from_be_bytes(bytes)
}

/// A layer of large clusters, a disk on top; and what keeps the layer from having an index after `change`.
fn refused(change: impl FnOnce(&File)) -> String {
    let mut chain = Chain::new();
    let path = chain.add(Maker::Ours, 1 << 30, ClusterBits::MAX);
    chain.write(0, &["write -q 0 64k"]);
    chain.add(Maker::Ours, 1 << 30, ClusterBits::MAX);
    change(&writable(&path));
    let built = build(chain.top(), &IndexOptions::default()).expect("the chain can be read");
    let IndexOutcome::Failed(error) = &built.layers[0].outcome else { panic!("{built:?}") };
    error.to_string()
}

/// A refcount table of a million entries that name one block, which would be read a million times.
#[test]
fn a_refcount_block_that_is_named_over_and_over_is_refused() {
    const CLUSTER: u64 = 2 << 20;
    let error = refused(|file| {
        let len = file.metadata().expect("exists").len().next_multiple_of(CLUSTER);
        let first = number(file, number(file, 48));
        file.set_len(len + 5 * CLUSTER).expect("grows");
        let mut table = vec![0; 4 << 21];
        table.chunks_exact_mut(8).for_each(|entry| entry.copy_from_slice(&len.to_be_bytes()));
        table[..8].copy_from_slice(&first.to_be_bytes());
        file.write_all_at(&table, len + CLUSTER).expect("writes");
        file.write_all_at(&(len + CLUSTER).to_be_bytes(), 48).expect("writes");
        file.write_all_at(&4u32.to_be_bytes(), 56).expect("writes");
    });
    assert!(error.contains("one refcount block"), "{error}");
}

/// A sparse file with 8 TiB of tables, none twice, that take up nothing.
#[test]
fn tables_in_a_hole_of_terabytes_are_refused() {
    const ENTRIES: u64 = 4 << 20;
    let error = refused(|file| {
        let l1 = file.metadata().expect("exists").len().next_multiple_of(2 << 20);
        let first = l1 + ENTRIES * 8;
        file.set_len(first + (ENTRIES << 21)).expect("grows");
        let entries = (0..ENTRIES).flat_map(|entry| (1 << 63 | first + (entry << 21)).to_be_bytes());
        file.write_all_at(&entries.collect::<Vec<u8>>(), l1).expect("writes");
        file.write_all_at(&u32::try_from(ENTRIES).expect("fits").to_be_bytes(), 36).expect("writes");
        file.write_all_at(&l1.to_be_bytes(), 40).expect("writes");
    });
    assert!(error.contains("more than its file holds"), "{error}");
}

/// Moves the link of an image without a backing file, as a stock tool may that puts another extension before it.
fn move_link(file: &File, to: u64) {
    let mut header_len = [0; 4];
    file.read_exact_at(&mut header_len, 100).expect("reads");
    let start = u64::from(u32::from_be_bytes(header_len));
    let padding = u32::try_from(to - 8 - start - 8).expect("fits");
    let mut extensions = [0x1234_5678u32.to_be_bytes(), padding.to_be_bytes()].concat();
    extensions.resize(extensions.len() + padding as usize, b'x');
    extensions.extend([0x564d_5358u32.to_be_bytes(), 24u32.to_be_bytes()].concat());
    extensions.extend([0; IndexLink::LEN + 8]);
    file.write_all_at(&extensions, start).expect("writes");
}

/// Bit and link are not in one sector any more, and the link is not even in one.
#[test]
fn a_link_that_was_moved_over_the_end_of_its_sector_is_written_whole() {
    for at in [488, 496, 504, 512] {
        let mut chain = Chain::new();
        let path = chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
        chain.write(0, &["write -q -P 3 1M 64k"]);
        chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
        move_link(&writable(&path), at);
        let before = std::fs::read(&path).expect("reads");
        assert_eq!(chain.build(), ["file"], "link at {at}");
        assert_eq!(chain.verify(), ["good"], "link at {at}");
        assert_eq!(chain.build(), ["kept"], "link at {at}");
        assert_clean(&path);
        chain.remove();
        assert!(std::fs::read(&path).expect("reads") == before, "link at {at}");
    }
}
