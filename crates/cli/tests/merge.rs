//! `vmstrata snapshot delete` and `vmstrata flatten` as a person and a script use them, with stock tools to judge.

use crate::support;
use std::os::unix::fs::MetadataExt as _;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool_json, tool_ok, wait_until};
use serde_json::{Value, json};

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

/// Bytes that all files take.
fn du(images: &Images) -> u64 {
    images.files().iter().map(|name| images.path(name).metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn snapshots_are_deleted_from_anywhere_in_the_chain() {
    let images = Images::new();
    let disk = with_history(&images);
    let said = run_ok(["snapshot", "delete", &disk, "s1", "s2", "s4"]);
    assert!(said.contains("s1, s2, s4 deleted: 4 MiB copied, 3 files removed, "), "{said}");
    assert!(said.ends_with(" MiB freed\n"), "{said}");
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
    let said = run_ok(["flatten", &clone]);
    assert!(
        said.starts_with(&format!("{clone}: flat: 4 MiB copied, 0 files removed, 0 B freed\n")),
        "{said}"
    );
    assert!(said.contains("web.s2.qcow2 stays: it is not a snapshot"), "{said}");
    assert_eq!((chain(&clone).len(), chain(&disk).len()), (1, 6));
    assert_state(&images, "clone.qcow2", 3);
    assert_state(&images, "web.qcow2", 5);
    run_ok(["flatten", &disk, "--remove", "all", "--yes"]);
    assert_state(&images, "web.qcow2", 5);
    assert_eq!(chain(&disk).len(), 1);
    let left = std::fs::read_dir(images.path("web.qcow2").parent().unwrap()).unwrap().count();
    assert_eq!(left, 2, "the disk and the clone");
    let again = run_ok(["flatten", &disk]);
    assert!(again.contains("flat: 0 B copied"), "{again}");
}

#[test]
fn named_snapshots_are_not_flattened_or_merged_away_unasked() {
    let images = Images::new();
    let disk = with_history(&images);
    let before = images.files();
    for args in
        [&["flatten", &disk][..], &["flatten", &disk, "--keep-files"], &["merge", &disk, "--layers", "0..4"]]
    {
        let refused = run_err(1, args.iter().copied());
        assert!(refused.contains("it would lose 5 snapshots (s4, s3, s2, s1, s0)"), "{refused}");
        assert!(refused.contains("--yes lets them go"), "{refused}");
    }
    let plan = run_json(["flatten", &disk, "--dry-run", "--json"]);
    assert_eq!(plan["snapshots"], json!(["s4", "s3", "s2", "s1", "s0"]));
    let layers = plan["layers"].as_array().unwrap();
    assert!(layers.iter().all(|layer| layer["removed"] == json!(true)), "{plan}");
    let sizes = layers.iter().map(|layer| layer["actual-size"].as_u64().unwrap());
    assert_eq!(plan["freed-bytes"].as_u64().unwrap(), sizes.sum::<u64>());
    // A clone keeps what it stands on, and all below that.
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "s1", "-o", &clone]);
    let plan = run_ok(["merge", &disk, "--layers", "1..3", "--yes", "--dry-run"]);
    assert!(plan.contains("3 layers to drop, 3 snapshots lost with them"), "{plan}");
    assert!(plan.contains("stays: ") && plan.contains("clone.qcow2 stands on it"), "{plan}");
    assert_eq!(plan.matches("removed").count(), 2, "{plan}");
    let plan = run_ok(["snapshot", "delete", &disk, "s4", "--dry-run"]);
    assert!(plan.contains("1 layer to drop, 1 snapshot lost with them") && plan.contains("s4"), "{plan}");
    std::fs::remove_file(&clone).unwrap();
    assert_eq!(images.files(), before, "nothing has changed");
    assert_eq!(chain(&disk).len(), 6);
    // What was foreseen is what happens.
    let report = run_json(["flatten", &disk, "--yes", "--json"]);
    assert_eq!((report["removed"].as_array().unwrap().len(), &report["kept"]), (5, &json!([])));
    assert_eq!(images.files(), ["web.qcow2"]);
    assert_state(&images, "web.qcow2", 5);
}

#[test]
fn a_server_asks_for_the_loss_of_named_snapshots_too() {
    let images = Images::new();
    let disk = with_history(&images);
    let served = format!("path={disk},name=web");
    let server = Server::start(&["--disk", &served, "--nbd", &format!("unix:{}", images.name("nbd.sock"))]);
    for args in [
        &["flatten", &disk][..],
        &["merge", &disk, "--layers", "0..1"],
        &["job", "flatten", "web"],
        &["job", "merge", "web", "--layers", "0..1"],
    ] {
        let refused = server.ask_err(args.iter().copied());
        assert!(refused.contains("it would drop") && refused.contains("drop_snapshots=true"), "{refused}");
    }
    // A dry run passes over the server's own locks.
    let plan = server.ask_ok(["flatten", &disk, "--dry-run"]);
    assert!(plan.contains("5 layers to drop, 5 snapshots lost") && !plan.contains("stays: "), "{plan}");
    assert!(images.path("web.s0.qcow2").exists());
    server.ask_ok(["merge", &disk, "--layers", "0..1", "--yes"]);
    assert!(!images.path("web.s0.qcow2").exists() && !images.path("web.s1.qcow2").exists());
    server.ask_ok(["flatten", &disk, "--yes"]);
    assert!(server.stop().success());
    assert_eq!(images.files(), ["web.qcow2"]);
    assert_state(&images, "web.qcow2", 5);
}

#[test]
fn a_served_disk_is_merged_by_its_server() {
    let images = Images::new();
    let disk = with_history(&images);
    let served = format!("path={disk},name=web");
    let server =
        Server::start(&["--disk", &served, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    assert!(run_err(1, ["flatten", &disk, "--yes"]).contains("in use"));
    let control = server.control();
    let control = control.to_str().unwrap();
    let before = du(&images);
    let said = run_ok(["snapshot", "delete", &disk, "s1", "s3", "--control", control]);
    assert!(said.contains("s1, s3 deleted: 2 MiB copied, 2 files removed, "), "{said}");
    let jobs: Value = serde_json::from_str(&server.ask_ok(["job", "list", "--json"])).unwrap();
    let removed = json!({ "files": 2, "freed_bytes": before - du(&images) });
    assert_eq!(jobs["jobs"][0]["removed"], removed);
    assert!(said.ends_with(" freed\n"), "{said}");
    assert!(!images.path("web.s1.qcow2").exists() && !images.path("web.s3.qcow2").exists());
    run_ok(["snapshot", "delete", &disk, "s2", "--keep-files", "--control", control]);
    assert!(images.path("web.s2.qcow2").exists(), "it was to be kept");
    let refused = run_err(1, ["snapshot", "delete", &disk, "s1", "--control", control]);
    assert!(refused.contains("s1"), "{refused}");
    assert!(server.stop().success());
    assert_eq!(chain(&disk), ["web.qcow2", "web.s4.qcow2", "web.s0.qcow2"]);
    for (name, newest) in [("web.qcow2", 5), ("web.s4.qcow2", 5), ("web.s2.qcow2", 3), ("web.s0.qcow2", 1)] {
        assert_state(&images, name, newest);
    }
}

#[test]
fn a_range_of_snapshots_goes_with_all_between_its_ends() {
    let images = Images::new();
    let disk = with_history(&images);
    let unknown = run_err(1, ["snapshot", "delete", &disk, "s1..s9"]);
    assert!(unknown.contains("s9"), "{unknown}");
    run_ok(["snapshot", "delete", &disk, "s1..s3"]);
    assert_eq!(chain(&disk), ["web.qcow2", "web.s4.qcow2", "web.s0.qcow2"]);
    // A snapshot of that very name is what is meant, and the ends may be given in either order.
    run_ok(["snapshot", "create", &disk, "--name", "s4..s0"]);
    run_ok(["snapshot", "delete", &disk, "s4..s0"]);
    assert_eq!(chain(&disk), ["web.qcow2", "web.s4.qcow2", "web.s0.qcow2"]);
    assert_state(&images, "web.s4.qcow2", 5);
    run_ok(["snapshot", "delete", &disk, "s4..s0"]);
    assert_eq!(chain(&disk), ["web.qcow2"]);
    assert_state(&images, "web.qcow2", 5);
}

#[test]
fn a_served_disk_is_flattened_while_it_is_used() {
    let images = Images::new();
    let disk = with_history(&images);
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "s1", "-o", &clone]);
    let served = format!("path={disk},name=web");
    let server =
        Server::start(&["--disk", &served, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    let uri = server.uri("web");
    let write = |pattern: u8, at: &str| {
        tool_ok("qemu-io", ["-f", "raw", "-c", &format!("write -P {pattern} {at}"), &uri]);
    };
    let begun = server.ask_ok(["job", "flatten", "web", "--yes", "--keep-files", "--limit", "1M", "--json"]);
    assert!(begun.contains(r#""kind": "flatten""#) && begun.contains("1048576"), "{begun}");
    // Written and discarded under the job, also where it has not been yet.
    write(99, "12M 1M");
    write(98, "5M 64k");
    tool_ok("qemu-io", ["-f", "raw", "-c", "discard 4M 64k", &uri]);
    assert!(server.ask_err(["flatten", &disk, "--yes"]).contains("already"), "one at a time");
    server.ask_ok(["job", "cancel", "1"]);
    let said = loop {
        let said = server.ask(["flatten", &disk, "--yes", "--keep-files"]);
        if said.status.success() {
            break String::from_utf8(said.stdout).unwrap();
        }
        assert!(support::stderr(&said).contains("already"), "{said:?}");
    };
    assert!(said.contains(": flat: ") && said.contains(" copied"), "{said}");
    assert_eq!(
        tool_json("qemu-img", ["info", "-U", "--backing-chain", "--output=json", &disk])
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert!(server.ask_ok(["flatten", &disk]).contains("flat: 0 B copied"), "flat already");
    let reads = |name: &str, commands: &[&str]| {
        for command in commands {
            qemu_io(&images, name, command);
        }
    };
    assert!(server.stop().success());
    assert_clean(&images.path("web.qcow2"));
    reads(
        "web.qcow2",
        &[
            "read -P 99 12M 1M",
            "read -P 98 5M 64k",
            "read -P 0 4M 64k",
            "read -P 4 4160k 64k",
            "read -P 5 0 1M",
        ],
    );
    assert_state(&images, "web.s4.qcow2", 5);
    assert_state(&images, "clone.qcow2", 2);
}

#[test]
fn flattening_a_served_disk_removes_what_it_is_asked_to_and_keeps_what_others_need() {
    let images = Images::new();
    let disk = with_history(&images);
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "s1", "-o", &clone]);
    let served = format!("path={disk},name=web");
    let server =
        Server::start(&["--disk", &served, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    let said = server.ask_ok(["flatten", &disk, "--yes"]);
    assert!(said.contains("web.s1.qcow2 stays: ") && said.contains("clone.qcow2 stands on it"), "{said}");
    assert!(said.contains("; and another file"), "s0, which s1 stands on: {said}");
    assert!(server.stop().success());
    assert_eq!(chain(&clone).len(), 3);
    for gone in 2..5 {
        assert!(!images.path(&format!("web.s{gone}.qcow2")).exists(), "s{gone}");
    }
    assert_state(&images, "web.qcow2", 5);
    assert_state(&images, "clone.qcow2", 2);
}

/// A rule's daily work on a disk that is almost full: the oldest goes for what changed since.
#[test]
fn the_oldest_snapshot_of_a_served_disk_goes_by_what_copies_less() {
    let images = Images::new();
    let disk = with_history(&images);
    qemu_io(&images, "web.s0.qcow2", "write -P 1 8M 4M");
    let served = format!("path={disk},name=web,keep=last=4");
    let server =
        Server::start(&["--disk", &served, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    wait_until("the rule's job", || {
        let listed: Value = serde_json::from_str(&server.ask_ok(["job", "list", "--json"])).unwrap();
        let mut jobs = listed["jobs"].as_array().unwrap().iter();
        let Some(job) = jobs.find(|job| job["kind"] == "snapshot_delete") else { return false };
        assert_ne!(job["state"], "failed", "{job}");
        job["state"] == "done" && job["bytes"] == 2 << 20
    });
    let said = server.ask_ok(["snapshot", "delete", &disk, "s1", "--direction", "commit"]);
    assert!(said.contains("s1 deleted: 2 MiB copied"), "{said}");
    let refused = server.ask_err(["snapshot", "delete", &disk, "s4", "--direction", "commit"]);
    assert!(refused.contains("the layer above is the one that takes the writes"), "{refused}");
    assert!(server.stop().success());
    assert_eq!(chain(&disk), ["web.qcow2", "web.s4.qcow2", "web.s3.qcow2", "web.s2.qcow2"]);
    assert_state(&images, "web.qcow2", 5);
    assert_state(&images, "web.s2.qcow2", 3);
}

#[test]
fn a_snapshot_is_deleted_the_way_that_copies_less() {
    let images = Images::new();
    let disk = with_history(&images);
    qemu_io(&images, "web.s0.qcow2", "write -P 1 8M 4M");
    let refused = run_err(1, ["snapshot", "delete", &disk, "s4", "--direction", "commit"]);
    assert!(refused.contains("the layer above is the one that takes the writes"), "{refused}");
    let before = du(&images);
    let report = run_json(["snapshot", "delete", &disk, "s0", "--json"]);
    assert_eq!(report["freed-bytes"], before - du(&images), "{report}");
    assert_eq!(report["committed-bytes"], json!(2 << 20), "the oldest holds 5 MiB: {report}");
    assert_eq!(report["removed"], json!([images.name("web.s0.qcow2")]));
    assert_eq!(chain(&disk), ["web.qcow2", "web.s4.qcow2", "web.s3.qcow2", "web.s2.qcow2", "web.s1.qcow2"]);
    let report = run_json(["snapshot", "delete", &disk, "s1", "--direction", "stream", "--json"]);
    assert_eq!(report["committed-bytes"], json!(0));
    assert_state(&images, "web.qcow2", 5);
    assert_state(&images, "web.s2.qcow2", 3);
}
