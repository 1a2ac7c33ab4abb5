//! `vmstrata serve --config`: a file says what flags say, and where it is wrong.

use std::fs;

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, tool_ok};

#[test]
fn a_server_of_a_file_serves_what_the_file_says_and_flags_win() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    let top = images.create("web.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let config = images.path("vmstrata.toml");
    let text = "nbd = [{ address = \"unix:nbd.sock\", rw = true }]\nworkers = 3\ncontrol = \"file.sock\"\n\
                [[disk]]\npath = \"web.qcow2\"\n[[vhost-user]]\ndisk = \"web\"\nsocket = \"web.sock\"\n";
    fs::write(&config, text).unwrap();
    let by_flag = images.name("flag.sock");
    let server = Server::start(&["--config", config.to_str().unwrap(), "--control", &by_flag]);
    assert_eq!(server.ready["disks"][0]["name"], "web");
    assert_eq!(server.ready["disks"][0]["vhost_user"][0]["socket"], *images.name("web.sock"));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri("web")]);
    assert!(!images.path("file.sock").exists(), "the flag did not win");
    assert_eq!(ask(&images.path("flag.sock"), "GET", "/v1/disks", "").json()["disks"][0]["layers"], 2);
    assert!(server.stop().success());
    assert_clean(&top);
}

#[test]
fn a_server_may_start_empty_and_be_told_its_disks() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let config = images.path("vmstrata.toml");
    fs::write(&config, format!("nbd = [{{ address = \"unix:{}\", rw = true }}]\n", images.name("nbd.sock")))
        .unwrap();
    let server = Server::start(&["--config", config.to_str().unwrap()]);
    assert_eq!(server.ready["disks"].as_array().unwrap().len(), 0);
    server.ask_ok(["disk", "add", &format!("path={},name=late", path.display())]);
    let uri = format!("nbd+unix:///late?socket={}", images.name("nbd.sock"));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &uri]);
    assert!(server.stop().success());
    assert_clean(&path);
}

#[test]
fn what_is_wrong_in_a_file_is_said_with_file_and_line() {
    let images = Images::new();
    let config = images.path("bad.toml");
    let path = config.to_str().unwrap();
    for (text, place, part) in [
        ("nbd = []\n\n[[disk]]\npath = \"a\"\nreadonly = true\n", "bad.toml:5: ", "unknown field `readonly`"),
        ("workers = 5000\n", "bad.toml:1: ", "1 to 1024"),
        ("workers = \n", "bad.toml:1: ", ""),
    ] {
        fs::write(&config, text).unwrap();
        let message = run_err(1, ["serve", "--config", path]);
        assert!(message.contains(place) && message.contains(part), "{message}");
    }
    let message = run_err(1, ["serve", "--config", &images.name("absent.toml")]);
    assert!(message.contains("absent.toml") && message.contains("No such file"), "{message}");
    fs::write(&config, "[[disk]]\npath = \"a.qcow2\"\n").unwrap();
    let message = run_err(64, ["serve", "--config", path]);
    assert!(message.contains("nothing serves disk 'a'"), "{message}");
}
