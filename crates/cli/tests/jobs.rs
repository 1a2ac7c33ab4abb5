//! Long work of a running server: begun, watched, slowed, paused and ended, while the disk is used.

use crate::support;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_ok, tool_ok};
use serde_json::Value;

/// A disk of 30 layers made by this program, so that indices lie in the layers, and its server.
fn start(images: &Images) -> Server {
    for layer in 0..30 {
        let (name, below) =
            (images.name(&format!("{layer}.qcow2")), images.name(&format!("{}.qcow2", layer - 1)));
        let what = if layer == 0 { vec!["16M"] } else { vec!["--backing", &below] };
        run_ok([&["create", &name], &what[..]].concat());
        images.write_layer(
            &format!("{layer}.qcow2"),
            &[&format!("write -P {} {}k 64k", layer + 1, layer * 64)],
        );
    }
    let disk = format!("path={},name=web", images.name("29.qcow2"));
    Server::start(&["--disk", &disk, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))])
}

fn job(server: &Server, args: &[&str]) -> Value {
    serde_json::from_str(&server.ask_ok([&["job", "--json"], args].concat())).unwrap()
}

fn wait_for(server: &Server, id: &str, state: &str) -> Value {
    support::wait_for(state, || {
        let status = ask(&server.control(), "GET", &format!("/v1/jobs/{id}"), "").json();
        if status["state"] == state { Ok(status) } else { Err(status) }
    })
}

/// Waits until a job has done its first step.
fn wait_for_first_step(server: &Server) {
    support::wait_until("the first step", || job(server, &["list"])["jobs"][0]["done"] == 1);
}

#[test]
fn indices_of_a_served_disk_are_built_beside_its_guests() {
    let images = Images::new();
    let server = start(&images);
    let begun = job(&server, &["index-build", "web"]);
    assert_eq!((&begun["kind"], &begun["total"]), (&"index_build".into(), &29.into()));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 99 8M 64k", &server.uri("web")]);
    let done = wait_for(&server, "1", "done");
    assert_eq!((&done["done"], &done["failures"]), (&29.into(), &0.into()));
    assert!(done["bytes"].as_u64().unwrap() > 29 * 4096, "{done}");
    let text = server.ask_ok(["job", "list"]);
    assert!(text.contains("29 of 29 layers (100 %)"), "{text}");
    assert!(server.stop().success());
    run_ok(["index", "verify", &images.name("29.qcow2")]);
    for layer in [0, 14, 28, 29] {
        assert_clean(&images.path(&format!("{layer}.qcow2")));
    }
    tool_ok(
        "qemu-io",
        ["-r", "-c", "read -P 99 8M 64k", "-c", "read -P 5 256k 64k", &images.name("29.qcow2")],
    );
}

/// A stock tool changes a layer in the middle: nobody has to ask for the index to be made anew.
#[test]
fn an_index_that_no_longer_holds_is_made_anew_by_the_server() {
    let images = Images::new();
    let server = start(&images);
    assert_eq!(
        job(&server, &["list"])["jobs"],
        Value::Array(Vec::new()),
        "images without an index are left alone"
    );
    assert!(server.stop().success());
    run_ok(["index", "build", &images.name("29.qcow2")]);
    images.write_layer("14.qcow2", &["write -P 77 15M 64k"]);
    let disk = format!("path={},name=web", images.name("29.qcow2"));
    let server = Server::start(&["--disk", &disk, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    let done = wait_for(&server, "1", "done");
    assert_eq!((&done["kind"], &done["failures"]), (&"index_build".into(), &0.into()), "{done}");
    tool_ok("qemu-io", ["-r", "-f", "raw", "-c", "read -P 77 15M 64k", &server.uri("web")]);
    run_ok(["index", "verify", &images.name("29.qcow2")]);
    assert!(server.stop().success());
}

#[test]
fn a_job_is_slowed_paused_resumed_and_let_loose() {
    let images = Images::new();
    let server = start(&images);
    // A layer's index has some kilobytes: this would take hours.
    job(&server, &["index-build", "web", "--limit", "1"]);
    wait_for_first_step(&server);
    assert_eq!(job(&server, &["pause", "1"])["state"], "paused");
    let said = server.ask_err(["job", "index-build", "web"]);
    assert!(said.contains("under way on disk 'web' already"), "{said}");
    job(&server, &["limit", "1"]);
    std::thread::sleep(Duration::from_millis(100));
    let paused = wait_for(&server, "1", "paused");
    assert_eq!(paused["done"], 1, "a paused job goes on");
    job(&server, &["resume", "1"]);
    assert_eq!(wait_for(&server, "1", "done")["done"], 29);
    assert!(server.stop().success());
}

#[test]
fn a_cancelled_job_leaves_what_it_did_and_another_goes_on_from_there() {
    let images = Images::new();
    let server = start(&images);
    job(&server, &["index-build", "web", "--limit", "1"]);
    wait_for_first_step(&server);
    job(&server, &["cancel", "1"]);
    let cancelled = wait_for(&server, "1", "cancelled");
    assert_eq!(cancelled["done"], 1, "{cancelled}");
    assert_clean(&images.path("0.qcow2"));
    job(&server, &["index-build", "web"]);
    let done = wait_for(&server, "2", "done");
    assert_eq!(done["failures"], 0, "{done}");
    assert!(server.ask_err(["job", "cancel", "99"]).contains("no job has the number 99"));
    assert!(server.stop().success());
}

#[test]
fn jobs_end_with_their_disk_and_with_the_server() {
    let images = Images::new();
    let server = start(&images);
    let add = |name: &str| {
        let path = images.create(name, &["-b", &images.name("28.qcow2"), "-F", "qcow2"]);
        server.ask_ok(["disk", "add", &format!("path={},name={name}", path.display())]);
    };
    add("twin");
    job(&server, &["index-build", "web", "--limit", "1"]);
    job(&server, &["index-build", "twin", "--limit", "1"]);
    job(&server, &["pause", "2"]);
    let start = Instant::now();
    server.ask_ok(["disk", "remove", "twin"]);
    assert_eq!(wait_for(&server, "2", "cancelled")["disk"], "twin");
    assert_eq!(job(&server, &["list"])["jobs"][0]["state"], "running");
    assert!(server.ask_err(["job", "index-build", "twin"]).contains("no disk is named 'twin'"));
    assert!(server.stop().success());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_clean(Path::new(&images.name("29.qcow2")));
}

#[test]
fn snapshots_are_dropped_from_a_disk_while_it_is_written() {
    let images = Images::new();
    run_ok(["create", &images.name("web.qcow2"), "64M"]);
    let disk = format!("path={},name=web", images.name("web.qcow2"));
    let server = Server::start(&["--disk", &disk, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))]);
    let uri = server.uri("web");
    let io = |command: &str| {
        let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, &uri]);
        assert!(!said.contains("failed"), "{command}: {said}");
    };
    for number in 1..=6 {
        io(&format!("write -P {number} {number}M 1M"));
        io(&format!("write -P {number} 0 64k"));
        let body = format!(r#"{{"name":"s{number}","disks":["web"],"taken_ns":{number}}}"#);
        let taken = ask(&server.control(), "POST", "/v1/snapshots", &body);
        assert_eq!(taken.status, 201, "{taken:?}");
    }
    let count = || ask(&server.control(), "GET", "/v1/disks/web", "").json()["layers"].as_u64().unwrap();
    assert_eq!(count(), 7);
    let begun = job(&server, &["snapshot-delete", "web", "s2", "s3", "s5"]);
    assert_eq!(
        (&begun["kind"], begun["bytes_per_second"].as_u64()),
        (&"snapshot_delete".into(), Some(64 << 20))
    );
    io("write -P 99 20M 1M");
    let done = wait_for(&server, "1", "done");
    assert_eq!((&done["failures"], &done["done"]), (&0.into(), &done["total"]), "{done}");
    assert!(done["bytes"].as_u64().unwrap() >= 3 << 20, "{done}");
    assert_eq!(count(), 4);
    for (pattern, at) in
        [(1, "1M 1M"), (2, "2M 1M"), (3, "3M 1M"), (5, "5M 1M"), (6, "0 64k"), (99, "20M 1M")]
    {
        io(&format!("read -P {pattern} {at}"));
    }
    let said = server.ask_err(["job", "snapshot-delete", "web", "s2"]);
    assert!(said.contains("s2"), "{said}");
    assert!(server.stop().success());
    for name in ["web.qcow2", "web.s1.qcow2", "web.s4.qcow2", "web.s6.qcow2"] {
        assert_clean(&images.path(name));
    }
    for name in ["web.s2.qcow2", "web.s3.qcow2", "web.s5.qcow2"] {
        assert!(!images.path(name).exists(), "{name} was left behind");
    }
    // What the snapshots that are left show is what it was.
    tool_ok(
        "qemu-io",
        ["-r", "-c", "read -P 4 0 64k", "-c", "read -P 3 3M 1M", &images.name("web.s4.qcow2")],
    );
}
