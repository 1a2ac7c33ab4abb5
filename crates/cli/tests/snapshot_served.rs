//! `vmstrata snapshot create` of disks that a server serves, under load from stock tools.

use crate::support;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Stdio};

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, stderr, tool_json, tool_ok, wait_until};
use serde_json::{Value, json};

/// A server with these disks of `images`, each behind one NBD socket.
fn serve(images: &Images, disks: &[&str]) -> Server {
    let socket = format!("unix:{},rw", images.name("nbd.sock"));
    let specs: Vec<String> = disks.iter().map(|disk| format!("path={}", images.name(disk))).collect();
    let mut args: Vec<&str> = specs.iter().flat_map(|spec| ["--disk", spec.as_str()]).collect();
    args.extend(["--nbd", &socket]);
    Server::start(&args)
}

fn qemu_io(uri: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, uri]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

fn reads(path: &str, pattern: u8, at: &str) {
    let said = tool_ok("qemu-io", ["-r", "-c", &format!("read -P {pattern} {at}"), path]);
    assert!(!said.contains("failed"), "{path}: {said}");
}

/// fio, writing and checking what it wrote, until it is waited for.
fn load(uri: &str, seconds: u32) -> Child {
    std::process::Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--iodepth=8", "--size=32m"])
        .args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_state_save=0", "--loops=4"])
        .args([format!("--uri={uri}"), format!("--runtime={seconds}")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fio starts")
}

#[test]
fn a_served_disk_takes_snapshots_while_it_is_written() {
    let images = Images::new();
    images.create("web.qcow2", &["64M"]);
    let server = serve(&images, &["web.qcow2"]);
    let (uri, disk) = (server.uri("web"), images.name("web.qcow2"));
    qemu_io(&uri, "write -P 1 40M 1M");
    let fio = load(&uri, 20);
    for number in 0..20 {
        let name = format!("s{number}");
        let said = server.ask_ok(["snapshot", "create", &disk, "--name", &name, "--label", "a=b"]);
        assert!(said.contains("writes held for") && said.contains(&format!("web.{name}.qcow2")), "{said}");
        qemu_io(&uri, &format!("write -P {} 41M 64k", number + 2));
    }
    let fio = fio.wait_with_output().expect("fio ends");
    assert!(fio.status.success(), "{}", stderr(&fio));
    let taken: Value =
        serde_json::from_str(&server.ask_ok(["snapshot", "create", &disk, "--name", "end", "--json"]))
            .unwrap();
    assert!(taken["pause_us"].as_u64().is_some(), "{taken}");
    assert_eq!(taken["snapshots"][0], json!({"disk": disk, "layer": images.name("web.end.qcow2")}));
    let status = || server.ask_ok(["status", "--json"]);
    let shown = status();
    assert!(shown.replace(' ', "").contains("\"layers\":22"), "{shown}");
    // The last one's index is written without being waited for, and nobody asks for it.
    wait_until("its index", || !status().contains("finaliz"));
    assert!(server.stop().success());
    for number in 0..20u8 {
        let layer = images.name(&format!("web.s{number}.qcow2"));
        reads(&layer, 1, "40M 1M");
        reads(&layer, if number == 0 { 0 } else { number + 1 }, "41M 64k");
        assert_clean(Path::new(&layer));
    }
    assert_clean(Path::new(&disk));
    let listed = run_json(["snapshot", "list", &disk, "--json"]);
    let rows = listed["snapshots"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[20]["labels"]), (21, &json!({"a": "b"})));
}

#[test]
fn disks_of_one_guest_are_taken_together_and_refusals_change_nothing() {
    let images = Images::new();
    for name in ["root.qcow2", "data.qcow2", "other.qcow2"] {
        images.create(name, &["4M"]);
    }
    let server = serve(&images, &["root.qcow2", "data.qcow2"]);
    let [root, data, other] = ["root.qcow2", "data.qcow2", "other.qcow2"].map(|name| images.name(name));
    server.ask_ok(["snapshot", "create", &root, &data, "--name", "v1", "--group", "guest7"]);
    let taken = server.ask_err(["snapshot", "create", &data, &root, "--name", "v1"]);
    assert!(taken.contains("data.v1.qcow2"), "{taken}");
    let mixed = server.ask_err(["snapshot", "create", &root, &other, "--name", "v2"]);
    assert!(mixed.contains("other.qcow2") && mixed.contains("not served"), "{mixed}");
    let twice = server.ask_err(["snapshot", "create", &root, &root, "--name", "v2"]);
    assert!(twice.contains("twice"), "{twice}");
    // Without the server the files are in use; one that it does not serve is nobody's.
    let held = run_err(1, ["snapshot", "create", &root, "--name", "v2"]);
    assert!(held.contains("in use"), "{held}");
    server.ask_ok(["snapshot", "create", &other, "--name", "v2"]);
    assert!(server.stop().success());
    for disk in [&root, &data] {
        let chain = tool_json("qemu-img", ["info", "--backing-chain", "--output=json", disk]);
        assert_eq!(chain.as_array().unwrap().len(), 2);
        let listed = run_json(["snapshot", "list", disk, "--json"]);
        assert_eq!(listed["snapshots"][0]["group"], "guest7");
        assert_clean(Path::new(disk));
    }
}

/// It was connected before the snapshots were taken: what it held of the layers of then is in nobody's way.
#[test]
fn a_client_that_does_nothing_does_not_keep_deleted_layers() {
    let images = Images::new();
    images.create("web.qcow2", &["16M"]);
    let server = serve(&images, &["web.qcow2"]);
    let disk = images.name("web.qcow2");
    let mut idle = std::process::Command::new("qemu-io")
        .args(["-f", "raw", &server.uri("web")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io starts");
    let mut stdin = idle.stdin.take().expect("piped");
    writeln!(stdin, "write -P 1 0 64k").expect("writes");
    let mut said = BufReader::new(idle.stdout.take().expect("piped")).lines();
    assert!(said.any(|line| line.expect("reads").contains("wrote")), "it is connected and has written");
    for name in ["one", "two", "three"] {
        server.ask_ok(["snapshot", "create", &disk, "--name", name]);
    }
    for name in ["one", "two", "three"] {
        let said = server.ask_ok(["snapshot", "delete", &disk, name]);
        assert!(!said.contains("stays"), "{said}");
        assert!(!images.path(&format!("web.{name}.qcow2")).exists(), "{name}");
    }
    drop(stdin);
    assert!(idle.wait().expect("ends").success());
    assert!(server.stop().success());
    reads(&disk, 1, "0 64k");
    assert_clean(Path::new(&disk));
}

#[test]
fn a_snapshots_file_is_served_read_only_and_resized_by_nobody() {
    let images = Images::new();
    images.create("web.qcow2", &["16M"]);
    images.write_layer("web.qcow2", &["write -P 1 0 1M"]);
    support::run_ok(["snapshot", "create", &images.name("web.qcow2"), "--name", "a"]);
    let (layer, socket) = (images.name("web.a.qcow2"), format!("unix:{}", images.name("nbd.sock")));
    let server = Server::start(&["--disk", &format!("path={layer},name=a"), "--nbd", &socket]);
    assert!(server.log().contains("served read-only") && server.log().contains("web.qcow2 stands on it"));
    assert_eq!(server.ready["disks"][0]["read_only"], true);
    let info = tool_json("nbdinfo", ["--json", &server.uri("a")]);
    assert_eq!(info["exports"][0]["is_read_only"], true);
    assert!(server.stop().success());
    let said = run_err(1, ["resize", &layer, "32M"]);
    assert!(said.contains("web.qcow2 stands on it") && said.contains("clone"), "{said}");
    support::run_ok(["resize", &layer, "32M", "--force"]);
    reads(&images.name("web.qcow2"), 1, "0 1M");
}
