//! `vmstrata move` and `vmstrata drain`: of disks in use, and without a server.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::support::guest::Guest;
use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_ok, tool_ok, vmstrata, wait_until};
use serde_json::{Value, json};

/// A disk with a snapshot, and a model of what its guest wrote.
struct Host {
    images: Images,
    path: String,
    model: String,
}

impl Host {
    fn new() -> Self {
        let images = Images::new();
        ["old", "new"].iter().for_each(|dir| fs::create_dir(images.path(dir)).unwrap());
        let (path, model) = (images.name("old/web.qcow2"), images.name("model.qcow2"));
        tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &path, "64M"]);
        tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 9 16M 16M", &path]);
        fs::copy(&path, &model).unwrap();
        run_ok(["snapshot", "create", &path, "--name", "mon"]);
        fs::copy(&model, images.path("mon.qcow2")).unwrap();
        Self { images, path, model }
    }

    fn keys(&self) -> [String; 2] {
        [format!("path={}", self.path), format!("unix:{},rw", self.images.name("nbd"))]
    }

    fn serve(&self) -> Server {
        let [disk, nbd] = self.keys();
        Server::start(&["--disk", &disk, "--nbd", &nbd])
    }

    fn write(&self, guest: &mut Guest, what: &str) {
        guest.write(what);
        tool_ok("qemu-io", ["-f", "qcow2", "-c", &format!("write {what}"), &self.model]);
    }

    fn new_dir(&self) -> String {
        self.images.name("new")
    }

    fn to(&self) -> String {
        self.images.name("new/web.qcow2")
    }

    /// By stock tools, at its new path alone.
    fn assert_moved(&self) {
        assert!(!Path::new(&self.path).exists());
        assert_clean(self.to().as_ref());
        tool_ok("qemu-img", ["compare", &self.to(), &self.model]);
        let mon = self.images.name("new/web.mon.qcow2");
        assert_clean(mon.as_ref());
        tool_ok("qemu-img", ["compare", &mon, &self.images.name("mon.qcow2")]);
    }

    fn assert_reads(&self, server: &Server) {
        tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri("web"), &self.model]);
    }
}

fn detail(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/disks/web", "").json()
}

#[test]
fn a_guest_goes_on_while_its_disk_moves_and_moves_back() {
    let host = Host::new();
    let server = host.serve();
    let mut guest = Guest::new(&server);
    host.write(&mut guest, "-P 1 0 4M");
    let planned = server.ask_ok(["move", "web", "--to", &host.new_dir(), "--dry-run"]);
    assert!(planned.contains("2 files") && planned.contains("web.mon.qcow2"), "{planned}");
    assert!(Path::new(&host.path).exists());
    let said = server.ask_ok(["move", "web", "--to", &host.new_dir()]);
    assert!(said.contains("moved to") && said.contains("vmstrata move web --undo"), "{said}");
    host.write(&mut guest, "-P 2 2M 4M");
    host.assert_reads(&server);
    assert_eq!(detail(&server)["path"], host.to());
    assert_eq!(detail(&server)["moving"]["phase"], "moved");
    assert!(server.ask_ok(["status"]).contains("web: moved from"), "{}", server.ask_ok(["status"]));
    server.ask_ok(["snapshot", "create", "web", "--name", "tue"]);
    host.write(&mut guest, "-P 3 8M 1M");
    let said = server.ask_ok(["move", "web", "--undo", "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert!(said["copied-bytes"].as_u64().unwrap() < 16 << 20, "the old files are there: {said}");
    assert_eq!(detail(&server)["path"], host.path);
    host.write(&mut guest, "-P 4 9M 1M");
    host.assert_reads(&server);
    guest.end();
    assert!(server.stop().success());
    tool_ok("qemu-img", ["compare", &host.path, &host.model]);
    assert_clean(host.path.as_ref());
    let listed = run_ok(["snapshot", "list", &host.path]);
    assert!(listed.contains("mon") && listed.contains("tue"), "{listed}");
}

#[test]
fn a_disk_moves_in_step_with_its_guest() {
    let host = Host::new();
    let server = host.serve();
    for factor in ["1", "101", "fast"] {
        let refused = run_err(64, ["move", "web", "--to", &host.new_dir(), "--latency", factor]);
        assert!(refused.contains("--latency"), "{refused}");
    }
    let asked =
        json!({ "kind": "move", "disk": "web", "to": host.new_dir(), "latency_percent": 100 }).to_string();
    let refused = ask(&server.control(), "POST", "/v1/jobs", &asked);
    assert_ne!(refused.status, 201);
    assert!(refused.json().to_string().contains("110 to 10000 percent"), "{}", refused.json());
    let mut guest = Guest::new(&server);
    host.write(&mut guest, "-P 1 0 4M");
    let way = ["--latency", "1.5", "--order", "nearest"];
    server.ask_ok(["move", "web", "--to", &host.new_dir()].into_iter().chain(way));
    host.write(&mut guest, "-P 2 2M 4M");
    host.assert_reads(&server);
    // And on, to a copy without history.
    let raw = host.images.name("old/web.raw");
    server.ask_ok(["move", "web", "--to", &raw, "--latency", "1.5", "--order", "hot-first"]);
    host.write(&mut guest, "-P 3 5M 4M");
    host.assert_reads(&server);
    guest.end();
    assert!(server.stop().success());
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &raw, &host.model]);
}

#[test]
fn the_files_that_a_disk_came_from_go_after_a_while_and_so_do_the_states_of_the_move() {
    let host = Host::new();
    let server = host.serve();
    server.ask_ok(["move", "web", "--to", &host.new_dir(), "--keep", "1s"]);
    wait_until("they are gone", || detail(&server)["moving"].is_null());
    let left: Vec<_> =
        fs::read_dir(host.images.path("old")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left, [".web.qcow2.moved"]);
    let listed = server.ask_ok(["snapshot", "list", &host.to()]);
    assert!(listed.contains("mon") && !listed.contains("move-"), "{listed}");
    assert!(server.stop().success());
    host.assert_moved();
    // By its old path, too, as a configuration may have it.
    let server = host.serve();
    host.assert_reads(&server);
    assert_eq!(detail(&server)["path"], host.to());
    assert!(server.log().contains("has moved: serve it by its new path"), "{}", server.log());
    assert!(server.stop().success());
}

#[test]
fn a_server_that_is_killed_while_a_disk_moves_is_followed_by_one_that_goes_on() {
    let host = Host::new();
    let mut server = host.serve();
    let mut guest = Guest::new(&server);
    let mut rounds = 0;
    // Slow enough to be killed in every phase.
    let asked = json!({ "kind": "move", "disk": "web", "to": host.new_dir(), "bytes_per_second": 24 << 20 });
    while detail(&server)["moving"]["phase"] != "moved" {
        rounds += 1;
        assert!(rounds < 40, "{}", server.log());
        let place = rounds % 16;
        host.write(&mut guest, &format!("-P {rounds} {place}M 1M"));
        ask(&server.control(), "POST", "/v1/jobs", &asked.to_string());
        std::thread::sleep(Duration::from_millis(150 * rounds));
        guest.kill();
        let runtime = server.crash();
        let [disk, nbd] = host.keys();
        server = Server::start_in(runtime, &["--disk", &disk, "--nbd", &nbd]);
        assert!(Path::new(&host.path).exists() != (detail(&server)["path"] == host.to()), "one path");
        guest = Guest::new(&server);
        host.assert_reads(&server);
    }
    guest.end();
    assert!(server.stop().success());
    host.assert_moved();
}

#[test]
fn a_disk_that_nobody_uses_moves_without_a_server() {
    let host = Host::new();
    let (new, control) = (host.new_dir(), host.images.name("none"));
    let moved =
        vmstrata().args(["move", &host.path, "--to", &new]).env("VMSTRATA_RUNTIME_DIR", &control).output();
    let moved = moved.unwrap();
    assert!(moved.status.success(), "{moved:?}");
    let said = String::from_utf8(moved.stdout).unwrap();
    assert!(said.contains(&format!("vmstrata gc {} --yes", host.path)), "{said}");
    host.assert_moved();
    run_ok(["gc", &host.path, "--yes"]);
    assert!(!host.images.path("old/web.mon.qcow2").exists());
    host.assert_moved();
    let refused = run_err(1, ["move", &host.to(), "--to", &new]);
    assert!(refused.contains("it is there"), "{refused}");
    assert!(run_err(1, ["move", &host.to(), "--undo"]).contains("no source files are kept"));
}

#[test]
fn all_disks_of_a_directory_move() {
    let host = Host::new();
    let (other, alone) = (host.images.name("old/log.qcow2"), host.images.name("old/alone.qcow2"));
    for image in [&other, &alone] {
        tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", image, "16M"]);
    }
    let [disk, nbd] = host.keys();
    let server = Server::start(&["--disk", &disk, "--disk", &format!("path={other}"), "--nbd", &nbd]);
    let drain = ["drain", &host.images.name("old"), "--to", &host.new_dir()];
    let planned = server.ask_ok([&drain[..], &["--dry-run"]].concat());
    assert!(planned.contains("2 files") && planned.contains("1 file"), "{planned}");
    let drained = server.ask_ok(drain);
    assert!(drained.contains("2 disks moved, 0 failed, 1 left"), "{drained}");
    assert!(drained.contains(&format!("{alone}: no server serves it")), "{drained}");
    host.assert_reads(&server);
    let again = server.ask_ok(drain);
    assert!(again.contains("0 disks moved"), "{again}");
    assert!(server.stop().success());
    host.assert_moved();
    assert!(host.images.path("new/log.qcow2").exists() && Path::new(&alone).exists());
}

/// A stock server of a raw file full of other bytes.
struct Target {
    child: Child,
    file: String,
    uri: String,
}

impl Target {
    fn new(host: &Host) -> Self {
        let (file, socket) = (host.images.name("target.raw"), host.images.name("target.sock"));
        fs::write(&file, vec![0xee; 64 << 20]).unwrap();
        let mut command = Command::new("qemu-nbd");
        let child = command.args(["-t", "-f", "raw", "-x", "web", "-k", &socket, &file]).spawn().unwrap();
        wait_until("it listens", || Path::new(&socket).exists());
        Self { child, file, uri: format!("nbd+unix:///web?socket={socket}") }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_guest_goes_on_while_its_disk_goes_to_a_stock_nbd_server() {
    let host = Host::new();
    let server = host.serve();
    let target = Target::new(&host);
    let (file, to) = (target.file.clone(), target.uri.clone());
    let mut guest = Guest::new(&server);
    host.write(&mut guest, "-P 1 0 4M");
    let refused = server.ask_err(["move", "web", "--to", &to]);
    assert!(refused.contains("everything on it would be overwritten: say so with --yes"), "{refused}");
    let planned = server.ask_ok(["move", "web", "--to", &to, "--dry-run"]);
    assert!(planned.contains("2 files") && planned.contains(&to), "{planned}");
    let said = server.ask_ok(["move", "web", "--to", &to, "--yes"]);
    assert!(said.contains(&format!("vmstrata gc {} --yes", host.path)), "{said}");
    host.write(&mut guest, "-P 2 2M 4M");
    host.assert_reads(&server);
    assert_eq!((&detail(&server)["path"], &detail(&server)["moving"]["is_flat"]), (&json!(to), &json!(true)));
    guest.end();
    // A server that is started with the old configuration finds it there.
    let runtime = server.crash();
    let [disk, nbd] = host.keys();
    let server = Server::start_in(runtime, &["--disk", &disk, "--nbd", &nbd]);
    let mut guest = Guest::new(&server);
    host.write(&mut guest, "-P 3 5M 4M");
    host.assert_reads(&server);
    guest.end();
    assert!(server.stop().success());
    drop(target);
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &file, &host.model]);
    assert!(!Path::new(&host.path).exists());
    run_ok(["gc", &host.path, "--yes"]);
    let left = fs::read_dir(host.images.path("old")).unwrap().map(|file| file.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".qcow2")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_guest_goes_on_while_its_disk_comes_back_from_a_stock_nbd_server() {
    let host = Host::new();
    let mut server = host.serve();
    let target = Target::new(&host);
    let mut guest = Guest::new(&server);
    server.ask_ok(["move", "web", "--to", &target.uri, "--yes"]);
    host.write(&mut guest, "-P 2 2M 4M");
    // A server that is killed on the way, and started with the old configuration, has it where it was.
    let mut rounds = 0;
    let asked = json!({ "kind": "move", "disk": "web", "to": host.path, "bytes_per_second": 1 << 20 });
    while rounds < 3 {
        rounds += 1;
        assert_eq!(ask(&server.control(), "POST", "/v1/jobs", &asked.to_string()).status, 201);
        wait_until("it is copied", || host.images.path("old/.web.qcow2.back").exists());
        host.write(&mut guest, &format!("-P {rounds} {rounds}M 64k"));
        guest.kill();
        let runtime = server.crash();
        let [disk, nbd] = host.keys();
        server = Server::start_in(runtime, &["--disk", &disk, "--nbd", &nbd]);
        assert_eq!(
            (detail(&server)["path"].as_str(), Path::new(&host.path).exists()),
            (Some(&*target.uri), false)
        );
        guest = Guest::new(&server);
        host.assert_reads(&server);
    }
    let unknown = server.ask_err(["move", "web", "--undo"]);
    assert!(unknown.contains("say with --to the path that the disk had before"), "{unknown}");
    let planned = server.ask_ok(["move", "web", "--to", &host.path, "--dry-run"]);
    assert!(planned.contains("1 file") && planned.contains(&host.path), "{planned}");
    let said = server.ask_ok(["move", "web", "--to", &host.path]);
    assert!(said.contains("the flat copy is left as it is"), "{said}");
    drop(target);
    host.write(&mut guest, "-P 3 8M 1M");
    host.assert_reads(&server);
    wait_until("the states of the moves are gone", || detail(&server)["moving"].is_null());
    let listed = server.ask_ok(["snapshot", "list", &host.path]);
    assert!(listed.contains("mon") && !listed.contains("move-"), "{listed}");
    guest.end();
    assert!(server.stop().success());
    assert_clean(host.path.as_ref());
    tool_ok("qemu-img", ["compare", &host.path, &host.model]);
}

#[test]
fn a_disk_that_no_server_serves_becomes_a_raw_file_and_an_image_again() {
    let host = Host::new();
    let to = host.images.name("new/web.raw");
    let said = run_ok(["move", &host.path, "--to", &to]);
    assert!(said.contains("moved to"), "{said}");
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &to, &host.model]);
    for file in [&to, &host.model] {
        let format = if file == &to { "raw" } else { "qcow2" };
        tool_ok("qemu-io", ["-f", format, "-c", "write -P 5 3M 64k", file]);
    }
    let said = run_ok(["move", &host.path, "--undo"]);
    assert!(said.contains(&format!("moved to {}: 64 KiB copied", host.path)), "{said}");
    tool_ok("qemu-img", ["compare", &host.path, &host.model]);
    assert_clean(host.path.as_ref());
    let listed = run_ok(["snapshot", "list", &host.path]);
    assert!(listed.contains("mon") && !listed.contains("move-"), "{listed}");
    run_ok(["move", &host.path, "--to", &host.images.name("new/again.raw")]);
    let refused = run_err(1, ["drain", &host.images.name("new"), "--to", &to]);
    assert!(refused.contains("disks are drained to a directory"), "{refused}");
}

/// The lowest rate.
const LOW: u64 = 64 << 10;

/// Waits until so many moves have written something. Together they have kept to [`LOW`] since `began`, with a wide margin, and none has ended.
fn assert_keep_to_low(server: &Server, count: usize, began: Instant) {
    wait_until("all moves write", || {
        let listed = ask(&server.control(), "GET", "/v1/jobs", "").json();
        let moves: Vec<&Value> =
            listed["jobs"].as_array().unwrap().iter().filter(|job| job["kind"] == "move").collect();
        assert!(moves.iter().all(|job| job["state"] == "running"), "{listed}");
        let bytes = moves.iter().map(|job| job["bytes"].as_u64().unwrap());
        let (all, allowed) = (bytes.clone().sum::<u64>(), began.elapsed().as_secs() * LOW + 8 * LOW);
        assert!(all <= allowed, "{all} of {allowed} bytes: {listed}");
        moves.len() == count && bytes.clone().all(|bytes| bytes > LOW)
    });
}

fn begin_move(server: &Server, disk: &str, to: &str) {
    let asked = json!({ "kind": "move", "disk": disk, "to": to }).to_string();
    assert_eq!(ask(&server.control(), "POST", "/v1/jobs", &asked).status, 201);
}

#[test]
fn all_moves_of_a_server_share_its_rate_which_is_lifted_while_they_run() {
    let host = Host::new();
    let other = host.images.name("old/log.qcow2");
    fs::copy(&host.model, &other).unwrap();
    let [disk, nbd] = host.keys();
    let log = format!("path={other}");
    let server = Server::start(&["--disk", &disk, "--disk", &log, "--nbd", &nbd, "--move-rate", "64K"]);
    assert!(server.ask_ok(["job", "move-rate"]).contains("64 KiB a second"));
    let began = Instant::now();
    let raw = host.images.name("new/log.raw");
    begin_move(&server, "web", &host.new_dir());
    begin_move(&server, "log", &raw);
    assert_keep_to_low(&server, 2, began);
    assert!(server.ask_ok(["job", "move-rate", "none"]).contains("without limit"));
    let is_moved = |name: &str| {
        ask(&server.control(), "GET", &format!("/v1/disks/{name}"), "").json()["moving"]["phase"] == "moved"
    };
    wait_until("both have moved", || is_moved("web") && is_moved("log"));
    host.assert_reads(&server);
    assert!(server.stop().success());
    host.assert_moved();
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &raw, &host.model]);
}

#[test]
fn a_move_keeps_to_the_rate_after_the_switch_and_after_a_restart() {
    let host = Host::new();
    // Without a history there is nothing to copy before the switch.
    fs::copy(&host.model, &host.path).unwrap();
    let [disk, nbd] = host.keys();
    let args = ["--disk", &disk, "--nbd", &nbd, "--move-rate", "64K"];
    let server = Server::start(&args);
    let began = Instant::now();
    begin_move(&server, "web", &host.new_dir());
    assert_keep_to_low(&server, 1, began);
    assert_eq!(detail(&server)["moving"]["phase"], "rest");
    let runtime = server.crash();
    let began = Instant::now();
    let server = Server::start_in(runtime, &args);
    assert_keep_to_low(&server, 1, began);
    assert_eq!(detail(&server)["moving"]["phase"], "rest");
    server.ask_ok(["job", "move-rate", "none"]);
    wait_until("it has moved", || detail(&server)["moving"]["phase"] == "moved");
    host.assert_reads(&server);
    assert!(server.stop().success());
    tool_ok("qemu-img", ["compare", &host.to(), &host.model]);
}
