//! Chains that vmstrata has open with their indices, and a running stock program that would change a layer: it is refused,
//! or, where vmstrata has not come to need the layer yet, noticed then, and the chain is read as it is.

mod common;
mod index_support;

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use common::daemon::Daemon;
use common::flat::{assert_reads, read, write};
use common::stock::{content, path_str, qemu_io};
use common::{open, open_read_only, open_with};
use index_support::{CLUSTER, SIZE, five_layers};
use serde_json::json;
use vmstrata_disk::{Indexing, OpenOptions};

/// All bytes of a file, and when it was changed.
fn state(files: &[PathBuf]) -> Vec<(Vec<u8>, SystemTime)> {
    let modified = |file: &PathBuf| file.metadata().and_then(|data| data.modified()).expect("exists");
    files.iter().map(|file| (std::fs::read(file).expect("reads"), modified(file))).collect()
}

/// Each way in which a stock program would change a layer of an open chain, for readers and for the writer of the disk.
#[test]
fn while_a_chain_is_open_no_stock_program_changes_a_layer() {
    for read_only in [true, false] {
        let (chain, expected) = five_layers();
        let disk = open_with(chain.top(), &OpenOptions { read_only, ..OpenOptions::default() });
        // A layer is open, and locked, from its first use on.
        assert_reads(&disk, &expected, "before");
        let before = state(&chain.files);
        let mut daemon = Daemon::start();
        let refused = |what: &str, tried: Result<serde_json::Value, String>| {
            let error = tried.expect_err(what);
            assert!(error.contains("lock"), "{what}: {error}");
        };
        for (number, file) in chain.files.iter().enumerate() {
            refused("opening for writing", daemon.try_open(&format!("w{number}"), file, None, false));
        }
        daemon.open_chain_for_reading(&chain.files[..4]);
        for (command, arguments) in [
            ("block-commit", json!({ "device": "l3", "top-node": "l2", "base-node": "l1" })),
            ("block-commit", json!({ "device": "l3", "base-node": "l0" })),
            ("block-stream", json!({ "device": "l2", "base-node": "l0" })),
            (
                "blockdev-reopen",
                json!({ "options": [{
                "driver": "qcow2", "node-name": "l2", "read-only": false, "backing": "l1",
                "file": { "driver": "file", "filename": path_str(&chain.files[2]) },
            }] }),
            ),
        ] {
            let mut arguments = arguments;
            if command != "blockdev-reopen" {
                arguments["job-id"] = "job".into();
            }
            refused(command, daemon.try_run(command, arguments));
        }
        assert!(daemon.try_run("block_resize", json!({ "node-name": "l2", "size": SIZE / 2 })).is_err());
        daemon.quit();
        assert!(state(&chain.files) == before, "read only: {read_only}");
        assert_reads(&disk, &expected, "all the while");
        disk.close().expect("closes");
        drop(disk);
        assert_eq!(chain.verify(), ["good"; 4]);
        assert_reads(&open(chain.top()), &expected, "afterwards");
    }
}

/// What a stock program does to the files of a chain.
type Change = dyn Fn(&mut Daemon, &[PathBuf]);

/// Layers that an index answers for are opened, and locked, when they are first read, all but the one that the disk was made
/// on. Who comes to read one that was changed until then reads the chain as it is now, and need not open the disk again.
#[test]
fn a_layer_that_is_changed_before_its_first_use_is_read_as_it_is_now() {
    let commit = |daemon: &mut Daemon, files: &[PathBuf]| {
        daemon.open_chain_for_reading(&files[..4]);
        let base = path_str(&files[0]);
        let range = json!({ "device": "l3", "top-node": "l1", "base-node": "l0", "backing-file": base });
        daemon.run_job("block-commit", range);
    };
    let resize = |daemon: &mut Daemon, files: &[PathBuf]| {
        daemon.open_chain(&files[..3]);
        daemon.run("block_resize", json!({ "node-name": "l2", "size": SIZE / 4 }));
    };
    let changes: [(&Change, bool); 2] = [(&commit, true), (&resize, false)];
    for (change, read_only) in changes {
        let (chain, expected) = five_layers();
        let disk = open_with(chain.top(), &OpenOptions { read_only, ..OpenOptions::default() });
        let mut daemon = Daemon::start();
        change(&mut daemon, &chain.files);
        daemon.quit();
        // The disk's own file is locked against stock tools; it has what was written last.
        let mut now = content(&chain.files[3], "qcow2");
        now[50 * CLUSTER..55 * CLUSTER].copy_from_slice(&expected[50 * CLUSTER..55 * CLUSTER]);
        let borders = [0, 10, 30, 50, 55, 60, 500, 530, 1024].map(|cluster| cluster * CLUSTER);
        for part in borders.windows(2).map(|ends| ends[0]..ends[1]) {
            let bytes = read(&disk, part.start as u64, part.len()).expect("reads");
            // As before until the changed layer is met.
            assert!(bytes == expected[part.clone()] || bytes == now[part.clone()], "{part:?}");
        }
        assert_reads(&disk, &now, "while it is open");
        if !read_only {
            assert!(disk.take_index_loss() && !disk.take_index_loss(), "told once");
            let mut indexing = Indexing::of_disk(&disk, true).expect("reads the headers");
            while indexing.step().expect("makes indices").is_some() {}
            assert!(!disk.lost_its_index());
            assert_reads(&disk, &now, "from the new index");
        }
        disk.close().expect("closes");
        drop(disk);
        assert_reads(&open_read_only(chain.top()), &now, "opened again");
    }
}

/// Opening a layer for writing clears its bit and moves its time, and nothing else. All that the guest feels is a wait: the
/// newest layer's index still holds.
#[test]
fn layers_that_were_opened_for_writing_are_read_on() {
    let (chain, mut expected) = five_layers();
    let disk = open(chain.top());
    for file in &chain.files[..3] {
        qemu_io(file, &["flush".to_owned()]);
        let later = SystemTime::now() + Duration::from_secs(1);
        File::options().write(true).open(file).and_then(|file| file.set_modified(later)).expect("sets");
    }
    // A small write: the rest of its cluster comes from the layers below.
    write(&disk, 100, &[9; 50]).expect("writes");
    expected[100..150].fill(9);
    assert_reads(&disk, &expected, "while it is open");
    assert!(!disk.lost_its_index());
    disk.close().expect("closes");
    drop(disk);
    assert_eq!(chain.verify(), ["missing", "missing", "missing", "good"]);
}
