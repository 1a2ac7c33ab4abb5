//! Chains that vmstrata has open with their indices, and other programs that would change a layer: they are refused, or, where
//! the layer's file is not open, the disk fails when it opens the file.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::common::daemon::Daemon;
use crate::common::flat::{assert_reads, read, write};
use crate::common::stock::{content, path_str, qemu_io};
use crate::common::{open, open_read_only, open_with, small_resources};
use crate::index_support::{CLUSTER, SIZE, five_layers};
use serde_json::json;
use vmstrata_disk::{Disk, ErrorKind, OpenOptions};

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
type Change = fn(&mut Daemon, &[PathBuf]);

/// Layers that an index answers for are opened, and locked, when they are first read, all but the one that the disk was made
/// on.
#[test]
fn a_changed_layer_fails_the_disk_by_its_name() {
    let commit: Change = |daemon, files| {
        daemon.open_chain_for_reading(&files[..4]);
        let base = path_str(&files[0]);
        let range = json!({ "device": "l3", "top-node": "l1", "base-node": "l0", "backing-file": base });
        daemon.run_job("block-commit", range);
    };
    let resize: Change = |daemon, files| {
        daemon.open_chain(&files[..3]);
        daemon.run("block_resize", json!({ "node-name": "l2", "size": SIZE / 4 }));
    };
    let touch: Change = |_, files| {
        qemu_io(&files[2], &["flush".to_owned()]);
        let later = SystemTime::now() + Duration::from_secs(1);
        File::options().write(true).open(&files[2]).and_then(|file| file.set_modified(later)).expect("sets");
    };
    for (change, read_only) in [(commit, true), (resize, false), (touch, false)] {
        let (chain, expected) = five_layers();
        let disk = open_with(chain.top(), &OpenOptions { read_only, ..OpenOptions::default() });
        let mut daemon = Daemon::start();
        change(&mut daemon, &chain.files);
        daemon.quit();
        let mut met = None;
        // Between the edges of what the layers hold. Each refusal waits for an index that might be under way.
        for edges in [0, 10, 30, 40, 50, 55, 60, 500, 530, SIZE / CLUSTER].windows(2) {
            let part = edges[0] * CLUSTER..edges[1] * CLUSTER;
            match read(&disk, part.start as u64, part.len()) {
                Ok(bytes) => assert!(bytes == expected[part], "{edges:?} is neither refused nor as it was"),
                Err(error) => met = Some(error),
            }
        }
        let met = met.expect("a changed layer was read");
        assert!(matches!(met.kind(), ErrorKind::Changed), "{met}");
        let layer = met.path().expect("named");
        assert!(chain.files[..3].iter().any(|file| file == layer), "{met}");
        let why = disk.failure().expect("failed");
        assert!(why.contains(path_str(layer)) && why.contains("open it again"), "{why}");
        let refused = write(&disk, 0, &[9; 512]).expect_err("failed");
        assert!(matches!(refused.kind(), ErrorKind::ReadOnly | ErrorKind::Failed { .. }), "{refused}");
        let _ = disk.close();
        drop(disk);
        let now = content(chain.top(), "qcow2");
        assert_reads(&open_read_only(chain.top()), &now, "opened again");
    }
}

#[test]
fn a_copy_up_from_a_changed_layer_fails_the_disk() {
    let (chain, mut expected) = five_layers();
    let disk = Disk::open(chain.top(), &OpenOptions::default(), &small_resources(None)).expect("opens");
    let later = SystemTime::now() + Duration::from_secs(1);
    File::options()
        .write(true)
        .open(&chain.files[0])
        .and_then(|file| file.set_modified(later))
        .expect("sets");
    let written = write(&disk, 64, &[9; 64]).and_then(|()| disk.flush());
    assert!(matches!(written.expect_err("changed").kind(), ErrorKind::Changed));
    assert!(disk.failure().is_some_and(|why| why.contains(path_str(&chain.files[0]))));
    disk.close().expect_err("failed");
    drop(disk);
    let now = content(chain.top(), "qcow2");
    expected[64..128].copy_from_slice(&now[64..128]);
    assert!(now == expected, "nothing else is written");
}

/// Files are opened again all the time here.
#[test]
fn indices_made_and_dropped_by_others_are_no_change() {
    let (chain, expected) = five_layers();
    let disk = Disk::open(chain.top(), &OpenOptions::default(), &small_resources(None)).expect("opens");
    for _ in 0..3 {
        chain.remove();
        assert_reads(&disk, &expected, "without indices");
        chain.build();
        assert_reads(&disk, &expected, "with new indices");
    }
    assert_eq!(disk.failure(), None);
    disk.close().expect("closes");
}

/// Somebody without locks takes bytes away under an open file, and puts its time back.
#[test]
fn a_file_cut_short_while_it_is_open_reads_as_no_zeros() {
    let (chain, expected) = five_layers();
    let disk = open(chain.top());
    assert_reads(&disk, &expected, "before");
    let file = File::options().write(true).open(&chain.files[0]).expect("opens");
    let data = file.metadata().expect("exists");
    file.set_len(data.len() / 2).and_then(|()| file.set_modified(data.modified()?)).expect("cut");
    read(&disk, 0, SIZE).expect_err("half of a layer is gone");
    assert!(disk.failure().is_some_and(|why| why.contains(path_str(&chain.files[0]))));
}

#[test]
fn a_layer_that_is_gone_for_a_moment_is_an_error_only_where_it_is_read() {
    let (chain, expected) = five_layers();
    let disk = open(chain.top());
    let aside = chain.files[1].with_extension("aside");
    std::fs::rename(&chain.files[1], &aside).expect("renamed");
    let part = 60 * CLUSTER..70 * CLUSTER;
    assert!(read(&disk, part.start as u64, part.len()).expect("reads") == expected[part]);
    read(&disk, 20 * CLUSTER as u64, CLUSTER).expect_err("gone");
    std::fs::rename(&aside, &chain.files[1]).expect("renamed");
    assert_reads(&disk, &expected, "it is there again");
    disk.close().expect("closes");
}
