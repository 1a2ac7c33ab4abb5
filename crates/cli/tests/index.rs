//! `vmstrata index`: what it prints, its exit codes, and what stock tools find afterwards.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Holder, Images, assert_clean, run, run_err, run_json, run_ok, tool_ok};

/// `0.qcow2` to `4.qcow2`, made by vmstrata and written by qemu-io; the last is the active layer.
fn chain(images: &Images) -> PathBuf {
    for layer in 0..5 {
        let (name, below) = (images.name(&format!("{layer}.qcow2")), format!("{}.qcow2", layer - 1));
        match layer {
            0 => run_ok(["create", &name, "8M"]),
            _ => run_ok(["create", &name, "--backing", &below]),
        };
        images.write_layer(&format!("{layer}.qcow2"), &[&format!("write -P {layer} {layer}M 64k")]);
    }
    images.path("4.qcow2")
}

fn verdicts(disk: &str) -> Vec<String> {
    let output = run(["index", "verify", disk, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let layers = json["layers"].as_array().expect("a list").iter();
    layers.map(|layer| layer["verdict"].as_str().expect("a word").to_owned()).collect()
}

#[test]
fn build_verify_and_drop_as_scripts_see_them() {
    let images = Images::new();
    let disk = chain(&images);
    let disk = disk.to_str().expect("UTF-8");
    assert_eq!(run(["index", "verify", disk]).status.code(), Some(3), "nothing there yet");
    let built = run_json(["index", "build", disk, "--json"]);
    let layers = built["layers"].as_array().expect("a list");
    assert_eq!(layers.len(), 4, "the active layer is not frozen");
    assert!(layers.iter().all(|layer| layer["outcome"] == "built" && layer["home"] == "file"));
    let kinds = |report: &serde_json::Value| -> Vec<String> {
        let layers = report["layers"].as_array().expect("a list").iter();
        layers.map(|layer| layer["kind"].as_str().expect("a word").to_owned()).collect()
    };
    assert_eq!(kinds(&built), ["full", "delta", "delta", "delta"]);
    let verified = run_json(["index", "verify", disk, "--json"]);
    assert_eq!(kinds(&verified), kinds(&built));
    assert_eq!(verified["layers"][1]["bytes"], built["layers"][1]["bytes"]);
    assert!(run_ok(["index", "verify", disk]).contains("1.qcow2: good, delta, 20480 bytes\n"));
    let again = run_ok(["index", "build", disk]);
    assert!(again.contains("0 indices built (0 bytes), 4 kept, 0 failed"), "{again}");
    assert!(
        again.contains("0.qcow2: has one, full\n") && again.contains("1.qcow2: has one, delta\n"),
        "{again}"
    );
    (0..5).for_each(|layer| assert_clean(&images.path(&format!("{layer}.qcow2"))));
    let dropped = run_json(["index", "drop", disk, "--json"]);
    let freed = |layer: &serde_json::Value| layer["bytes-freed"].as_u64().expect("a number");
    let freed: Vec<u64> = dropped["layers"].as_array().expect("a list").iter().map(freed).collect();
    assert!(freed[..4].iter().all(|&bytes| bytes >= 4096) && freed[4] == 0, "{freed:?}");
    assert!(run_ok(["index", "drop", disk]).contains("0 indices dropped"));
    assert_eq!(verdicts(disk), ["missing"; 4]);
}

#[test]
fn what_a_stock_tool_changed_is_told_and_mended() {
    let images = Images::new();
    let disk = chain(&images);
    let disk = disk.to_str().expect("UTF-8");
    run_ok(["index", "build", disk]);
    tool_ok("qemu-img", ["commit", "-q", "-d", "-b", &images.name("1.qcow2"), &images.name("2.qcow2")]);
    let output = run(["index", "verify", disk]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("3.qcow2: stale:") && said.contains("1.qcow2 was changed since"), "{said}");
    assert!(said.contains("vmstrata index build"), "{said}");
    run_ok(["index", "build", disk]);
    assert_eq!(verdicts(disk), ["good"; 4]);
}

#[test]
fn a_disk_in_use_can_be_indexed_and_its_own_file_cannot() {
    let images = Images::new();
    let disk = chain(&images);
    let holder = Holder::open(&disk, false);
    let disk = disk.to_str().expect("UTF-8");
    run_ok(["index", "build", disk]);
    assert_eq!(verdicts(disk), ["good"; 4]);
    let output = run(["index", "build", disk, "--top", "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("in use by another process"), "{said}");
    holder.close();
    run_ok(["index", "build", disk, "--top"]);
    assert_eq!(run(["index", "verify", disk, "--top"]).status.code(), Some(0));
}

#[test]
fn stock_images_get_sidecars_that_drop_takes_away() {
    let images = Images::new();
    let disk = images.long_chain(4);
    let disk = disk.to_str().expect("UTF-8");
    assert!(run_ok(["index", "build", disk]).contains("2.qcow2.vmsx"));
    assert!(images.path("2.qcow2.vmsx").exists());
    assert_eq!(verdicts(disk), ["good"; 3]);
    assert!(run_ok(["index", "drop", disk]).contains("removed"));
    assert!(!images.path("2.qcow2.vmsx").exists());
}

#[test]
fn layers_that_cannot_be_written_are_told() {
    let images = Images::new();
    let disk = chain(&images);
    let directory = disk.parent().expect("a directory").to_owned();
    let allow = |mode, file_mode| {
        for layer in 0..5 {
            let path = images.path(&format!("{layer}.qcow2"));
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(file_mode)).expect("sets");
        }
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(mode)).expect("sets");
    };
    allow(0o500, 0o400);
    let may_write_anyway = std::fs::write(directory.join("probe"), "").is_ok();
    let output = run(["index", "build", disk.to_str().expect("UTF-8")]);
    allow(0o700, 0o600);
    if may_write_anyway {
        // Permissions do not bind the superuser.
        assert_eq!(output.status.code(), Some(0));
        return;
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("no index: ") && said.contains("4 failed"), "{said}");
}

#[test]
fn a_chain_that_cannot_be_read_is_an_error() {
    let images = Images::new();
    let message = run_err(1, ["index", "build", &images.name("nothing.qcow2")]);
    assert!(message.contains("nothing.qcow2"), "{message}");
    run_err(64, ["index", "rebuild"]);
}

/// As one of its jobs, so that it is listed, and can be paused and cancelled.
#[test]
fn the_index_of_a_served_disk_is_built_by_its_server() {
    let images = Images::new();
    let disk = chain(&images);
    let disk = disk.to_str().expect("UTF-8");
    let export = format!("unix:{},rw", images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={disk},name=web"), "--nbd", &export]);
    let jobs = || ask(&server.control(), "GET", "/v1/jobs", "").json()["jobs"].as_array().unwrap().clone();
    let before = jobs().len();
    let said = server.ask_ok(["index", "build", disk]);
    assert!(said.contains("4 layers looked at by its server") && said.contains("0 failed"), "{said}");
    let after = jobs();
    assert_eq!(after.len(), before + 1, "{after:?}");
    let job = after.iter().max_by_key(|job| job["id"].as_u64()).unwrap();
    assert_eq!(
        (&job["kind"], &job["disk"], &job["state"]),
        (&"index_build".into(), &"web".into(), &"done".into())
    );
    assert!(job["bytes"].as_u64() > Some(0), "{job}");
    assert_eq!(verdicts(disk), ["good"; 4]);
    let again: serde_json::Value =
        serde_json::from_str(&server.ask_ok(["index", "build", disk, "--json"])).expect("JSON");
    assert_eq!((&again["kind"], &again["bytes"]), (&"index_build".into(), &0.into()), "all are kept");
    assert!(server.stop().success());
}
