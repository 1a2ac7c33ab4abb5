//! Disks by path or by the name under which they are served, and snapshots by `DISK@NAME`.

use crate::support::server::Server;
use crate::support::{Images, run_err, run_json, run_ok, wait_until};
use serde_json::Value;

#[test]
fn a_snapshot_is_named_beside_its_disk_or_with_it() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    for name in ["mon", "tue", "wed"] {
        run_ok(["snapshot", "create", &disk, "--name", name]);
    }
    let at = |name: &str| format!("{disk}@{name}");
    let shown = run_json(["snapshot", "show", &at("mon"), "--json"]);
    assert_eq!(shown, run_json(["snapshot", "show", &disk, "mon", "--json"]));
    run_ok(["snapshot", "hold", &at("mon")]);
    run_ok(["snapshot", "release", &at("mon")]);
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &at("mon"), "-o", &clone]);
    run_ok(["snapshot", "revert", &at("tue"), "--yes"]);
    run_ok(["snapshot", "delete", &at("tue")]);
    let left = run_json(["snapshot", "list", &disk, "--json"]);
    assert_eq!(left["snapshots"].as_array().map(Vec::len), Some(1), "{left}");
    for command in ["show", "hold", "delete"] {
        let said = run_err(64, ["snapshot", command, &disk]);
        assert!(said.contains("DISK@NAME"), "{said}");
    }
}

#[test]
fn a_served_disk_is_known_by_its_name_and_by_its_path() {
    let images = Images::new();
    images.create("root.qcow2", &["4M"]);
    let disk = images.name("root.qcow2");
    let (served, nbd) = (format!("path={disk},name=web"), format!("unix:{}", images.name("nbd.sock")));
    let server = Server::start(&["--disk", &served, "--nbd", &nbd]);
    let json = |args: &[&str]| -> Value {
        let args = args.iter().copied().chain(["--json"]);
        serde_json::from_str(&server.ask_ok(args)).expect("JSON")
    };
    for name in ["mon", "tue"] {
        server.ask_ok(["snapshot", "create", "web", "--name", name]);
    }
    assert_eq!(json(&["snapshot", "list", "web"])["snapshots"].as_array().map(Vec::len), Some(2));
    assert_eq!(json(&["resize", "web", "+1M"])["size_bytes"], 5 << 20);
    for command in ["info", "map"] {
        assert_eq!(json(&[command, "web@mon"]), json(&[command, &format!("{disk}@mon")]), "{command}");
    }
    assert_eq!(json(&["disk", "show", &disk])["name"], "web");
    json(&["job", "snapshot-delete", &format!("{disk}@mon")]);
    wait_until("the job to end", || json(&["job", "list"])["jobs"][0]["state"] == "done");
    assert_eq!(json(&["snapshot", "list", "web"])["snapshots"].as_array().map(Vec::len), Some(1));
    server.ask_ok(["snapshot", "delete", "web@tue"]);
    let said = server.ask_err(["snapshot", "list", "db"]);
    assert!(said.contains("db"), "{said}");
    server.ask_ok(["disk", "remove", &disk]);
    assert!(server.stop().success());
}
