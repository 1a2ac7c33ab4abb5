//! Disks that are served from their indices: the same map, the same bytes, whatever becomes of the index.

mod common;
mod index_support;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;

use common::flat::{assert_reads, range, write};
use common::stock::content;
use common::{for_seeds, open, open_read_only, random};
use index_support::{Chain, random_chain};
use rand::Rng as _;
use vmstrata_disk::index::{IndexOptions, build};
use vmstrata_disk::{Disk, Extent};

fn map(disk: &Disk) -> Vec<Extent> {
    disk.extents_by_place(range(0, disk.size()), usize::MAX).expect("maps")
}

fn build_with_top(chain: &Chain) {
    let built =
        build(chain.top(), &IndexOptions { include_top: true, ..IndexOptions::default() }).expect("builds");
    assert_eq!(built.layers.len(), chain.files.len());
}

#[test]
fn an_indexed_chain_has_the_map_that_its_tables_make() {
    for_seeds(10, |seed| {
        let mut random = random("served", seed);
        let layers = random.random_range(2..8);
        let chain = random_chain(&mut random, layers);
        let before = map(&open_read_only(chain.top()));
        build_with_top(&chain);
        let disk = open_read_only(chain.top());
        assert_eq!(map(&disk), before);
        assert_reads(&disk, &content(chain.top(), "qcow2"), "from the index");
    });
}

#[test]
fn writes_go_on_above_an_index() {
    let chain = Chain::ours(4);
    chain.build();
    let mut model = content(chain.top(), "qcow2");
    let disk = open(chain.top());
    for at in [0usize, 100_000, 200_000, 33 << 20] {
        write(&disk, at as u64, &[0x77; 5000]).expect("writes");
        model[at..at + 5000].fill(0x77);
    }
    assert_reads(&disk, &model, "while it is open");
    disk.close().expect("closes");
    drop(disk);
    assert!(content(chain.top(), "qcow2") == model);
    assert_eq!(chain.verify(), ["good"; 3]);
    chain.assert_clean();
}

/// Pages are checked when they are read, not when the index is found.
#[test]
fn a_damaged_leaf_is_made_again_from_the_tables() {
    let chain = Chain::ours(4);
    let before: Vec<u64> = chain.files.iter().map(|file| file.metadata().expect("exists").len()).collect();
    build_with_top(&chain);
    let expected = content(chain.top(), "qcow2");
    for (file, start) in chain.files.iter().zip(before) {
        let handle = OpenOptions::new().read(true).write(true).open(file).expect("opens");
        let modified = handle.metadata().and_then(|data| data.modified()).expect("exists");
        // The first page of an index is its first leaf.
        let at = start.next_multiple_of(1 << 16) + 8 * 77;
        handle.write_all_at(&[0xff; 8], at).expect("writes");
        handle.set_modified(modified).expect("sets");
        let disk = open_read_only(chain.top());
        assert_reads(&disk, &expected, "beside a damaged leaf");
    }
    // The leaf of the newest layer is the one that its own index reads.
    assert_eq!(chain.verify(), ["damaged"; 3]);
}

/// A running disk neither notices that an index is made of its layers, nor that it is taken away.
#[test]
fn indices_come_and_go_under_a_running_disk() {
    let chain = Chain::ours(20);
    let expected = content(chain.top(), "qcow2");
    // Less room for open files than there are layers: they are closed and opened all the time.
    let resources = common::small_resources(None);
    let options = vmstrata_disk::OpenOptions { read_only: true, ..vmstrata_disk::OpenOptions::default() };
    let open = || Disk::open(chain.top(), &options, &resources).expect("opens");
    let disk = open();
    assert_reads(&disk, &expected, "before");
    chain.build();
    assert_reads(&disk, &expected, "beside new indices");
    drop(disk);
    let disk = open();
    chain.remove();
    assert_reads(&disk, &expected, "after the indices it read are gone");
}
