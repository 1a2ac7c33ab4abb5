//! Disks that are served from their indices: the same map, the same bytes, whatever becomes of the index.

use crate::common;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::flat::{assert_reads, range, write};
use crate::common::stock::content;
use crate::common::{for_seeds, open, open_read_only, random};
use crate::index_support::{Chain, Maker, random_chain};
use rand::Rng as _;
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build};
use vmstrata_disk::{Disk, Extent, Indexing, LocalFiles, Opened, Opener, ResourceOptions, Resources, Role};
use vmstrata_store::{FileIdentity, Gate};
use vmstrata_types::ClusterBits;

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

/// Leaves are checked when they are read, delta records when the index is found.
#[test]
fn what_a_damaged_leaf_or_delta_record_says_is_made_again_from_the_tables() {
    let chain = Chain::ours(4);
    let before: Vec<u64> = chain.files.iter().map(|file| file.metadata().expect("exists").len()).collect();
    build_with_top(&chain);
    let expected = content(chain.top(), "qcow2");
    for (file, start) in chain.files.iter().zip(before) {
        let handle = OpenOptions::new().read(true).write(true).open(file).expect("opens");
        let modified = handle.metadata().and_then(|data| data.modified()).expect("exists");
        // The first page of an index is its first leaf, or the first page of its delta record.
        let at = start.next_multiple_of(1 << 16) + 8 * 77;
        handle.write_all_at(&[0xff; 8], at).expect("writes");
        handle.set_modified(modified).expect("sets");
        let disk = open_read_only(chain.top());
        assert_reads(&disk, &expected, "beside a damaged page");
    }
    assert_eq!(chain.verify(), ["damaged", "missing", "missing"]);
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

/// Opens files and counts those that are not opened for pages of an index alone.
#[derive(Debug, Default)]
struct Counting(AtomicUsize);

impl Opener for Counting {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        self.0.fetch_add((role != Role::Inspected).into(), Ordering::Relaxed);
        LocalFiles.open(path, role, gate)
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<FileIdentity> {
        LocalFiles.identity(path, gate)
    }
}

/// Files opened until the disk is, and the disk.
fn open_and_count(chain: &Chain, read_only: bool) -> (usize, Arc<Disk>) {
    let counting = Arc::new(Counting::default());
    let opener = Arc::clone(&counting) as Arc<dyn Opener>;
    let resources = Resources::with_opener(ResourceOptions::default(), opener);
    let options = vmstrata_disk::OpenOptions { read_only, ..vmstrata_disk::OpenOptions::default() };
    let disk = Disk::open(chain.top(), &options, &resources).expect("opens");
    (counting.0.load(Ordering::Relaxed), disk)
}

/// The disk's own file has none while it is written; that of the layer below serves those who only read, too.
#[test]
fn an_index_spares_opening_the_layers_below() {
    let chain = Chain::ours(30);
    let expected = content(chain.top(), "qcow2");
    chain.build();
    for read_only in [true, false] {
        let (opened, disk) = open_and_count(&chain, read_only);
        assert!(opened <= 5, "{opened} files for 30 layers");
        assert_reads(&disk, &expected, "from the index");
        disk.close().expect("closes");
    }
}

#[test]
fn below_a_changed_layer_the_index_still_serves() {
    for changed in [5, 25] {
        let chain = Chain::ours(30);
        chain.build();
        // New clusters where the layers below have theirs, and in place: the tables change, and what they hide.
        chain.write(changed, &["write -P 201 64k 64k", "write -P 202 40M 64k", "write -z 128k 64k"]);
        let expected = content(chain.top(), "qcow2");
        let (opened, disk) = open_and_count(&chain, true);
        // Each layer from the changed one up, and a few files for pages of the index below. With many layers above it, an
        // index is not worth asking.
        assert!(
            opened <= (30 - changed) + 2 || 30 - changed > 16,
            "{opened} files with layer {changed} of 30 changed"
        );
        assert_reads(&disk, &expected, "beside a changed layer");
        assert_eq!(map(&disk), {
            chain.remove();
            map(&open_read_only(chain.top()))
        });
    }
}

/// Changed in the middle by a stock tool, the index is made anew from there up while the disk is used, which goes on with it.
#[test]
fn an_index_that_was_lost_is_made_anew_under_a_running_disk() {
    let chain = Chain::ours(30);
    chain.build();
    assert!(!open(chain.top()).lost_its_index());
    chain.write(12, &["write -P 201 64k 64k", "write -z 128k 64k"]);
    let mut expected = content(chain.top(), "qcow2");
    let disk = open(chain.top());
    assert!(disk.lost_its_index());
    let mut indexing = Indexing::of_disk(&disk, true).expect("reads the headers");
    let mut outcomes = Vec::new();
    while let Some(file) = indexing.step().expect("makes indices") {
        outcomes.push(matches!(file.outcome, IndexOutcome::Kept(_)));
        let at = outcomes.len() as u64 * 65536;
        write(&disk, at, &[7; 512]).expect("writes meanwhile");
        expected[at as usize..][..512].fill(7);
    }
    assert_eq!(outcomes, (0..29).map(|layer| layer < 12).collect::<Vec<_>>(), "kept below the change only");
    assert!(!disk.lost_its_index(), "it is used from now on");
    assert_reads(&disk, &expected, "from the new index");
    disk.close().expect("closes");
    drop((indexing, disk));
    let (opened, disk) = open_and_count(&chain, false);
    assert!(opened <= 5, "{opened} files for 30 layers");
    assert_reads(&disk, &expected, "from the new index, opened again");
    disk.close().expect("closes");
}

/// Layers above an index may have smaller clusters than all below.
#[test]
fn a_layer_of_smaller_clusters_stands_on_an_index_of_larger_ones() {
    let mut chain = Chain::ours(3);
    chain.add(Maker::Ours, 64 << 20, ClusterBits::MIN);
    chain.build();
    chain.write(3, &["write -P 99 65k 1k", "write -P 98 33M 512", "write -z 100k 3k"]);
    let expected = content(chain.top(), "qcow2");
    let disk = open_read_only(chain.top());
    assert_reads(&disk, &expected, "in parts of words");
    assert_eq!(map(&disk), {
        chain.remove();
        map(&open_read_only(chain.top()))
    });
}
