//! Every operation on files, killed at each system call in which it changes one. Whatever is left, every state reads as it
//! did, nothing is corrupt, and the operation can be made again, after which it is as if nothing had been killed.

use std::os::unix::fs::FileExt as _;

use crate::support::trial::{Operation, Trial, command};
use crate::support::{Images, run_ok};

/// `web.qcow2` with the snapshots s0, s1 and s2, each with a cluster of its own, and one they all wrote.
fn with_history(images: &Images) {
    images.create("web.qcow2", &["2M"]);
    let disk = images.name("web.qcow2");
    for number in 0..4 {
        let own = format!("write -P {} {}k 128k", number + 1, 128 * (number + 1));
        images.write_layer("web.qcow2", &[&format!("write -P {} 0 128k", number + 1), &own]);
        if number < 3 {
            run_ok(["snapshot", "create", &disk, "--name", &format!("s{number}")]);
        }
    }
}

fn next(images: &Images) -> Vec<String> {
    command(images, "snapshot create %web.qcow2 --name next --runtime-dir %run")
}

#[test]
fn taking_a_snapshot() {
    Trial::new(with_history).kill_anywhere(&Operation {
        may_be: &[("web.s3.qcow2", &["web.qcow2"])],
        done: "has a snapshot \"s3\" already",
        ..Operation::of(
            &|images| command(images, "snapshot create %web.qcow2 --name s3 --runtime-dir %run"),
            &next,
        )
    });
}

#[test]
fn going_back_to_a_snapshot() {
    Trial::new(with_history).kill_anywhere(&Operation {
        may_be: &[("web.qcow2", &["web.s1.qcow2", "web.qcow2"])],
        ..Operation::of(
            &|images| command(images, "snapshot revert %web.qcow2 s1 --yes --runtime-dir %run"),
            &next,
        )
    });
}

#[test]
fn going_back_and_keeping_what_was_active() {
    Trial::new(with_history).kill_anywhere(&Operation {
        may_be: &[("web.qcow2", &["web.s1.qcow2", "web.qcow2"]), ("old.qcow2", &["web.qcow2"])],
        done: "old.qcow2",
        ..Operation::of(
            &|images| command(images, "snapshot revert %web.qcow2 s1 --keep %old.qcow2 --runtime-dir %run"),
            &next,
        )
    });
}

#[test]
fn making_a_clone() {
    Trial::new(with_history).kill_anywhere(&Operation {
        may_be: &[("clone.qcow2", &["web.s1.qcow2"])],
        done: "exists already",
        ..Operation::of(&|images| command(images, "snapshot clone %web.qcow2 s1 -o %clone.qcow2"), &next)
    });
}

#[test]
fn making_a_clone_elsewhere() {
    let trial = Trial::new(|images| {
        with_history(images);
        std::fs::create_dir(images.path("vms")).unwrap();
    });
    trial.kill_anywhere(&Operation {
        may_be: &[("vms/clone.qcow2", &["web.s1.qcow2"])],
        done: "exists already",
        ..Operation::of(&|images| command(images, "snapshot clone %web.qcow2 s1 -o %vms/clone.qcow2"), &next)
    });
}

#[test]
fn deleting_a_snapshot_below_another() {
    Trial::new(with_history).kill_anywhere(&Operation {
        done: "it has no snapshot \"s1\"",
        ..Operation::of(&|images| command(images, "snapshot delete %web.qcow2 s1 --runtime-dir %run"), &next)
    });
}

#[test]
fn deleting_the_newest_snapshot() {
    Trial::new(with_history).kill_anywhere(&Operation {
        done: "it has no snapshot \"s2\"",
        ..Operation::of(&|images| command(images, "snapshot delete %web.qcow2 s2 --runtime-dir %run"), &next)
    });
}

/// What waits for a clone to go is not forgotten.
#[test]
fn deleting_what_a_clone_needs() {
    let trial = Trial::new(|images| {
        with_history(images);
        let disk = images.name("web.qcow2");
        run_ok(["snapshot", "clone", &disk, "s1", "-o", &images.name("clone.qcow2")]);
        run_ok(["snapshot", "delete", &disk, "s1"]);
    });
    trial.kill_anywhere(&Operation {
        done: "it has no snapshot \"s0\"",
        ..Operation::of(
            &|images| command(images, "snapshot delete %web.qcow2 s0 --runtime-dir %run"),
            &|images| {
                std::fs::remove_file(images.path("clone.qcow2")).unwrap();
                command(images, "snapshot delete %web.qcow2 s2 --runtime-dir %run")
            },
        )
    });
}

#[test]
fn flattening() {
    Trial::new(with_history).kill_anywhere(&Operation::of(
        &|images| command(images, "flatten %web.qcow2 --yes --remove all --runtime-dir %run"),
        &next,
    ));
}

#[test]
fn indexing() {
    let trial = Trial::new(|images| {
        with_history(images);
        run_ok(["index", "drop", &images.name("web.qcow2")]);
    });
    trial.kill_anywhere(&Operation::of(
        &|images| command(images, "index build %web.qcow2 --quiet"),
        &|images| command(images, "index verify %web.qcow2 --quiet"),
    ));
}

#[test]
fn indexing_beside_layers() {
    let trial = Trial::new(|images| drop(images.long_chain(4)));
    trial.kill_anywhere(&Operation::of(
        &|images| command(images, "index build %3.qcow2 --quiet"),
        &|images| command(images, "index verify %3.qcow2 --quiet"),
    ));
}

#[test]
fn dropping_indices() {
    let trial = Trial::new(|images| {
        with_history(images);
        images.long_chain(4);
        run_ok(["index", "build", "--quiet", &images.name("3.qcow2")]);
    });
    for disk in ["%web.qcow2", "%3.qcow2"] {
        trial.kill_anywhere(&Operation::of(
            &|images| command(images, &format!("index drop {disk} --quiet")),
            &|images| command(images, &format!("index build {disk} --quiet")),
        ));
    }
}

/// Both disks have their snapshot, or one, or none; then another can be taken of both.
#[test]
fn taking_a_snapshot_of_a_group() {
    let trial = Trial::new(|images| {
        with_history(images);
        images.create("data.qcow2", &["1M"]);
        images.write_layer("data.qcow2", &["write -P 9 64k 64k"]);
    });
    trial.kill_anywhere(&Operation {
        may_be: &[("web.s3.qcow2", &["web.qcow2"]), ("data.s3.qcow2", &["data.qcow2"])],
        done: "has a snapshot \"s3\" already",
        may_lack: &["data.s3.qcow2"],
        ..Operation::of(
            &|images| {
                command(
                    images,
                    "snapshot create %web.qcow2 %data.qcow2 --name s3 --group g --runtime-dir %run",
                )
            },
            &|images| {
                command(images, "snapshot create %web.qcow2 %data.qcow2 --name next --runtime-dir %run")
            },
        )
    });
}

/// The layers that go are in another directory, which has a note of its own then.
#[test]
fn flattening_a_clone_and_removing_what_is_elsewhere() {
    let trial = Trial::new(|images| {
        std::fs::create_dir(images.path("vms")).unwrap();
        with_history(images);
        run_ok(["snapshot", "clone", &images.name("web.qcow2"), "s2", "-o", &images.name("vms/web.qcow2")]);
        for gone in ["web.qcow2", "run"] {
            drop(std::fs::remove_file(images.path(gone)));
        }
    });
    let args = |images: &Images| {
        let line = "flatten %vms/web.qcow2 --yes --remove all --runtime-dir %run --allow-backing %.";
        command(images, line)
    };
    trial.kill_anywhere(&Operation::of(&args, &|images| {
        command(images, "snapshot create %vms/web.qcow2 --name next --runtime-dir %run --allow-backing %.")
    }));
}

/// A server was killed that had it open.
#[test]
fn taking_a_snapshot_of_a_disk_that_was_not_closed() {
    let trial = Trial::new(|images| {
        with_history(images);
        let disk = std::fs::File::options().write(true).open(images.path("web.qcow2")).unwrap();
        disk.write_all_at(&(1_u64 << 63 | 7 << 32).to_be_bytes(), 88).unwrap();
    });
    trial.kill_anywhere(&Operation {
        may_be: &[("web.s3.qcow2", &["web.qcow2"])],
        done: "has a snapshot \"s3\" already",
        ..Operation::of(
            &|images| command(images, "snapshot create %web.qcow2 --name s3 --runtime-dir %run"),
            &next,
        )
    });
}

#[test]
fn growing_a_disk() {
    Trial::new(with_history).kill_anywhere(&Operation::of(
        &|images| command(images, "resize %web.qcow2 40M --runtime-dir %run"),
        &next,
    ));
}
