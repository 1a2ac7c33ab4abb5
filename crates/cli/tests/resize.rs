//! `vmstrata resize`, on files and through a server, with stock tools as witnesses.

use std::path::Path;

use crate::support::server::Server;
use crate::support::{
    Holder, Images, assert_clean, run_err, run_json, run_ok, tool_json, tool_ok, wait_until,
};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// The size that stock tools see.
fn stock_size(path: &str) -> u64 {
    let info = tool_json("qemu-img", ["info", "-U", "--output=json", path]);
    info["virtual-size"].as_u64().expect("a size")
}

fn nbd_size(uri: &str) -> u64 {
    tool_ok("nbdinfo", ["--size", uri]).trim().parse().expect("a number")
}

#[test]
fn a_file_that_nobody_serves_is_resized_by_the_command() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    let said = run_ok(["resize", &disk, "1G"]);
    assert_eq!(said, format!("{disk}: 1 GiB, was 4 MiB\n"));
    let report = run_json(["resize", &disk, "+10G", "--json"]);
    let (from, to) = (1u64 << 30, 11u64 << 30);
    assert_eq!(report, json!({"disk": disk, "from_bytes": from, "size_bytes": to}));
    assert_eq!(stock_size(&disk), to);
    assert_clean(Path::new(&disk));
    let refused = run_err(1, ["resize", &disk, "5M"]);
    assert!(refused.contains("--shrink") && refused.contains(&disk), "{refused}");
    assert_eq!(stock_size(&disk), to);
    run_ok(["resize", &disk, "5M", "--shrink"]);
    assert_eq!(stock_size(&disk), 5 * MIB);
    assert_clean(Path::new(&disk));
    assert!(run_ok(["resize", &disk, "5M"]).contains("has 5 MiB already"));
    run_err(64, ["resize", &disk, "-1M"]);
    run_err(64, ["resize", &disk]);
    let said = run_ok(["resize", &disk, "+4K"]);
    assert_eq!(said, format!("{disk}: 5124 KiB, was 5120 KiB\n"), "in a unit that shows the difference");
    run_ok(["resize", &disk, "6000001"]);
    assert_eq!(stock_size(&disk), 6_000_128, "whole sectors, as `create` has it");
    assert!(run_err(1, ["resize", &images.name("none.qcow2"), "5M"]).contains("none.qcow2"));
}

#[test]
fn a_served_disk_is_resized_by_the_server_under_its_clients() {
    let images = Images::new();
    images.create("web.qcow2", &["64M"]);
    let disk = images.name("web.qcow2");
    let socket = format!("unix:{},rw", images.name("nbd.sock"));
    let vhost = format!("web={}", images.name("web.sock"));
    let server = Server::start(&[
        "--disk",
        &format!("path={disk},name=web"),
        "--nbd",
        &socket,
        "--vhost-user",
        &vhost,
    ]);
    let uri = server.uri("web");
    server.ask_ok(["snapshot", "create", &disk, "--name", "before"]);
    let told: Value = serde_json::from_str(&server.ask_ok(["resize", &disk, "+3G", "--json"])).expect("JSON");
    let size = 64 * MIB + (3 << 30);
    assert_eq!((told["from_bytes"].as_u64(), told["size_bytes"].as_u64()), (Some(64 * MIB), Some(size)));
    assert_eq!(told["guests_told"], 0, "no guest is connected");
    assert!(told["pause_us"].as_u64().is_some(), "{told}");
    assert_eq!((nbd_size(&uri), stock_size(&disk)), (size, size));
    let wrote = tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 9 3G 1M", &uri]);
    assert!(!wrote.contains("failed"), "{wrote}");
    let refused = server.ask_err(["resize", &disk, "1G"]);
    assert!(refused.contains("--shrink"), "{refused}");
    let shown: Value = serde_json::from_str(&server.ask_ok(["status", "--json"])).expect("JSON");
    assert_eq!(shown["disks"][0]["size_bytes"], size);
    let client = Holder::open(Path::new(&uri), true);
    let again = size.to_string();
    assert!(
        server.ask_ok(["resize", &disk, &again]).contains("1 NBD client must reconnect to see the new size")
    );
    client.close();
    wait_until("the client is gone", || !server.ask_ok(["resize", &disk, &again]).contains("reconnect"));
    // Whoever does not ask the server is told that the disk is in use.
    assert!(run_err(1, ["resize", &disk, "9G"]).contains(&disk));
    server.ask_ok(["snapshot", "create", &disk, "--name", "after"]);
    server.ask_ok(["resize", &disk, "32M", "--shrink"]);
    assert_eq!((nbd_size(&uri), stock_size(&disk)), (32 * MIB, 32 * MIB));
    assert!(server.stop().success());
    let layer = |name: &str| images.name(&format!("web.{name}.qcow2"));
    assert_eq!((stock_size(&layer("before")), stock_size(&layer("after"))), (64 * MIB, size));
    for file in [disk.clone(), layer("before"), layer("after")] {
        assert_clean(Path::new(&file));
    }
    let diff = run_json(["diff", &format!("{disk}@before"), &format!("{disk}@after"), "--json"]);
    assert!(diff.to_string().contains(&(3u64 << 30).to_string()), "{diff}");
    assert!(tool_ok("qemu-io", ["-r", "-c", "read -P 9 3G 1M", &layer("after")]).contains("read 1048576"));
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "after", "-o", &clone]);
    run_ok(["snapshot", "revert", &disk, "before", "--yes"]);
    assert_eq!((stock_size(&clone), stock_size(&disk)), (size, 64 * MIB), "of the states gone back to");
    for file in [disk, clone] {
        assert_clean(Path::new(&file));
    }
}
