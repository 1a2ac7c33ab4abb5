//! Taking indices away from files that were written since: nothing of the guest's goes with them.

mod common;
mod index_support;

use std::path::Path;

use common::flat::write;
use common::stock::{assert_clean, content, qemu_io};
use common::{open, scratch};
use vmstrata_disk::index::{IndexOptions, build, remove};
use vmstrata_disk::{CreateOptions, create};

fn with_top() -> IndexOptions {
    IndexOptions { include_top: true, ..IndexOptions::default() }
}

/// An image that ends in the middle of its last cluster, with an index behind that.
fn ends_within_a_cluster(path: &Path) {
    create(path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).expect("creates");
    let disk = open(path);
    write(&disk, 0, &[1; 4096]).expect("writes");
    disk.close().expect("closes");
    drop(disk);
    assert_ne!(path.metadata().expect("exists").len() % 65536, 0, "the rest of the cluster is not there");
    build(path, &with_top()).expect("builds");
}

fn write_the_rest(path: &Path, by_stock: bool) {
    if by_stock {
        qemu_io(path, &["write -q -P 2 4k 56k".to_owned()]);
        return;
    }
    let disk = open(path);
    write(&disk, 4096, &[2; 56 << 10]).expect("writes");
    disk.close().expect("closes");
}

/// A write into a cluster that is there changes no table, and bytes that the file did not have when the index was made.
#[test]
fn what_was_written_in_place_since_stays_when_the_index_goes() {
    for (by_stock, is_built_again) in [(false, false), (true, false), (false, true), (true, true)] {
        let dir = scratch();
        let path = dir.path().join("disk");
        ends_within_a_cluster(&path);
        write_the_rest(&path, by_stock);
        let expected = content(&path, "qcow2");
        assert!(expected[4096..60 << 10].iter().all(|&byte| byte == 2));
        if is_built_again {
            build(&path, &with_top()).expect("builds");
        }
        let with_index = path.metadata().expect("exists").len();
        remove(&path, &with_top()).expect("removes");
        assert!(path.metadata().expect("exists").len() < with_index, "the index is cut off");
        assert!(content(&path, "qcow2") == expected, "by stock: {by_stock}, built again: {is_built_again}");
        assert_clean(&path);
    }
}

/// Where nobody wrote, the file is what it was, also after a second index in place of the first.
#[test]
fn a_file_that_ended_within_a_cluster_does_so_again() {
    let dir = scratch();
    let path = dir.path().join("disk");
    ends_within_a_cluster(&path);
    let len = |path: &Path| path.metadata().expect("exists").len();
    let with_index = len(&path);
    remove(&path, &with_top()).expect("removes");
    let before = len(&path);
    assert_ne!(before % 65536, 0);
    for _ in 0..2 {
        build(&path, &with_top()).expect("builds");
        assert_eq!(len(&path), with_index);
        // The bit goes, and with it the index; its place is taken again.
        qemu_io(&path, &["write -q -P 3 0 512".to_owned()]);
    }
    remove(&path, &with_top()).expect("removes");
    assert_eq!(len(&path), before);
    assert_clean(&path);
}
