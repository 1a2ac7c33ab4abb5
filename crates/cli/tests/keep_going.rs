//! A server that goes on without what it cannot open, and serves it once it can.

use std::path::Path;

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, run_err, tool_ok, wait_until};
use serde_json::Value;

fn status(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/status", "").json()
}

fn named<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    status["disks"].as_array().unwrap().iter().find(|disk| disk["name"] == name)
}

fn is_served(server: &Server, name: &str) -> bool {
    named(&status(server), name).unwrap()["state"] == "serving"
}

/// Writes through the NBD export, as a client that comes while the server runs.
fn writes(server: &Server, name: &str) {
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri(name)]);
}

#[test]
fn one_missing_image_keeps_nobody_from_the_others_and_is_served_when_it_appears() {
    let images = Images::new();
    let disks = ["a", "b", "c"].map(|name| format!("path={}", images.name(&format!("{name}.qcow2"))));
    images.create("a.qcow2", &["16M"]);
    images.create("c.qcow2", &["16M"]);
    let (nbd, guest) = (format!("unix:{},rw", images.name("nbd.sock")), images.name("b.sock"));
    let vhost_user = format!("b={guest}");
    let args = ["--disk", &disks[0], "--disk", &disks[1], "--disk", &disks[2], "--nbd", &nbd];
    let args = [&args[..], &["--vhost-user", &vhost_user]].concat();
    // Strict is the default.
    let error = run_err(1, ["serve", "--no-control"].iter().chain(&args));
    assert!(error.contains("b.qcow2"), "{error}");

    let server = Server::start(&[&args[..], &["--keep-going"]].concat());
    assert!(server.ready["disks"][1]["open_error"].as_str().unwrap().contains("b.qcow2"), "{}", server.ready);
    writes(&server, "a");
    writes(&server, "c");
    let now = status(&server);
    let names: Vec<&Value> = now["disks"].as_array().unwrap().iter().map(|disk| &disk["name"]).collect();
    assert_eq!(names, ["a", "b", "c"], "in the order in which they were asked for");
    let b = named(&now, "b").unwrap();
    assert_eq!((&b["state"], &b["failed"]), (&"waiting".into(), &Value::Null));
    assert!(b["open_error"].as_str().unwrap().contains("b.qcow2"), "{b}");
    assert!(named(&now, "a").unwrap()["open_error"].is_null());
    assert_eq!(now["exports"][1]["open_error"], "disk 'b' is not open");
    for command in [&["status"][..], &["disk", "show", "b"]] {
        let said = server.ask_ok(command.iter().copied());
        assert!(said.contains("not open") && said.contains("No such file"), "{said}");
    }
    let refused = server.ask_err(["job", "index-build", "b"]);
    assert!(refused.contains("disk 'b' is not open") && refused.contains("No such file"), "{refused}");
    let metrics = ask(&server.control(), "GET", "/v1/metrics", "").body;
    for line in [
        "vmstrata_disk_waiting{disk=\"a\"} 0",
        "vmstrata_disk_waiting{disk=\"b\"} 1",
        "vmstrata_exports_waiting 1",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }

    // Whole at once, as a file system is when it is mounted.
    images.create("new.qcow2", &["16M"]);
    std::fs::rename(images.path("new.qcow2"), images.path("b.qcow2")).unwrap();
    wait_until("the disk", || is_served(&server, "b"));
    wait_until("its export", || Path::new(&guest).exists());
    wait_until("its status", || status(&server)["exports"][1]["open_error"].is_null());
    writes(&server, "b");
    assert!(server.stop().success());
}

#[test]
fn a_disk_that_waits_is_given_up_by_removing_it() {
    let images = Images::new();
    let disk = format!("path={}", images.name("a.qcow2"));
    let (nbd, guest) = (format!("unix:{},rw", images.name("nbd.sock")), images.name("a.sock"));
    let vhost_user = format!("a={guest}");
    let args = ["--keep-going", "--disk", &disk, "--nbd", &nbd, "--vhost-user", &vhost_user];
    let server = Server::start(&args);
    server.ask_ok(["disk", "remove", "a"]);
    let now = status(&server);
    assert!(named(&now, "a").is_none(), "{now}");
    assert_eq!(now["exports"].as_array().unwrap().len(), 1, "its export has gone with it: {now}");
    // Its name is free, and nobody tries any more to open what was asked for first.
    images.create("a.qcow2", &["16M"]);
    server.ask_ok(["disk", "add", &disk]);
    writes(&server, "a");
    assert!(!Path::new(&guest).exists());
    assert!(server.stop().success());
}

#[test]
fn an_export_whose_directory_is_missing_is_opened_when_the_directory_appears() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let config = images.path("vmstrata.toml");
    let text = format!(
        "keep-going = true\nnbd = [{{ address = \"unix:nbd.sock\", rw = true }}, \"unix:late/nbd.sock\"]\n\
         [[disk]]\npath = {path:?}\n[[vhost-user]]\ndisk = \"a\"\nsocket = \"late/a.sock\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let server = Server::start(&["--config", config.to_str().unwrap()]);
    writes(&server, "a");
    let waiting = |server: &Server| -> Vec<Value> {
        let exports = status(server)["exports"].as_array().unwrap().clone();
        exports.into_iter().filter(|export| !export["open_error"].is_null()).collect()
    };
    let wait = waiting(&server);
    assert_eq!((&wait[0]["id"], &wait[1]["id"], wait.len()), (&2.into(), &3.into(), 2), "{wait:?}");
    assert!(wait[1]["open_error"].as_str().unwrap().contains("late/a.sock"), "{wait:?}");
    assert!(server.ask_ok(["status"]).contains("export 3 is not open"));
    // A second guest is refused as if the first one's export were open.
    let second = format!("a={}", images.name("second.sock"));
    assert!(server.ask_err(["export", "add", "--vhost-user", &second]).contains("two vhost-user sockets"));
    server.ask_ok(["export", "remove", "2"]);
    std::fs::create_dir(images.path("late")).unwrap();
    wait_until("the export", || waiting(&server).is_empty());
    assert!(images.path("late/a.sock").exists());
    assert!(!images.path("late/nbd.sock").exists(), "given up");
    assert_eq!(status(&server)["exports"][1]["id"], 3, "it has its number still");
    assert!(server.stop().success());
}
