//! What other tools do to a chain that has indices. Each case leaves the index unused where it no longer holds, never
//! believed: `verify` compares every word that would be served with the tables and fails at the first wrong one.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::common::flat::assert_reads;
use crate::common::open_read_only;
use crate::common::stock::{content, path_str, qemu_img};
use crate::index_support::{Chain, Maker, autoclear};
use vmstrata_disk::index::{IndexOptions, verify};
use vmstrata_types::ClusterBits;

fn writable(path: &Path) -> File {
    OpenOptions::new().write(true).open(path).expect("opens")
}

fn indexed(layers: usize) -> Chain {
    let chain = Chain::ours(layers);
    chain.build();
    assert_eq!(chain.verify(), vec!["good"; layers - 1]);
    chain
}

/// After whatever happened, the disk reads as stock tools read it, and indices can be made again.
fn recovers(chain: &Chain) {
    let before = content(chain.top(), "qcow2");
    assert_reads(&open_read_only(chain.top()), &before, "beside what is left of the indices");
    chain.build();
    assert_reads(&open_read_only(chain.top()), &before, "with new indices");
    assert!(chain.verify().iter().all(|&verdict| verdict == "good" || verdict == "none"));
    chain.assert_clean();
    assert!(content(chain.top(), "qcow2") == before);
}

#[test]
fn a_commit_into_a_middle_layer_leaves_the_bit_and_is_noticed() {
    let chain = indexed(6);
    qemu_img(&[
        "commit",
        "-q",
        "-d",
        "-f",
        "qcow2",
        "-b",
        path_str(&chain.files[2]),
        path_str(&chain.files[3]),
    ]);
    assert_ne!(autoclear(&chain.files[2]) & 1 << 31, 0, "the trap: the bit still stands");
    // What was committed also lies over the index of layer 2; layer 3 was opened for writing, which clears its bit.
    assert_eq!(chain.verify(), ["good", "good", "missing", "missing", "stale"]);
    recovers(&chain);
}

#[test]
fn a_commit_that_changes_no_length_is_noticed() {
    let mut chain = Chain::ours(3);
    // Room for what will be committed, allocated before: the file will not grow.
    chain.write(1, &["write 10M 256k", "write 20M 64k", "discard 10M 256k"]);
    chain.write(2, &["write -P 9 10M 64k"]);
    chain.add(Maker::Ours, 64 << 20, ClusterBits::DEFAULT);
    chain.build();
    let len = chain.files[1].metadata().expect("exists").len();
    qemu_img(&[
        "commit",
        "-q",
        "-d",
        "-f",
        "qcow2",
        "-b",
        path_str(&chain.files[1]),
        path_str(&chain.files[2]),
    ]);
    assert_eq!(chain.files[1].metadata().expect("exists").len(), len);
    assert_ne!(
        autoclear(&chain.files[1]) & 1 << 31,
        0,
        "the trap: the bit still stands, and so does all of the index"
    );
    assert_eq!(chain.verify(), ["good", "stale", "missing"]);
    recovers(&chain);
}

#[test]
fn a_rebase_is_noticed() {
    let chain = indexed(6);
    let directory = chain.files[0].parent().expect("a directory");
    // As QEMU resolves it: relative to the image.
    let output = std::process::Command::new("qemu-img")
        .current_dir(directory)
        .args(["rebase", "-u", "-f", "qcow2", "-b", "1", "-F", "qcow2", "3"])
        .output()
        .expect("runs");
    assert!(output.status.success());
    // Layer 2 is gone from the chain: 0, 1, 3, 4.
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
    recovers(&chain);
}

#[test]
fn a_resized_layer_is_noticed() {
    let chain = indexed(5);
    qemu_img(&["resize", "-q", "-f", "qcow2", path_str(&chain.files[2]), "80M"]);
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
    recovers(&chain);
}

#[test]
fn a_repair_that_changes_no_table_costs_one_index() {
    let chain = indexed(5);
    qemu_img(&["check", "-q", "-r", "all", "-f", "qcow2", path_str(&chain.files[1])]);
    assert_eq!(autoclear(&chain.files[1]) & 1 << 31, 0);
    assert_eq!(chain.verify(), ["good", "missing", "good", "good"]);
    recovers(&chain);
}

/// What they add, internal snapshots and bitmaps, may take the clusters of the index, and is kept by whatever comes later.
#[test]
fn internal_snapshots_and_bitmaps_in_a_layer_take_an_index_at_most() {
    for commands in [
        &[&["snapshot", "-c", "inner"][..]][..],
        &[&["bitmap", "--add", "-f", "qcow2"]],
        &[&["snapshot", "-c", "inner"], &["snapshot", "-a", "inner"], &["snapshot", "-d", "inner"]],
        &[&["snapshot", "-c", "inner"], &["bitmap", "--add", "-f", "qcow2"]],
    ] {
        let chain = indexed(5);
        let layer = path_str(&chain.files[2]);
        for command in commands {
            let name = if command[0] == "bitmap" { &["dirty"][..] } else { &[] };
            qemu_img(&[command, &[layer][..], name].concat());
        }
        let verdicts = chain.verify();
        assert_eq!((&verdicts[..2], verdicts[2]), (&["good"; 2][..], "missing"), "{commands:?}");
        recovers(&chain);
        let said = qemu_img(&["info", "--output=json", layer]);
        let did = |part: &str| commands.iter().any(|command| command.contains(&part));
        assert_eq!(said.contains("\"inner\""), did("-c") && !did("-d"), "{commands:?}: {said}");
        assert_eq!(said.contains("\"dirty\""), did("--add"), "{commands:?}: {said}");
        chain.remove();
        chain.assert_clean();
    }
}

#[test]
fn a_layer_that_was_cut_short_is_noticed() {
    let chain = indexed(5);
    let file = writable(&chain.files[2]);
    file.set_len(6 << 16).expect("cuts");
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
    // The reading of what was cut off is an error; it must not turn into zeros because an index made the file longer.
    chain.build();
    assert!(chain.sidecar(2).exists(), "a file that was cut short does not grow");
    assert!(chain.verify().iter().all(|&verdict| verdict == "good"));
}

#[test]
fn a_cut_that_only_takes_the_index_away_costs_its_pages() {
    let chain = indexed(5);
    let len = chain.files[2].metadata().expect("exists").len();
    writable(&chain.files[2]).set_len(len - 4096).expect("cuts");
    let verdicts = chain.verify();
    assert_eq!((verdicts[0], verdicts[1], verdicts[2]), ("good", "good", "missing"));
    recovers(&chain);
}

#[test]
fn a_layer_restored_from_a_backup_is_noticed() {
    let chain = Chain::ours(5);
    let backup = chain.dir.path().join("backup");
    std::fs::copy(&chain.files[2], &backup).expect("copies");
    chain.write(2, &["write -P 99 20M 64k"]);
    chain.build();
    let old = SystemTime::now() - Duration::from_secs(1000);
    std::fs::rename(&backup, &chain.files[2]).expect("restores");
    writable(&chain.files[2]).set_modified(old).expect("sets");
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
    recovers(&chain);
}

#[test]
fn a_chain_copied_elsewhere_keeps_its_indices() {
    let chain = indexed(5);
    let copy = Chain::ours(5);
    for (from, to) in chain.files.iter().zip(&copy.files) {
        std::fs::copy(from, to).expect("copies");
    }
    // Copies have other times: digests decide, and building again makes the times right.
    assert_eq!(copy.verify(), ["good"; 4]);
    assert_eq!(copy.build(), ["file"; 4]);
    assert_eq!(copy.build(), ["kept"; 4]);
    assert_eq!(copy.verify(), ["good"; 4]);
    copy.assert_clean();
}

#[test]
fn a_copy_that_keeps_times_is_as_good() {
    let chain = indexed(4);
    let copy = Chain::ours(4);
    for (from, to) in chain.files.iter().zip(&copy.files) {
        std::fs::copy(from, to).expect("copies");
        let time = from.metadata().and_then(|data| data.modified()).expect("exists");
        writable(to).set_modified(time).expect("sets");
    }
    assert_eq!(copy.build(), ["kept"; 3]);
}

#[test]
fn a_stock_write_to_new_clusters_is_noticed() {
    let chain = indexed(5);
    chain.write(2, &["write -P 50 50M 64k"]);
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
    recovers(&chain);
}

#[test]
fn a_stock_write_in_place_costs_one_index() {
    let chain = indexed(5);
    chain.write(2, &["write -P 51 32M 64k"]);
    assert_eq!(chain.verify(), ["good", "good", "missing", "good"]);
    recovers(&chain);
}

/// The index lies where a stock writer allocates next.
#[test]
fn pages_that_a_stock_writer_overwrote_are_not_believed() {
    let chain = indexed(5);
    let before = std::fs::read(&chain.files[2]).expect("reads");
    chain.write(2, &["write -P 52 10M 2M"]);
    let index = u64::from_be_bytes(before[136..144].try_into().expect("eight bytes"));
    let now = std::fs::read(&chain.files[2]).expect("reads");
    let page = index as usize..index as usize + 4096;
    assert!(
        before[page.clone()].starts_with(b"VMSINDEX") && before[page.clone()] != now[page],
        "overwritten"
    );
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
    recovers(&chain);
}

#[test]
fn a_layer_that_someone_writes_or_was_killed_writing_has_no_index() {
    let chain = indexed(5);
    let session = autoclear(&chain.files[2]) | 1 << 63 | 5 << 32;
    writable(&chain.files[2]).write_all_at(&session.to_be_bytes(), 88).expect("writes");
    assert_eq!(chain.verify(), ["good", "good", "missing", "stale"]);
}

#[test]
fn a_missing_layer_is_an_error_and_not_an_old_answer() {
    let chain = indexed(4);
    std::fs::remove_file(&chain.files[1]).expect("removed");
    let error = verify(chain.top(), &IndexOptions::default()).unwrap_err().to_string();
    assert!(error.contains(path_str(&chain.files[1])), "{error}");
}

/// Sizes of raw files are all that the layers above know of them.
#[test]
fn a_raw_base_that_grew_is_noticed_and_one_that_was_written_is_not_in_the_way() {
    let mut chain = Chain::new();
    chain.add(Maker::Raw, 1 << 20, ClusterBits::DEFAULT);
    for number in 1..4 {
        chain.add(Maker::Ours, 2 << 20, ClusterBits::DEFAULT);
        chain.write(number, &["write -P 3 64k 64k"]);
    }
    chain.build();
    writable(&chain.files[0]).write_all_at(&[7; 512], 4096).expect("writes");
    assert_eq!(chain.verify(), ["none", "good", "good"]);
    writable(&chain.files[0]).set_len(3 << 20).expect("grows");
    assert_eq!(chain.verify(), ["none", "stale", "stale"]);
    recovers(&chain);
}

/// Stock chains have no bit that anyone could clear: times and digests are all there is.
#[test]
fn changes_of_layers_beside_their_sidecars_are_noticed() {
    let mut chain = Chain::new();
    for number in 0..5 {
        chain.add(if number % 2 == 0 { Maker::Stock } else { Maker::Old }, 8 << 20, ClusterBits::DEFAULT);
        chain.write(number, &[&format!("write -P {} {number}M 64k", number + 1)]);
    }
    assert_eq!(chain.build(), ["sidecar"; 4]);
    qemu_img(&[
        "commit",
        "-q",
        "-d",
        "-f",
        "qcow2",
        "-b",
        path_str(&chain.files[1]),
        path_str(&chain.files[2]),
    ]);
    assert_eq!(chain.verify(), ["good", "stale", "stale", "stale"]);
    recovers(&chain);
    // A sidecar of another layer, under this layer's name.
    std::fs::copy(chain.sidecar(1), chain.sidecar(3)).expect("copies");
    assert_eq!(chain.verify(), ["good", "good", "good", "stale"]);
    recovers(&chain);
    // Without its sidecar, a layer takes away the pages that others share.
    std::fs::remove_file(chain.sidecar(0)).expect("removed");
    assert_eq!(chain.verify()[0], "missing");
    recovers(&chain);
}
