//! `vmstrata snapshot revert` of a disk that a server serves: to nobody at the moment, or not at all.

use crate::support;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Holder, Images, assert_clean, run_json, run_ok, tool_ok};
use serde_json::{Value, json};

/// A server of `web.qcow2`, whose first 64 KiB were 1 at s1 and 2 at s2 and are 3 now, behind an NBD export and a guest's.
fn start(images: &Images) -> (Server, String, String) {
    images.create("web.qcow2", &["16M"]);
    let (disk, guest) = (images.name("web.qcow2"), images.name("guest.sock"));
    let (nbd, spec) = (format!("unix:{},rw,share", images.name("nbd.sock")), format!("path={disk},name=web"));
    let server =
        Server::start(&["--disk", &spec, "--vhost-user", &format!("web={guest},share"), "--nbd", &nbd]);
    for number in 1..=3 {
        io(&server, &format!("write -P {number} 0 64k"));
        if number < 3 {
            server.ask_ok(["snapshot", "create", &disk, "--name", &format!("s{number}")]);
        }
    }
    (server, disk, guest)
}

fn io(server: &Server, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, &server.uri("web")]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

/// Reverts as soon as whoever just hung up is gone.
fn revert(server: &Server, args: &[&str]) -> String {
    support::wait_for("the disk to have no users", || {
        let output = server.ask([&["snapshot", "revert"], args].concat());
        if output.status.success() {
            return Ok(String::from_utf8(output.stdout).expect("UTF-8"));
        }
        let said = support::stderr(&output);
        assert!(said.contains("in use by"), "{said}");
        Err(said)
    })
}

fn exports(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/exports", "").json()["exports"]
        .as_array()
        .expect("exports")
        .iter()
        .map(|export| (export["id"].to_string(), export["address"].clone()))
        .collect()
}

#[test]
fn a_served_disk_goes_back_behind_its_exports_when_nobody_uses_it() {
    let images = Images::new();
    let (server, disk, guest) = start(&images);
    let before = exports(&server);
    let said = server.ask_err(["snapshot", "revert", &disk, "s1"]);
    assert!(said.contains("--yes") && said.contains("loses what was written"), "{said}");
    let said = revert(&server, &[&disk, "s1", "--yes"]);
    assert!(said.contains("is as at s1 again") && said.contains("web.s2.qcow2: no longer below"), "{said}");
    io(&server, "read -P 1 0 64k");
    assert_eq!(exports(&server), before);
    UnixStream::connect(&guest).expect("the guest's export is open again");
    let shown = ask(&server.control(), "GET", "/v1/disks/web", "").json();
    assert_eq!((&shown["state"], &shown["layers"]), (&"serving".into(), &2.into()), "{shown}");
    // It is written, and has a history, as before.
    io(&server, "write -P 9 64k 64k");
    server.ask_ok(["snapshot", "create", &disk, "--name", "s3"]);
    let kept = images.name("web-kept.qcow2");
    let said = revert(&server, &[&disk, "s1", "--keep", &kept, "--json"]);
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["dropped-layers"].as_array().unwrap().len(), 1, "{report}");
    io(&server, "read -P 0 64k 64k");
    assert!(server.stop().success());
    assert_clean(Path::new(&disk));
    assert_clean(Path::new(&kept));
    tool_ok("qemu-io", ["-r", "-c", "read -P 9 64k 64k", &kept]);
    assert_eq!(run_json(["snapshot", "list", &disk, "--json"])["snapshots"][0]["name"], "s1");
}

#[test]
fn a_disk_that_is_used_is_not_changed_under_its_users() {
    let images = Images::new();
    let (server, disk, guest) = start(&images);
    let client = Holder::open(Path::new(&server.uri("web")), true);
    let said = server.ask_err(["snapshot", "revert", &disk, "s1", "--yes"]);
    assert!(said.contains("in use by an NBD client") && said.contains("snapshot clone"), "{said}");
    client.close();
    let stream = UnixStream::connect(&guest).unwrap();
    let start = Instant::now();
    loop {
        let refused = ask(&server.control(), "POST", "/v1/disks/web/revert", r#"{"snapshot":"s9"}"#).json();
        if refused["detail"].as_str().is_some_and(|detail| detail.contains("the guest at")) {
            assert_eq!(
                (&refused["status"], &refused["kind"]),
                (&409.into(), &"attached".into()),
                "{refused}"
            );
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{refused}");
    }
    io(&server, "read -P 3 0 64k");
    drop(stream);
    revert(&server, &[&disk, "s2", "--yes"]);
    io(&server, "read -P 2 0 64k");
    assert!(server.stop().success());
    assert_clean(Path::new(&disk));
}

#[test]
fn what_cannot_be_reverted_is_served_on() {
    let images = Images::new();
    let (server, disk, _) = start(&images);
    let start = Instant::now();
    let said = loop {
        let said = server.ask_err(["snapshot", "revert", &disk, "s9", "--yes"]);
        if !said.contains("in use by") {
            break said;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{said}");
    };
    assert!(said.contains("s9"), "{said}");
    // Known only when the disk is closed: the file to be kept lies elsewhere.
    let said = server.ask_err(["snapshot", "revert", &disk, "s1", "--keep", "/tmp/elsewhere.qcow2"]);
    assert!(said.contains("directory"), "{said}");
    let taken = images.path("taken.qcow2");
    std::fs::write(&taken, "mine").unwrap();
    let said = server.ask_err(["snapshot", "revert", &disk, "s1", "--keep", taken.to_str().unwrap()]);
    assert!(said.contains("taken.qcow2 exists already: name a file to keep"), "{said}");
    assert_eq!(std::fs::read(&taken).unwrap(), b"mine");
    io(&server, "read -P 3 0 64k");
    let snapshot = format!(r#"{{"path":"{disk}","at":"s1","name":"old"}}"#);
    assert_eq!(ask(&server.control(), "POST", "/v1/disks", &snapshot).status, 201);
    let refused = ask(&server.control(), "POST", "/v1/disks/old/revert", r#"{"snapshot":"s1"}"#);
    assert_eq!((refused.status, &refused.json()["kind"]), (409, &"read-only".into()), "{refused:?}");
    let unknown = ask(&server.control(), "POST", "/v1/disks/nope/revert", r#"{"snapshot":"s1"}"#);
    assert_eq!(unknown.status, 404, "{unknown:?}");
    assert!(server.stop().success());
    assert_clean(Path::new(&disk));
    run_ok(["snapshot", "revert", &disk, "s1", "--yes"]);
}

/// An agent that says when it is to freeze, and does when it is told so.
fn slow_agent(images: &Images) -> (String, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let socket = images.name("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (asked, is_asked) = mpsc::channel();
    let (go, goes) = mpsc::channel();
    std::thread::spawn(move || {
        let mut answers = listener.accept().unwrap().0;
        for line in BufReader::new(answers.try_clone().unwrap()).split(b'\n').map_while(Result::ok) {
            let text = line.strip_prefix(b"\xff").unwrap_or(&line);
            let command: Value = serde_json::from_slice(text).expect("JSON");
            let (delimiter, value): (&[u8], _) = match command["execute"].as_str().unwrap() {
                "guest-sync-delimited" => (b"\xff", command["arguments"]["id"].clone()),
                "guest-fsfreeze-freeze" => {
                    asked.send(()).unwrap();
                    goes.recv().unwrap();
                    (b"", json!(1))
                }
                _ => (b"", json!(1)),
            };
            let answer = [delimiter, format!("{}\n", json!({ "return": value })).as_bytes()].concat();
            answers.write_all(&answer).unwrap();
        }
    });
    (socket, is_asked, go)
}

#[test]
fn a_disk_whose_snapshot_waits_for_the_guest_is_neither_reverted_nor_removed_and_keeps_its_exports() {
    let images = Images::new();
    let (server, disk, guest) = start(&images);
    let before = exports(&server);
    let (agent, is_asked, go) = slow_agent(&images);
    let mut create = support::vmstrata();
    create.args(["snapshot", "create", &disk, "--name", "s3", "--agent", &agent, "--control"]);
    let mut create = create.arg(server.control()).stdout(Stdio::null()).spawn().unwrap();
    is_asked.recv_timeout(Duration::from_secs(30)).expect("the agent is asked");
    for args in [&["snapshot", "revert", &disk, "s1", "--yes"][..], &["disk", "remove", "web"]] {
        let said = server.ask_err(args.iter().copied());
        assert!(said.contains("'web' is having a snapshot taken: try again"), "{args:?}: {said}");
    }
    assert_eq!(exports(&server), before);
    io(&server, "read -P 3 0 64k");
    go.send(()).unwrap();
    assert!(create.wait().unwrap().success());
    revert(&server, &[&disk, "s1", "--yes"]);
    io(&server, "read -P 1 0 64k");
    UnixStream::connect(&guest).expect("the guest's export is open");
    assert!(server.stop().success());
    assert_clean(Path::new(&disk));
}
