//! What a running stock program does to a chain that has indices, as a hypervisor does under its guest: jobs that merge,
//! snapshots, mirrors, resizing. Afterwards each index that no longer holds is noticed, the disk reads right beside what is
//! left, and building makes it sound.

use std::ops::Range;
use std::path::Path;

use crate::common::daemon::Daemon;
use crate::common::flat::assert_reads;
use crate::common::open_read_only;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::index_support::{CLUSTER, Chain, Maker, SIZE, autoclear, five_layers, name_of};
use serde_json::json;
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build, verify};

/// Bytes that are the guest's while the daemon serves it.
const GUESTS: Range<usize> = 700 * CLUSTER..720 * CLUSTER;

fn verdicts(disk: &Path, include_top: bool) -> Vec<&'static str> {
    let options = IndexOptions { include_top, ..IndexOptions::default() };
    let files = verify(disk, &options).expect("verifies");
    files.iter().map(|file| name_of(&file.verdict)).collect()
}

/// How many indices `index build` keeps and makes.
fn built(disk: &Path) -> (usize, usize) {
    let layers = build(disk, &IndexOptions::default()).expect("builds").layers;
    let kept = layers.iter().filter(|layer| matches!(layer.outcome, IndexOutcome::Kept(_))).count();
    let made = layers.iter().filter(|layer| matches!(layer.outcome, IndexOutcome::Built { .. })).count();
    assert_eq!(kept + made, layers.len(), "{layers:?}");
    (kept, made)
}

/// The disk reads as it must beside what is left of its indices, building makes that sound, and nothing else has changed.
fn recovers(disk: &Path, expected: &[u8], found: &[&str]) {
    assert_eq!(verdicts(disk, false), found);
    assert_reads(&open_read_only(disk), expected, "beside what is left of the indices");
    let good = found.iter().take_while(|&&verdict| verdict == "good").count();
    assert_eq!(built(disk), (good, found.len() - good));
    assert_eq!(verdicts(disk, false), vec!["good"; found.len()]);
    let served = open_read_only(disk);
    assert_reads(&served, expected, "with new indices");
    assert_eq!(served.layer_count(), found.len() + 1);
    served.layers().iter().for_each(|layer| assert_clean(&layer.path));
    assert!(content(disk, "qcow2") == expected, "stock tools read something else");
}

#[test]
fn a_block_commit_of_a_middle_layer() {
    let (chain, expected) = five_layers();
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    let base = path_str(&chain.files[1]);
    let range = json!({ "device": "l4", "top-node": "l2", "base-node": "l1", "backing-file": base });
    daemon.run_job("block-commit", range);
    daemon.quit();
    assert_ne!(autoclear(&chain.files[1]) & 1 << 31, 0, "the trap: the bit still stands");
    // 0, 1, 3, 4.
    recovers(chain.top(), &expected, &["good", "stale", "stale"]);
}

#[test]
fn a_block_commit_of_the_active_layer_under_a_guest() {
    let (chain, mut expected) = five_layers();
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    let guest = daemon.export("l4", chain.dir.path());
    guest.write(&mut expected, 1, GUESTS);
    daemon.begin_job("block-commit", json!({ "device": "l4", "base-node": "l3" }));
    daemon.wait_for_job("ready");
    // Into both layers, and then into the lower one.
    guest.write(&mut expected, 2, GUESTS.start..GUESTS.start + CLUSTER);
    daemon.complete_job();
    guest.write(&mut expected, 3, GUESTS.end - CLUSTER..GUESTS.end);
    daemon.quit();
    let disk = &chain.files[3];
    assert_ne!(autoclear(disk) & 1 << 31, 0, "the trap: the bit still stands");
    assert_eq!(verdicts(disk, true)[..3], ["good"; 3]);
    assert_ne!(verdicts(disk, true)[3], "good");
    recovers(disk, &expected, &["good"; 3]);
    // What was active stands on a layer that has become another.
    let left = content(chain.top(), "qcow2");
    recovers(chain.top(), &left, &["good", "good", "good", "missing"]);
}

#[test]
fn a_block_stream_into_a_middle_layer() {
    let (chain, expected) = five_layers();
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    let base = path_str(&chain.files[1]);
    daemon.run_job("block-stream", json!({ "device": "l3", "base-node": "l1", "backing-file": base }));
    daemon.quit();
    // 0, 1, 3, 4.
    recovers(chain.top(), &expected, &["good", "good", "missing"]);
}

/// The layers below are what they were; the newest two are just not the disk's any more.
#[test]
fn a_block_stream_into_the_active_layer() {
    let (chain, mut expected) = five_layers();
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    let guest = daemon.export("l4", chain.dir.path());
    guest.write(&mut expected, 1, GUESTS);
    let base = path_str(&chain.files[1]);
    daemon.run_job("block-stream", json!({ "device": "l4", "base-node": "l1", "backing-file": base }));
    daemon.quit();
    recovers(chain.top(), &expected, &["good", "good"]);
}

#[test]
fn a_blockdev_snapshot_sync_under_a_guest() {
    let (chain, mut expected) = five_layers();
    let overlay = chain.dir.path().join("5");
    let mut daemon = Daemon::start();
    daemon.open_disk("l4", chain.top());
    let guest = daemon.export("l4", chain.dir.path());
    guest.write(&mut expected, 1, GUESTS);
    let arguments = json!({
        "node-name": "l4", "snapshot-file": path_str(&overlay), "snapshot-node-name": "l5", "format": "qcow2",
    });
    daemon.run("blockdev-snapshot-sync", arguments);
    let snapshot = expected.clone();
    guest.write(&mut expected, 2, GUESTS);
    daemon.quit();
    recovers(&overlay, &expected, &["good", "good", "good", "good", "missing"]);
    recovers(chain.top(), &snapshot, &["good"; 4]);
}

#[test]
fn a_blockdev_snapshot_under_a_guest() {
    let (chain, mut expected) = five_layers();
    let overlay = chain.dir.path().join("5");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "4", "-F", "qcow2", path_str(&overlay)]);
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    let guest = daemon.export("l4", chain.dir.path());
    guest.write(&mut expected, 1, GUESTS);
    daemon.try_open("l5", &overlay, None, false).expect("opens");
    daemon.run("blockdev-snapshot", json!({ "node": "l4", "overlay": "l5" }));
    let snapshot = expected.clone();
    guest.write(&mut expected, 2, GUESTS);
    daemon.quit();
    recovers(&overlay, &expected, &["good", "good", "good", "good", "missing"]);
    recovers(chain.top(), &snapshot, &["good"; 4]);
}

/// Onto another disk of the same layers.
#[test]
fn a_blockdev_mirror_of_the_active_layer() {
    let (chain, mut expected) = five_layers();
    let target = chain.dir.path().join("target");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "3", "-F", "qcow2", path_str(&target)]);
    mirror(&chain, &mut expected, &target, Some("l3"), "top");
    recovers(&target, &expected, &["good"; 4]);
}

/// Over a layer that another disk stands on, and that has an index in its file.
#[test]
fn a_blockdev_mirror_over_an_indexed_layer() {
    let (chain, mut expected) = five_layers();
    let first = std::slice::from_ref(&(0..CLUSTER));
    let (other, _) = Chain::with_content(&[Maker::Ours; 2], SIZE as u64, first, 6);
    other.build();
    assert_eq!(other.verify(), ["good"]);
    mirror(&chain, &mut expected, &other.files[0], None, "full");
    let on_top = content(other.top(), "qcow2");
    assert!(on_top[CLUSTER..] == expected[CLUSTER..]);
    recovers(other.top(), &on_top, &["missing"]);
    recovers(chain.top(), &content(chain.top(), "qcow2"), &["good"; 4]);
}

/// Mirrors the disk under its guest, which goes on with the target.
fn mirror(chain: &Chain, expected: &mut [u8], target: &Path, below: Option<&str>, sync: &str) {
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    daemon.try_open("target", target, below, false).expect("opens");
    let guest = daemon.export("l4", chain.dir.path());
    guest.write(expected, 1, GUESTS);
    daemon.begin_job("blockdev-mirror", json!({ "device": "l4", "target": "target", "sync": sync }));
    daemon.wait_for_job("ready");
    guest.write(expected, 2, GUESTS.start..GUESTS.start + CLUSTER);
    daemon.complete_job();
    guest.write(expected, 3, GUESTS.end - CLUSTER..GUESTS.end);
    daemon.quit();
}

#[test]
fn a_block_resize_of_the_active_layer() {
    let (chain, mut expected) = five_layers();
    let mut daemon = Daemon::start();
    daemon.open_chain(&chain.files);
    daemon.run("block_resize", json!({ "node-name": "l4", "size": SIZE + GUESTS.len() }));
    daemon.quit();
    expected.resize(SIZE + GUESTS.len(), 0);
    recovers(chain.top(), &expected, &["good"; 4]);
}

/// As a disk of its own, which no one is told that others stand on.
#[test]
fn a_block_resize_of_a_middle_layer() {
    for size in [SIZE + 300 * CLUSTER, SIZE - 600 * CLUSTER] {
        let (chain, before) = five_layers();
        let mut daemon = Daemon::start();
        daemon.open_chain(&chain.files[..3]);
        daemon.run("block_resize", json!({ "node-name": "l2", "size": size }));
        daemon.quit();
        let mut expected = before.clone();
        // Past the end of a layer the ones below it are hidden, and layer 3 has some clusters there.
        if size < SIZE {
            expected[size..500 * CLUSTER].fill(0);
            expected[530 * CLUSTER..].fill(0);
        }
        assert!(content(chain.top(), "qcow2") == expected, "as documented");
        recovers(chain.top(), &expected, &["good", "good", "missing", "stale"]);
    }
}
