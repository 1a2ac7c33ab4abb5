//! Disks and exports that were added to a running server are its successor's, too, however it ended.

use crate::support;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, tool_ok};
use serde_json::Value;

fn status(server: &Server) -> Value {
    serde_json::from_str(&server.ask_ok(["status", "--json"])).unwrap()
}

/// Names of disks that were added, and where the exports are that were.
fn added(server: &Server) -> (Vec<String>, Vec<String>) {
    let status = status(server);
    let of = |list: &str| {
        let all = status[list].as_array().unwrap().clone();
        all.into_iter().filter(|one| one["added"] == true).collect::<Vec<_>>()
    };
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let place = |export: &Value| {
        let spec = &export["export"];
        text(if spec["kind"] == "nbd" { &spec["address"] } else { &spec["socket"] })
    };
    (of("disks").iter().map(|disk| text(&disk["name"])).collect(), of("exports").iter().map(place).collect())
}

fn io(uri: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, uri]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

#[test]
fn what_was_added_outlives_a_server_that_is_killed_stopped_or_replaced() {
    let images = Images::new();
    let [web, db] = ["web.qcow2", "db.qcow2"].map(|name| images.create(name, &["16M"]));
    let args = [
        "--disk",
        &format!("path={}", web.display()),
        "--nbd",
        &format!("unix:{},rw", images.name("nbd.sock")),
    ];
    let server = Server::start(&args);
    assert_eq!(added(&server), (vec![], vec![]));
    let spec = format!("path={},name=data,keep=last=3", db.display());
    server.ask_ok(["disk", "add", &spec]);
    let socket = images.name("data.sock");
    server.ask_ok(["export", "add", "--vhost-user", &format!("data={socket},queues=2,serial=abc")]);
    server.ask_ok(["export", "add", "--nbd", "tcp:127.0.0.1:0,rw"]);
    let before = added(&server);
    assert_eq!((&before.0[..], before.1.len()), (&["data".to_owned()][..], 2));
    let address = before.1.iter().find(|place| place.starts_with("tcp:")).expect("an address").clone();
    assert!(!address.ends_with(":0"), "the port that was taken: {address}");
    let uri = format!("nbd://{}/data", address.strip_prefix("tcp:").unwrap());
    io(&uri, "write -P 7 0 64k");
    assert!(server.ask_ok(["status"]).contains("writable, added"));
    server.ask_ok(["disk", "limit", "data", "iops-read=5000"]);

    // Killed.
    let server = Server::start_in(server.crash(), &args);
    assert_eq!(added(&server), before);
    assert!(server.ask_ok(["disk", "show", "data"]).contains("limits: iops-read=5000\n"));
    io(&uri, "read -P 7 0 64k");
    // Replaced: the first ends, the second has the socket.
    let runtime = server.control().parent().unwrap().to_owned();
    let mut first = server;
    let second = support::vmstrata()
        .args(["serve", "--json", "--replace", "--runtime-dir"])
        .arg(&runtime)
        .args(args)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    assert!(first.wait().success());
    support::wait_until("the second server", || first.ask(["status"]).status.success());
    assert_eq!(status(&first)["pid"], second.id());
    support::wait_until("what was added", || added(&first) == before);
    io(&uri, "read -P 7 0 64k");
    // What is removed is gone for good, with its exports.
    first.ask_ok(["disk", "remove", "data"]);
    assert_eq!(added(&first), (vec![], vec![address.clone()]));
    rustix::process::kill_process(rustix::process::Pid::from_child(&second), rustix::process::Signal::TERM)
        .unwrap();
    let mut second = second;
    assert!(second.wait().unwrap().success());
    // Stopped and started again, with a disk of that name of its own: its own it is.
    let data = format!("path={},name=data", db.display());
    let runtime = tempfile_of(&runtime);
    let more = [&args[..], &["--disk", &data]].concat();
    let server = Server::start_in(runtime, &more);
    assert_eq!(added(&server), (vec![], vec![address]));
    assert!(server.stop().success());
    assert_clean(&db);
}

/// The note of a runtime directory, in another one, as a test's server removes its own.
fn tempfile_of(runtime: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let note = std::fs::read_to_string(runtime.join("added.json")).unwrap();
    let note = note.replace(runtime.to_str().unwrap(), dir.path().to_str().unwrap());
    std::fs::write(dir.path().join("added.json"), note).unwrap();
    dir
}

/// What cannot be opened any more waits; the server starts all the same. It can be told to forget.
#[test]
fn what_was_added_and_cannot_be_opened_waits_and_can_be_forgotten() {
    let images = Images::new();
    let [web, db] = ["web.qcow2", "db.qcow2"].map(|name| images.create(name, &["16M"]));
    let args = [
        "--disk",
        &format!("path={}", web.display()),
        "--nbd",
        &format!("unix:{},rw", images.name("nbd.sock")),
    ];
    let server = Server::start(&args);
    server.ask_ok(["disk", "add", &format!("path={}", db.display())]);
    let runtime = server.crash();
    let aside = images.path("aside.qcow2");
    std::fs::rename(&db, &aside).unwrap();
    let server = Server::start_in(runtime, &args);
    let disks = status(&server)["disks"].clone();
    let waits = disks.as_array().unwrap().iter().find(|disk| disk["name"] == "db").unwrap();
    assert_eq!((&waits["state"], &waits["added"]), (&"waiting".into(), &true.into()));
    std::fs::rename(&aside, &db).unwrap();
    support::wait_until("the disk", || {
        let disks = status(&server)["disks"].clone();
        disks.as_array().unwrap().iter().any(|disk| disk["name"] == "db" && disk["state"] == "serving")
    });
    let server = Server::start_in(server.crash(), &[&args[..], &["--forget-added"]].concat());
    assert_eq!(added(&server), (vec![], vec![]));
    let server = Server::start_in(server.crash(), &args);
    assert_eq!(added(&server), (vec![], vec![]));
    assert!(server.stop().success());
}
