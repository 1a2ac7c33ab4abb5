//! Layers with everything the format has: what an index must not touch, must cover, or must stay out of.

use crate::common;
use crate::index_support;
use std::path::PathBuf;

use crate::common::stock::{content, path_str, qemu_img, qemu_io, try_qemu_io};
use crate::index_support::{Chain, Maker};
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build, verify};
use vmstrata_disk::{CheckOptions, CreateOptions, ErrorKind, Format, check, create};
use vmstrata_qcow2::{CompressionType, RefcountOrder};
use vmstrata_types::ClusterBits;

fn commands(commands: &[&str]) -> Vec<String> {
    commands.iter().map(|&command| command.to_owned()).collect()
}

/// A chain of one layer made with `options`, and filled with `writes`; a disk on top.
fn one_layer(options: CreateOptions, writes: &[&str]) -> Chain {
    let mut chain = Chain::new();
    let path = chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
    create(&path, &CreateOptions { size: Some(4 << 20), force: true, ..options }).expect("creates");
    qemu_io(&path, &commands(writes));
    chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
    chain
}

fn assert_indexed(chain: &Chain, expected: &str) {
    let before = content(chain.top(), "qcow2");
    assert_eq!(chain.build(), [expected]);
    assert_eq!(chain.verify(), ["good"]);
    chain.assert_clean();
    let report = check(&chain.files[0], &CheckOptions::default()).expect("checks");
    assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{:?}", report.findings);
    assert!(content(chain.top(), "qcow2") == before);
}

#[test]
fn every_refcount_width_and_cluster_size() {
    for bits in (9..=21).filter_map(ClusterBits::new) {
        let refcount_order = RefcountOrder::new(bits.get() % 7).expect("a width");
        let options = CreateOptions { cluster_bits: bits, refcount_order, ..CreateOptions::default() };
        let chain = one_layer(options, &["write -q -P 1 100k 300k", "write -q -z 2M 64k"]);
        // Small clusters have no room for a link beside a backing file's name, but all have without one.
        assert_indexed(&chain, "file");
    }
}

#[test]
fn compressed_clusters_of_both_kinds() {
    for compression in [CompressionType::Zlib, CompressionType::Zstd] {
        let options = CreateOptions { compression, ..CreateOptions::default() };
        let chain = one_layer(
            options,
            &["write -q -c -P 9 0 64k", "write -q -c -P 8 1M 64k", "write -q -P 7 2M 64k"],
        );
        assert_indexed(&chain, "file");
    }
}

#[test]
fn internal_snapshots_and_bitmaps_stay_what_they_are() {
    let chain = one_layer(CreateOptions::default(), &["write -q -P 1 0 1M"]);
    let path = &chain.files[0];
    qemu_img(&["snapshot", "-c", "before", path_str(path)]);
    qemu_io(path, &commands(&["write -q -P 2 512k 1M"]));
    qemu_img(&["bitmap", "--add", path_str(path), "changes"]);
    let inner = common::stock::snapshot_content(path, "before");
    assert_indexed(&chain, "file");
    assert!(common::stock::snapshot_content(path, "before") == inner);
    assert!(qemu_img(&["info", path_str(path)]).contains("changes"));
    // The bitmap was consistent and still is: its autoclear bit stands beside ours.
    assert!(!qemu_img(&["info", path_str(path)]).contains("in-use"));
    // A bitmap added later is no change of what the layer says.
    qemu_img(&["bitmap", "--add", path_str(path), "more"]);
    chain.build();
    assert_eq!(chain.verify(), ["good"]);
    chain.assert_clean();
}

/// Refcounts that were left behind do not say what is free.
#[test]
fn a_dirty_image_is_not_written_into() {
    let mut chain = Chain::new();
    let path = chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
    let options =
        CreateOptions { size: Some(4 << 20), lazy_refcounts: true, force: true, ..CreateOptions::default() };
    create(&path, &options).expect("creates");
    let output = try_qemu_io(&path, &[], &commands(&["write -q -P 3 0 256k", "flush", "abort"]));
    assert!(!output.status.success(), "qemu-io died");
    chain.add(Maker::Ours, 4 << 20, ClusterBits::DEFAULT);
    let before = std::fs::read(&path).expect("reads");
    assert_eq!(chain.build(), ["sidecar"]);
    assert_eq!(chain.verify(), ["good"]);
    assert!(std::fs::read(&path).expect("reads") == before);
}

#[test]
fn two_disks_on_one_base_use_its_one_index() {
    let mut one = Chain::ours(3);
    one.build();
    let indexed = std::fs::read(&one.files[1]).expect("reads");
    let other = one.dir.path().join("clone");
    let options =
        CreateOptions { backing: Some((PathBuf::from("1"), Format::Qcow2)), ..CreateOptions::default() };
    create(&other, &options).expect("creates");
    qemu_io(&other, &commands(&["write -q -P 77 3M 64k"]));
    let built =
        build(&other, &IndexOptions { include_top: true, ..IndexOptions::default() }).expect("builds");
    let kept = built.layers.iter().filter(|layer| matches!(layer.outcome, IndexOutcome::Kept(_))).count();
    assert_eq!((built.layers.len(), kept), (3, 2));
    assert!(std::fs::read(&one.files[1]).expect("reads") == indexed);
    one.add(Maker::Ours, 64 << 20, ClusterBits::DEFAULT);
    assert_eq!(one.build(), ["kept", "kept", "file"]);
    assert_eq!(one.verify(), ["good"; 3]);
}

/// Files in several directories, found by names relative to the file above.
#[test]
fn layers_in_other_directories_are_found_if_they_are_allowed() {
    let chain = Chain::ours(2);
    let elsewhere = common::scratch();
    let disk = elsewhere.path().join("disk");
    let backing = Some((chain.files[1].clone(), Format::Qcow2));
    create(&disk, &CreateOptions { backing, ..CreateOptions::default() }).expect("creates");
    let error = build(&disk, &IndexOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Gate(_)), "{error}");
    let allowed = IndexOptions {
        allow_backing: vec![chain.dir.path().to_owned()],
        include_top: true,
        ..IndexOptions::default()
    };
    build(&disk, &allowed).expect("builds");
    let verdicts = verify(&disk, &allowed).expect("verifies");
    assert!(
        verdicts.iter().all(|file| index_support::name_of(&file.verdict) == "good") && verdicts.len() == 3
    );
}

/// The map's unit is a subcluster then.
#[test]
fn layers_with_subclusters_have_an_index_and_so_have_those_above_them() {
    let mut chain = Chain::new();
    let makers = [Maker::Subclusters, Maker::Ours, Maker::Subclusters, Maker::Ours];
    for (number, maker) in makers.into_iter().enumerate() {
        chain.add(maker, 4 << 20, ClusterBits::DEFAULT);
        let at = number * 10 + 2;
        let writes = [format!("write -q -P {at} {at}k 20k"), format!("write -q -z {}k 6k", at + 100)];
        chain.write(number, &writes.each_ref().map(String::as_str));
    }
    assert_eq!(chain.build(), ["sidecar", "file", "sidecar"]);
    assert_eq!(chain.verify(), ["good"; 3]);
    chain.assert_clean();
    let expected = content(chain.top(), "qcow2");
    let disk = common::open_read_only(chain.top());
    common::flat::assert_reads(&disk, &expected, "through the index");
}

/// A table that is named over and over would be read for ever.
#[test]
fn a_layer_whose_l1_entries_share_a_table_gets_no_index() {
    use std::os::unix::fs::FileExt as _;
    let mut chain = Chain::new();
    let path = chain.add(Maker::Ours, 1 << 40, ClusterBits::DEFAULT);
    chain.write(0, &["write -q 0 64k"]);
    chain.add(Maker::Ours, 1 << 40, ClusterBits::DEFAULT);
    let bytes = std::fs::read(&path).expect("reads");
    let l1_at = u64::from_be_bytes(bytes[40..48].try_into().expect("eight bytes"));
    let entry = &bytes[l1_at as usize..][..8];
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("opens");
    file.write_all_at(&entry.repeat(2048), l1_at).expect("writes");
    let built = build(chain.top(), &IndexOptions::default()).expect("the chain can be read");
    let IndexOutcome::Failed(error) = &built.layers[0].outcome else { panic!("{built:?}") };
    assert!(error.to_string().contains("one L2 table"), "{error}");
}

/// A layer that says nothing still has an index, which points to those below.
#[test]
fn empty_layers_cost_a_few_pages() {
    let mut chain = Chain::ours(2);
    (0..3).for_each(|_| drop(chain.add(Maker::Ours, 64 << 20, ClusterBits::DEFAULT)));
    assert_eq!(chain.build(), ["file"; 4]);
    assert_eq!(chain.verify(), ["good"; 4]);
    let built =
        build(chain.top(), &IndexOptions { include_top: true, ..IndexOptions::default() }).expect("builds");
    let IndexOutcome::Built { bytes, .. } = built.layers[4].outcome else { panic!("{built:?}") };
    assert_eq!(bytes, 3 * 4096, "table page, its inner page, root");
}

#[test]
fn a_disk_without_bytes_has_an_index_without_leaves() {
    let mut chain = Chain::new();
    (0..3).for_each(|_| drop(chain.add(Maker::Ours, 0, ClusterBits::DEFAULT)));
    assert_eq!(chain.build(), ["file"; 2]);
    assert_eq!(chain.verify(), ["good"; 2]);
    assert_eq!(chain.build(), ["kept"; 2]);
}

#[test]
fn a_disk_of_too_many_clusters_is_told_and_served_without() {
    let mut chain = Chain::new();
    // 2^22 leaves of 512 clusters of 64 KiB are 128 TiB.
    for size in [128u64 << 40, (128 << 40) + (32 << 20)] {
        chain.add(Maker::Ours, size, ClusterBits::DEFAULT);
        chain.write(chain.files.len() - 1, &[&format!("write -q {} 64k", size - 65536)]);
    }
    chain.add(Maker::Ours, 1 << 20, ClusterBits::DEFAULT);
    let built = build(chain.top(), &IndexOptions::default()).expect("builds");
    assert!(matches!(built.layers[0].outcome, IndexOutcome::Built { .. }), "{built:?}");
    let IndexOutcome::Failed(error) = &built.layers[1].outcome else { panic!("{built:?}") };
    assert!(error.to_string().contains("too many clusters"), "{error}");
    assert_eq!(chain.verify(), ["good", "missing"]);
}
