//! Layers that somebody changes beside a disk in use: what no request meets is noticed, too, and nothing is taken for zeros.

mod common;
mod index_support;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::flat::{assert_reads, read, write};
use common::small_resources;
use common::stock::content;
use index_support::{Chain, Maker};
use vmstrata_disk::{Disk, OpenOptions};
use vmstrata_types::ClusterBits;

const MIB: usize = 1 << 20;

/// A base with a mebibyte of ones, nothing in the layers above, and their indices.
fn chain(maker: Maker, layers: usize) -> Chain {
    let mut chain = Chain::new();
    (0..layers).for_each(|_| drop(chain.add(maker, 64 << 20, ClusterBits::DEFAULT)));
    chain.write(0, &["write -P 1 0 1M"]);
    chain.build();
    chain
}

/// Opens it so that its layers are looked at all the time.
fn watched(path: &Path) -> Arc<Disk> {
    Disk::open(path, &OpenOptions::default(), &small_resources(None)).expect("opens")
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What is written into a middle layer hides what requests read further down, in a file that is what it was.
#[test]
fn a_write_into_a_layer_that_no_request_reads_shows() {
    for maker in [Maker::Ours, Maker::Stock] {
        let chain = chain(maker, 12);
        let disk = watched(chain.top());
        assert_eq!(read(&disk, 0, MIB).expect("reads"), vec![1; MIB]);
        write(&disk, 8 << 20, &[9; 512]).expect("writes");
        chain.write(3, &["write -P 7 64k 64k"]);
        wait_until("the new bytes", || read(&disk, 64 << 10, 512).expect("reads") == [7; 512]);
        assert!(disk.lost_its_index());
        disk.close().expect("closes");
        drop(disk);
        let expected = content(chain.top(), "qcow2");
        assert_eq!((expected[0], expected[64 << 10], expected[8 << 20]), (1, 7, 9));
        chain.assert_clean();
    }
}

/// As long as nobody changes anything, nothing is read anew, whatever indices come and go.
#[test]
fn indices_made_and_dropped_by_others_are_no_change() {
    let chain = chain(Maker::Ours, 12);
    let disk = watched(chain.top());
    for _ in 0..3 {
        chain.remove();
        chain.build();
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!disk.lost_its_index());
    disk.close().expect("closes");
}

/// Somebody without locks takes bytes away under an open file, and even puts its time back.
#[test]
fn a_file_cut_short_while_it_is_open_reads_as_no_zeros() {
    let chain = chain(Maker::Ours, 3);
    let disk = watched(chain.top());
    assert_eq!(read(&disk, 0, MIB).expect("reads"), vec![1; MIB]);
    let before = std::fs::read(&chain.files[0]).expect("reads");
    let file = std::fs::File::options().write(true).open(&chain.files[0]).expect("opens");
    let modified = file.metadata().and_then(|data| data.modified()).expect("exists");
    file.set_len(before.len() as u64 / 2).expect("cut");
    file.set_modified(modified).expect("set");
    let said = read(&disk, 0, MIB).expect_err("half of it is gone").to_string();
    assert!(said.contains("0.qcow2") || said.contains(&*chain.files[0].to_string_lossy()), "{said}");
    std::fs::write(&chain.files[0], before).expect("written");
    wait_until("what is there again", || read(&disk, 0, MIB).is_ok_and(|read| read == vec![1; MIB]));
    disk.close().expect("closes");
}

/// A file that is gone for a moment disturbs nobody who reads others; the index has a leaf for 32 MiB.
#[test]
fn a_layer_that_is_gone_is_told_where_it_is_read_and_found_again() {
    let chain = chain(Maker::Ours, 12);
    chain.write(5, &["write -P 5 40M 64k"]);
    chain.build();
    let expected = content(chain.top(), "qcow2");
    let disk = watched(chain.top());
    let aside = chain.files[5].with_extension("aside");
    std::fs::rename(&chain.files[5], &aside).expect("renamed");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(read(&disk, 0, MIB).expect("reads"), vec![1; MIB]);
    read(&disk, 40 << 20, 512).expect_err("gone");
    std::fs::rename(&aside, &chain.files[5]).expect("renamed");
    assert_reads(&disk, &expected, "it is there again");
    disk.close().expect("closes");
}
