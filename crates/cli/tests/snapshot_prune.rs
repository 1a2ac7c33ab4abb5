//! `vmstrata snapshot prune`: what rules keep stays as it was, the rest goes, served or not.

use crate::support;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool_json, tool_ok, wait_until};
use serde_json::{Value, json};

fn qemu_io(target: &str, options: &[&str], command: &str) {
    let said = tool_ok("qemu-io", [options, &["-c", command, target][..]].concat());
    assert!(!said.contains("failed"), "{target}: {said}");
}

/// `web.qcow2` with snapshots s1 to s6: the first byte of the disk is the number, as is that of so many MiB.
fn with_history(images: &Images) -> String {
    images.create("web.qcow2", &["8M"]);
    let disk = images.name("web.qcow2");
    for number in 1..=6 {
        qemu_io(&disk, &[], &format!("write -P {number} 0 64k"));
        qemu_io(&disk, &[], &format!("write -P {number} {number}M 64k"));
        let label = if number % 2 == 0 { "job=nightly" } else { "job=other" };
        run_ok(["snapshot", "create", &disk, "--name", &format!("s{number}"), "--label", label]);
    }
    qemu_io(&disk, &[], "write -P 7 0 64k");
    disk
}

fn names(disk: &str) -> Vec<String> {
    let listed = run_json(["snapshot", "list", disk, "--json"]);
    let rows = listed["snapshots"].as_array().unwrap().iter();
    rows.map(|row| row["name"].as_str().unwrap().to_owned()).collect()
}

fn assert_state(images: &Images, name: &str, newest: u8) {
    let path = images.name(name);
    qemu_io(&path, &["-r"], &format!("read -P {newest} 0 64k"));
    for number in 1..=newest.min(6) {
        qemu_io(&path, &["-r"], &format!("read -P {number} {number}M 64k"));
    }
    assert_clean(Path::new(&path));
}

#[test]
fn files_that_nobody_serves_are_pruned() {
    let images = Images::new();
    let disk = with_history(&images);
    let planned = run_json(["snapshot", "prune", &disk, "--keep", "last=2", "--dry-run", "--json"]);
    assert_eq!(planned["keep"], json!(["s6", "s5"]));
    assert_eq!(planned["delete"], json!(["s4", "s3", "s2", "s1"]));
    assert_eq!(names(&disk).len(), 6, "a dry run deletes nothing");
    run_ok(["snapshot", "prune", &disk, "--keep", "last=1", "--label", "job=nightly"]);
    assert_eq!(names(&disk), ["s6", "s5", "s3", "s1"], "others are left alone");
    run_ok(["snapshot", "prune", &disk, "--keep", "last=2"]);
    assert_eq!(names(&disk), ["s6", "s5"]);
    for (name, newest) in [("web.s5.qcow2", 5), ("web.s6.qcow2", 6), ("web.qcow2", 7)] {
        assert_state(&images, name, newest);
    }
    for gone in ["web.s2.qcow2", "web.s4.qcow2"] {
        assert!(!Path::new(&images.name(gone)).exists(), "{gone}");
    }
    let again = run_ok(["snapshot", "prune", &disk, "--keep", "last=2"]);
    assert!(again.contains("0 snapshots to delete, 2 to keep by last=2"), "{again}");
    let wrong = run_err(64, ["snapshot", "prune", &disk, "--keep", "often=2"]);
    assert!(wrong.contains("is no rule"), "{wrong}");
}

#[test]
fn what_a_guests_memory_needs_is_left_alone() {
    let images = Images::new();
    let disk = with_history(&images);
    let memory = "memory=web@mon";
    run_ok(["snapshot", "create", &disk, "--name", "mon", "--label", memory]);
    run_ok(["snapshot", "create", &disk, "--name", "s8"]);
    let planned = run_json(["snapshot", "prune", &disk, "--keep", "last=1", "--dry-run", "--json"]);
    assert_eq!((&planned["keep"], &planned["with-memory"]), (&json!(["s8"]), &json!(["mon"])));
    let said = run_ok(["snapshot", "prune", &disk, "--keep", "last=1", "--dry-run"]);
    assert!(said.contains("(1 snapshot taken with a guest's memory left alone"), "{said}");
    let pruned =
        support::tool(env!("CARGO_BIN_EXE_vmstrata"), ["snapshot", "prune", &disk, "--keep", "last=1"]);
    let said = String::from_utf8_lossy(&pruned.stderr).into_owned();
    assert!(pruned.status.success() && said.contains("1 snapshot taken with a guest's memory"), "{said}");
    assert_eq!(names(&disk), ["s8", "mon"]);
    let asked = ["snapshot", "prune", &disk, "--keep", "last=1", "--label", memory, "--dry-run", "--json"];
    assert_eq!(run_json(asked)["keep"], json!(["mon"]));
}

#[test]
fn a_disk_that_is_served_is_pruned_while_it_is_served() {
    let images = Images::new();
    let disk = with_history(&images);
    let socket = format!("unix:{},rw", images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={disk}"), "--nbd", &socket]);
    let uri = server.uri("web");
    qemu_io(&uri, &["-f", "raw"], "write -P 9 7M 64k");
    server.ask_ok(["snapshot", "prune", &disk, "--keep", "last=1"]);
    qemu_io(&uri, &["-f", "raw"], "read -P 9 7M 64k");
    qemu_io(&uri, &["-f", "raw"], "read -P 7 0 64k");
    assert!(server.stop().success());
    assert_eq!(names(&disk), ["s6"]);
    let chain = tool_json("qemu-img", ["info", "--backing-chain", "--output=json", &disk]);
    assert_eq!(chain.as_array().unwrap().len(), 2);
    assert_state(&images, "web.s6.qcow2", 6);
    assert_state(&images, "web.qcow2", 7);
}

/// Rules of the server's own: nobody asks for anything to be deleted, and nothing else is.
#[test]
fn a_served_disk_with_rules_is_pruned_by_its_server() {
    let images = Images::new();
    images.create("web.qcow2", &["16M"]);
    let web = images.name("web.qcow2");
    run_ok(["snapshot", "create", &web, "--name", "before"]);
    let disk = format!("path={web},name=web,keep=last=2");
    let server = Server::start(&["--disk", &disk, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    for number in 0..5 {
        let write = format!("write -P {} {number}M 64k", number + 1);
        tool_ok("qemu-io", ["-f", "raw", "-c", &write, &server.uri("web")]);
        let name = format!("s{number}");
        let memory: &[&str] = if number == 1 { &["--label", "memory=guest@s1"] } else { &[] };
        server.ask_ok([&["snapshot", "create", &web, "--name", &name], memory].concat());
    }
    wait_until("what no rule keeps is gone", || names(&web) == ["s4", "s3", "s1"]);
    let reads: Vec<String> = (0..5).map(|number| format!("read -P {} {number}M 64k", number + 1)).collect();
    let mut args = vec!["-r", "-f", "raw"];
    args.extend(reads.iter().flat_map(|read| ["-c", read]));
    args.push(server.ready["disks"][0]["nbd"][0]["uri"].as_str().unwrap());
    tool_ok("qemu-io", args);
    let log = server.log();
    assert!(log.contains("change snapshot_delete") && log.contains("by=retention"), "{log}");
    assert!(server.stop().success());
    assert_clean(Path::new(&web));
}

/// A rule waits for a merge that is under way, and for no later snapshot.
#[test]
fn a_rule_is_applied_when_the_merge_in_its_way_has_ended() {
    let images = Images::new();
    let disk = with_history(&images);
    let rule = format!("path={disk},keep=last=2");
    let server = Server::start(&["--disk", &rule, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    let two = |newest: [&str; 2]| wait_until("two snapshots", || names(&disk) == newest);
    two(["s6", "s5"]);
    let jobs = || -> Value { serde_json::from_str(&server.ask_ok(["job", "list", "--json"])).unwrap() };
    let mut last = Value::Null;
    wait_until("the end of the rule's job", || {
        last = jobs()["jobs"].as_array().unwrap().last().unwrap().clone();
        last["state"] == "done"
    });
    server.ask_ok(["job", "snapshot-delete", "web", "s5", "--limit", "1"]);
    for name in ["s7", "s8", "s9"] {
        tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 9 0 64k", &server.uri("web")]);
        server.ask_ok(["snapshot", "create", &disk, "--name", name]);
    }
    assert_eq!(names(&disk), ["s9", "s8", "s7", "s6", "s5"]);
    let slow = last["id"].as_u64().unwrap() + 1;
    server.ask_ok(["job", "limit", &slow.to_string(), "64M"]);
    two(["s9", "s8"]);
    assert!(server.stop().success());
}
