//! `vmstrata snapshot delete` and `vmstrata flatten` as a person and a script use them, with stock tools to judge.

mod support;

use serde_json::json;
use support::server::Server;
use support::{Images, assert_clean, run_err, run_json, run_ok, tool_json, tool_ok};

fn qemu_io(images: &Images, name: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-c", command, &images.name(name)]);
    assert!(!said.contains("failed"), "{name}: {command}: {said}");
}

fn chain(path: &str) -> Vec<String> {
    let info = tool_json("qemu-img", ["info", "--backing-chain", "--output=json", path]);
    let files = info.as_array().unwrap().iter();
    files.map(|file| file["filename"].as_str().unwrap().rsplit('/').next().unwrap().to_owned()).collect()
}

/// `web.qcow2` with the snapshots s0 to s4, each with a megabyte of its own, and one they all wrote.
fn with_history(images: &Images) -> String {
    images.create("web.qcow2", &["16M"]);
    let disk = images.name("web.qcow2");
    for number in 0..5 {
        qemu_io(images, "web.qcow2", &format!("write -P {} {}M 1M", number + 1, number + 1));
        qemu_io(images, "web.qcow2", &format!("write -P {} 0 1M", number + 1));
        run_ok(["snapshot", "create", &disk, "--name", &format!("s{number}")]);
    }
    disk
}

fn assert_state(images: &Images, name: &str, newest: u8) {
    qemu_io(images, name, &format!("read -P {newest} 0 1M"));
    for number in 1..=5 {
        let pattern = if number <= newest { number } else { 0 };
        qemu_io(images, name, &format!("read -P {pattern} {number}M 1M"));
    }
    assert_clean(&images.path(name));
}

#[test]
fn snapshots_are_deleted_from_anywhere_in_the_chain() {
    let images = Images::new();
    let disk = with_history(&images);
    let said = run_ok(["snapshot", "delete", &disk, "s1", "s2", "s4"]);
    assert!(said.contains("s1, s2, s4 deleted: 4 MiB copied, 3 files removed"), "{said}");
    assert_eq!(chain(&disk), ["web.qcow2", "web.s3.qcow2", "web.s0.qcow2"]);
    assert_state(&images, "web.qcow2", 5);
    assert_state(&images, "web.s3.qcow2", 4);
    assert_state(&images, "web.s0.qcow2", 1);
    let listed = run_json(["snapshot", "list", &disk, "--json"]);
    assert_eq!(
        (&listed["snapshots"][0]["name"], &listed["snapshots"][1]["name"]),
        (&json!("s3"), &json!("s0"))
    );
    assert!(run_err(1, ["snapshot", "delete", &disk, "s1"]).contains("it has s3, s0"));
    let report = run_json(["snapshot", "delete", &disk, "s0", "--keep-files", "--json"]);
    assert_eq!((&report["removed"], &report["kept"][0]["reason"]), (&json!([]), &json!("it was to be kept")));
    assert_state(&images, "web.qcow2", 5);
    assert_state(&images, "web.s0.qcow2", 1);
}

#[test]
fn a_clone_is_flattened_and_its_origin_stays() {
    let images = Images::new();
    let disk = with_history(&images);
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "s2", "-o", &clone]);
    let said = run_ok(["flatten", &clone, "--remove", "snapshots"]);
    assert!(said.starts_with(&format!("{clone}: flat: 4 MiB copied, 0 files removed\n")), "{said}");
    assert!(said.contains("web.s2.qcow2 stays: it is not a snapshot"), "{said}");
    assert_eq!((chain(&clone).len(), chain(&disk).len()), (1, 6));
    assert_state(&images, "clone.qcow2", 3);
    assert_state(&images, "web.qcow2", 5);
    run_ok(["flatten", &disk, "--remove", "all"]);
    assert_state(&images, "web.qcow2", 5);
    assert_eq!(chain(&disk).len(), 1);
    let left = std::fs::read_dir(images.path("web.qcow2").parent().unwrap()).unwrap().count();
    assert_eq!(left, 2, "the disk and the clone");
    let again = run_ok(["flatten", &disk]);
    assert!(again.contains("flat: 0 B copied"), "{again}");
}

#[test]
fn a_served_disk_is_merged_by_its_server() {
    let images = Images::new();
    let disk = with_history(&images);
    let served = format!("path={disk},name=web");
    let server = Server::start(&["--disk", &served, "--nbd", &format!("unix:{}", images.name("nbd.sock"))]);
    assert!(run_err(1, ["flatten", &disk]).contains("in use"));
    let control = server.control();
    let control = control.to_str().unwrap();
    let said = run_ok(["snapshot", "delete", &disk, "s1", "s3", "--control", control]);
    assert!(said.contains("s1, s3 deleted: 2 MiB copied"), "{said}");
    assert!(!images.path("web.s1.qcow2").exists() && !images.path("web.s3.qcow2").exists());
    let refused = run_err(1, ["snapshot", "delete", &disk, "s1", "--control", control]);
    assert!(refused.contains("s1"), "{refused}");
    assert!(server.stop().success());
    assert_eq!(chain(&disk).len(), 4);
    for (name, newest) in [("web.qcow2", 5), ("web.s4.qcow2", 5), ("web.s2.qcow2", 3), ("web.s0.qcow2", 1)] {
        assert_state(&images, name, newest);
    }
}
