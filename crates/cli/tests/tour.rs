//! A tour as a new user would make it: every file that is there at its end is one that a command named, and takes the space
//! that the commands say.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_json, run_ok, tool, tool_ok};
use serde_json::Value;

fn write(uri: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, uri]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

fn same(one: &str, other: &str) {
    let compared = tool("qemu-img", ["compare", "-U", "-F", "raw", one, other]);
    assert!(compared.status.success(), "{one} {other}: {}", String::from_utf8_lossy(&compared.stdout));
}

/// What the host has for a file, as `du` counts it.
fn on_host(file: &str) -> u64 {
    Path::new(file).metadata().expect(file).blocks() * 512
}

/// The files of the disk's snapshots; what each takes is what is listed.
fn layers(disk: &str) -> BTreeSet<String> {
    let listed = run_json(["snapshot", "list", disk, "--all", "--json"]);
    let rows = |key: &str, file: &str| -> Vec<(String, u64)> {
        let row = |row: &Value| {
            (row[file].as_str().expect(file).to_owned(), row["actual-size"].as_u64().expect("a size"))
        };
        listed[key].as_array().into_iter().flatten().map(row).collect()
    };
    let all = rows("snapshots", "layer").into_iter().chain(rows("left-over", "file"));
    all.map(|(file, size)| {
        assert_eq!(size, on_host(&file), "{file}");
        file.rsplit('/').next().expect("a name").to_owned()
    })
    .collect()
}

#[test]
fn nothing_is_left_that_no_command_named() {
    let images = Images::new();
    let (web, test) = (images.name("web.qcow2"), images.name("test.qcow2"));
    run_ok(["create", &web, "64M"]);
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let args = ["--disk", &format!("path={web},name=web"), "--nbd", &nbd];
    let server = Server::start(&args);
    let uri = server.uri("web");

    // History, a clone of it, and the way back.
    for (name, pattern) in [("mon", 1), ("tue", 2), ("wed", 3)] {
        write(&uri, &format!("write -P {pattern} {pattern}M 1M"));
        server.ask_ok(["snapshot", "create", &web, "--name", name]);
    }
    server.ask_ok(["snapshot", "clone", &web, "mon", "-o", &test]);
    server.ask_ok(["disk", "add", &format!("path={test},name=test")]);
    write(&uri.replace("/web?", "/test?"), "write -P 9 9M 1M");
    server.ask_ok(["disk", "remove", "test"]);
    server.ask_ok(["snapshot", "revert", &web, "tue", "--yes"]);
    assert_eq!(layers(&web), ["web.mon.qcow2", "web.tue.qcow2", "web.wed.qcow2"].map(str::to_owned).into());

    // A backup of the running disk, and what it restores.
    let (backup, restored) = (images.name("tue.qcow2"), images.name("tue.raw"));
    server.ask_ok(["backup", &format!("{web}@tue"), "-o", &backup, "--no-hold"]);
    run_ok(["restore", &backup, "--format", "raw", "-o", &restored]);
    same(&web, &restored);

    // Another server takes over, where this one is killed.
    let server = Server::start_in(server.crash(), &args);
    server.ask_ok(["snapshot", "delete", &web, "mon"]);
    server.ask_ok(["flatten", &web, "--yes"]);
    assert!(server.stop().success());
    same(&web, &restored);
    for disk in [&web, &test] {
        assert_clean(Path::new(disk));
    }

    // Everything goes: the clone, then what it alone needed.
    std::fs::remove_file(&test).expect("removed");
    run_ok(["gc", &images.name(""), "--forget-missing", "--yes"]);
    assert!(layers(&web).is_empty());
    let there: BTreeSet<String> = images.files().into_iter().collect();
    assert_eq!(
        there,
        ["web.qcow2", "tue.qcow2", "tue.qcow2.manifest.json", "tue.raw"].map(str::to_owned).into()
    );
    assert_eq!(run_json(["info", &web, "--json"])["actual-size"].as_u64(), Some(on_host(&web)));
}
