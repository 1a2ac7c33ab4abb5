//! Images of people who want an index to take for ever, or to be written where it does harm.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::common::flat::{assert_reads, read};
use crate::common::stock::{assert_clean, content};
use crate::index_support::{Chain, Maker, root_of};
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build};
use vmstrata_disk::{
    CreateOptions, Disk, Format, OpenOptions as DiskOptions, ResourceOptions, Resources, create,
};
use vmstrata_qcow2::index::{IndexLink, PAGE_LEN, Page, PagePointer, decode_inner, encode_inner};
use vmstrata_types::{ClusterBits, HostOffset};

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
        let entries = (0..ENTRIES).flat_map(|entry| ((1 << 63) | (first + (entry << 21))).to_be_bytes());
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

/// The base's record in the layer table: where its fields lie in the table's first page.
const TIME_IS_KNOWN: usize = 8 + 7;
const SIZE: usize = 8 + 8;
const L1_AT: usize = 8 + 16;

/// Writes another record of the base into an index of two layers, with all checksums and the file's time right.
fn forge_base(path: &Path, change: &dyn Fn(&mut Page)) {
    let file = writable(path);
    let modified = file.metadata().and_then(|data| data.modified()).expect("exists");
    let page_at = |at: HostOffset| {
        let mut page = Box::new([0; PAGE_LEN]);
        file.read_exact_at(&mut page[..], at.get()).expect("reads");
        page
    };
    let (mut root, link_at) = root_of(path);
    let put = |at: HostOffset, page: &Page| {
        file.write_all_at(page, at.get()).expect("writes");
        PagePointer::new(&root.chain, root.layer, at, root.generation as u32, page)
    };
    let mut pointers = *decode_inner(&page_at(root.table.at())).expect("an inner page");
    let mut table = page_at(pointers[0].at());
    change(&mut table);
    pointers[0] = put(pointers[0].at(), &table);
    root.table = put(root.table.at(), &encode_inner(&pointers));
    let (page, root_crc) = root.encode();
    file.write_all_at(&page[..], root.at.get()).expect("writes");
    let link = IndexLink { root: root.at, generation: root.generation, root_crc };
    file.write_all_at(&IndexLink::encode(Some(link)), link_at.get()).expect("writes");
    file.set_modified(modified).expect("sets");
}

/// A disk of one tenant, on a layer that another stands on too, brings an index that says something else of that layer than
/// its header does. His disk, opened first, reads right or not at all; the other's reads right.
#[test]
fn what_an_index_says_of_a_layer_changes_nothing_for_others_on_it() {
    let forgeries: [&dyn Fn(&mut Page); 3] = [
        // The time is not known: the digest is right, and decides.
        &|table| {
            table[TIME_IS_KNOWN] = 0;
            table[SIZE..SIZE + 8].copy_from_slice(&512u64.to_le_bytes());
        },
        // The time is right, and decides.
        &|table| table[SIZE..SIZE + 8].copy_from_slice(&512u64.to_le_bytes()),
        &|table| table[L1_AT..L1_AT + 8].copy_from_slice(&0x8_0000u64.to_le_bytes()),
    ];
    for (number, forgery) in forgeries.into_iter().enumerate() {
        for base_is_indexed in [false, true] {
            let mut chain = Chain::new();
            let golden = chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
            chain.write(0, &["write -q -P 5 0 3M"]);
            if base_is_indexed {
                chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
                chain.build();
                chain.files.pop();
            }
            let overlay = |name: &str, below: &str| {
                let path = chain.dir.path().join(name);
                let backing = Some((PathBuf::from(below), Format::Qcow2));
                create(&path, &CreateOptions { backing, ..CreateOptions::default() }).expect("creates");
                path
            };
            let golden = golden.file_name().and_then(|name| name.to_str()).expect("a name");
            let (evil, theirs, ours) = (overlay("evil", golden), overlay("a", "evil"), overlay("b", golden));
            build(&theirs, &IndexOptions::default()).expect("builds");
            forge_base(&evil, forgery);
            let expected = content(&ours, "qcow2");
            let resources = Resources::new(ResourceOptions::default());
            let open = |path: &Path| {
                let options = DiskOptions { read_only: true, ..DiskOptions::default() };
                Disk::open(path, &options, &resources).expect("opens")
            };
            let theirs = open(&theirs);
            let seen = read(&theirs, 0, expected.len());
            assert!(seen.is_err() || seen.is_ok_and(|bytes| bytes == expected), "forgery {number}");
            assert_reads(&open(&ours), &expected, "by whoever knows nothing of the forgery");
        }
    }
}
