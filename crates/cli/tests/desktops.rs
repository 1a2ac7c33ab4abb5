//! Desktops that are tiered disks: clones of a base, whose layers they share.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::http::ask;
use crate::support::killed::{calls_of_thread_with, killing, logging, some_of};
use crate::support::nas::{Nas, begin_slow_rebase, is_as, publish, write_until};
use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool, tool_ok, wait_until};
use serde_json::{Value, json};

/// What the base's second version has and the first has not.
const PATCH: [&str; 2] = ["write -P 90 1M 2M", "write -P 91 30M 4M"];
/// What a guest writes: the patch, and something of its own.
const GUEST: [&str; 3] = ["write -P 90 1M 2M", "write -P 91 30M 4M", "write -P 5 50M 300k"];
/// Of the calls that a thread makes to write and flush, about so many are those at which it is killed.
const KILLS: usize = 4;

/// A desktop whose guest has written, which is not published, and its base's second version.
struct Desk {
    nas: Nas,
    path: String,
    /// What it holds.
    model: String,
    /// The version.
    onto: String,
}

impl Desk {
    fn new() -> Self {
        let nas = Nas::new();
        publish(&nas.images, "v2", &PATCH);
        let [path, base, model] =
            ["nas/desk0.qcow2", "nas/golden.qcow2", "desk.qcow2"].map(|name| nas.images.name(name));
        let desk = Self { nas, path, model, onto: format!("{base}@v2") };
        let server = desk.serve(600);
        desk.nas.assert_as_base(&server, "desk0");
        for write in GUEST {
            tool_ok("qemu-io", ["-f", "raw", "-c", write, "-c", "flush", &server.uri("desk0")]);
        }
        tool_ok("qemu-img", ["convert", "-f", "raw", "-O", "qcow2", &server.uri("desk0"), &desk.model]);
        assert!(server.stop().success());
        assert!(desk.own_bytes() < 1 << 20, "what the guest wrote is on the host");
        desk
    }

    fn images(&self) -> &Images {
        &self.nas.images
    }

    fn args(&self, window: u32) -> [String; 4] {
        let [dir, tier, socket] = ["nas", "tier", "desk.sock"].map(|name| self.images().name(name));
        let disk = format!("path={},tier={tier},window={window},backing={dir}", self.path);
        ["--disk".to_owned(), disk, "--nbd".to_owned(), format!("unix:{socket},rw")]
    }

    fn serve(&self, window: u32) -> Server {
        Server::start(&self.args(window).each_ref().map(String::as_str))
    }

    fn repository(&self) -> PathBuf {
        self.images().path("nas/desk0.qcow2.tier")
    }

    /// Bytes of files in the desktop's repository that the base's has not.
    fn own_bytes(&self) -> u64 {
        let files = fs::read_dir(self.repository()).unwrap().map(Result::unwrap);
        let about = files.map(|file| file.metadata().unwrap());
        about.filter(|about| about.is_file() && about.nlink() == 1).map(|about| about.len()).sum()
    }

    /// How many pins there are for hosts' copies of the desktop.
    fn pins(&self) -> usize {
        let pins = run_json(["tier", "pins", &self.path, "--json"]);
        pins.as_array().unwrap().iter().filter(|pin| pin["purpose"].get("copy").is_some()).count()
    }

    /// The newest layer of the second version, by its file name.
    fn v2_layer(&self) -> String {
        let listed = run_json(["snapshot", "list", &self.images().name("nas/golden.qcow2"), "--json"]);
        let states = listed["snapshots"].as_array().unwrap();
        let v2 = states.iter().find(|state| state["name"] == "v2").expect("it was published");
        v2["layer"].as_str().unwrap().rsplit('/').next().unwrap().to_owned()
    }

    /// Whether its path leads to layers of the second version.
    fn stands_on_v2(&self) -> bool {
        tool_ok("qemu-img", ["info", "-U", "--backing-chain", &self.path]).contains(&self.v2_layer())
    }

    /// Publishes the rest. So says another host.
    fn end(&self, server: Server) {
        is_as(&server, &self.model);
        server.ask_ok(["tier", "sync", "desk0"]);
        tool_ok("qemu-img", ["compare", "-U", &self.path, &self.model]);
        let layers = fs::read_dir(self.repository()).unwrap().map(|entry| entry.unwrap().path());
        let layers = layers.filter(|layer| layer.extension().is_some_and(|suffix| suffix == "qcow2"));
        layers.for_each(|layer| assert_clean(&layer));
        wait_until("one pin is left", || self.pins() == 1);
        assert!(server.stop().success());
        self.assert_taken_over("nas", &[&self.model]);
    }

    /// Has another host take the desktop over that lies in a directory: it reads as one of the models.
    fn assert_taken_over(&self, dir: &str, models: &[&str]) {
        let [path, tier, socket] =
            [&*format!("{dir}/desk0.qcow2"), "other", "other.sock"].map(|name| self.images().name(name));
        run_ok(["tier", "takeover", &path, "--tier", &tier, "--yes"]);
        let (disk, nbd) = (format!("path={path},tier={tier}"), format!("unix:{socket}"));
        let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
        let uri = server.uri("desk0");
        let is_as = |model: &&&str| {
            tool("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &uri, model]).status.success()
        };
        assert!(models.iter().any(|model| is_as(&model)), "{dir}");
        assert!(server.stop().success());
        fs::remove_dir_all(tier).unwrap();
    }
}

fn job(server: &Server, path: &str) -> Value {
    ask(&server.control(), "GET", path, "").json()
}

fn change(server: &Server, path: &str, what: &Value) {
    ask(&server.control(), "POST", path, &what.to_string());
}

fn epoch(server: &Server) -> u64 {
    ask(&server.control(), "GET", "/v1/disks/desk0", "").json()["tier"]["epoch"].as_u64().unwrap()
}

#[test]
fn a_tiered_desktop_stands_on_a_newer_base_and_ships_what_differs() {
    let desk = Desk::new();
    let refused = run_err(1, ["rebase", &desk.path, "--onto", &desk.onto]);
    assert!(refused.contains("--tier"), "{refused}");
    let tier = desk.images().name("tier");
    let rebase = ["rebase", &desk.path, "--onto", &desk.onto, "--tier", &tier];
    let foreseen = run_json(rebase.into_iter().chain(["--dry-run", "--json"]));
    let stored = foreseen["stored_bytes"].as_u64().unwrap();
    assert!((300 << 10..512 << 10).contains(&stored), "{foreseen}");
    run_ok(rebase);
    tool_ok("qemu-img", ["compare", &desk.path, &desk.model]);
    // The patch alone has twice as much.
    assert!(desk.own_bytes() < 3 << 20, "{} bytes", desk.own_bytes());
    desk.end(desk.serve(600));
}

/// What is not published is shipped as far as the version has it not; what is published meanwhile lies above.
#[test]
fn a_tiered_desktop_in_use_stands_on_a_newer_base_while_its_guest_writes() {
    for holds in [true, false] {
        let desk = Desk::new();
        let server = desk.serve(if holds { 600 } else { 1 });
        if holds {
            server.ask_ok(["tier", "hold", "desk0", "--for", "30m"]);
        }
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let guest = scope.spawn(|| write_until(&stop, &server, &desk.model));
            if holds {
                let asked = ["rebase", &desk.path, "--onto", &desk.onto];
                let foreseen = server.ask_ok(asked.into_iter().chain(["--dry-run", "--json"]));
                let foreseen: Value = serde_json::from_str(&foreseen).unwrap();
                let stored = foreseen["stored_bytes"].as_u64().unwrap();
                assert!((300 << 10..2 << 20).contains(&stored), "{foreseen}");
                assert!(foreseen["allocated_bytes_before"].as_u64().unwrap() > 0, "{foreseen}");
                assert!(!desk.stands_on_v2());
                let said = server.ask_ok(["rebase", "desk0", "--onto", &desk.onto]);
                assert!(said.contains("stands on") && said.contains("before"), "{said}");
            } else {
                let before = epoch(&server);
                let path = begin_slow_rebase(&server, &desk.onto);
                wait_until("epochs are published meanwhile", || epoch(&server) > before + 2);
                change(&server, &path, &json!({ "action": "limit", "bytes_per_second": null }));
                wait_until("it is done", || job(&server, &path)["state"] == "done");
            }
            stop.store(true, Ordering::Relaxed);
            assert!(guest.join().unwrap() > 0);
        });
        assert!(desk.stands_on_v2());
        if holds {
            assert!(desk.own_bytes() < 4 << 20, "{} bytes", desk.own_bytes());
        }
        // Again, there is nothing to gain.
        server.ask_ok(["rebase", "desk0", "--onto", &desk.onto]);
        desk.end(server);
    }
}

#[test]
fn a_rebase_of_a_tiered_desktop_that_does_not_come_to_its_end_can_be_made_again() {
    let desk = Desk::new();
    let server = desk.serve(600);
    server.ask_ok(["tier", "hold", "desk0", "--for", "30m"]);
    for (ends, state) in [("cancelled", "cancelled"), ("without the NAS", "failed")] {
        let path = begin_slow_rebase(&server, &desk.onto);
        let refused = server.ask_err(["rebase", "desk0", "--onto", &desk.onto]);
        assert!(refused.contains("rebase"), "{refused}");
        if state == "cancelled" {
            change(&server, &path, &json!({ "action": "cancel" }));
            wait_until(ends, || job(&server, &path)["state"] == state);
            wait_until("one pin is left", || desk.pins() == 1);
        } else {
            let away = desk.images().path("nas/away");
            fs::rename(desk.repository(), &away).unwrap();
            change(&server, &path, &json!({ "action": "limit", "bytes_per_second": null }));
            wait_until(ends, || job(&server, &path)["state"] == state);
            fs::rename(&away, desk.repository()).unwrap();
        }
        is_as(&server, &desk.model);
        assert!(!desk.stands_on_v2());
    }
    server.ask_ok(["rebase", "desk0", "--onto", &desk.onto]);
    assert!(desk.stands_on_v2());
    desk.end(server);
}

#[test]
fn what_a_tiered_disk_cannot_be_rebased_onto_is_refused_and_it_is_published_on() {
    let desk = Desk::new();
    let images = desk.images();
    for name in ["a", "b"] {
        tool_ok(
            "qemu-img",
            ["create", "-q", "-f", "qcow2", &images.name(&format!("nas/{name}.qcow2")), "8M"],
        );
    }
    let grouped = ["a", "b"].map(|name| {
        let [path, tier] = [&*format!("nas/{name}.qcow2"), "tier"].map(|name| images.name(name));
        format!("path={path},tier={tier},group=guest")
    });
    let own = desk.args(600);
    let args = own.iter().map(String::as_str).chain(["--disk", &grouped[0], "--disk", &grouped[1]]);
    let server = Server::start(&args.collect::<Vec<_>>());
    server.ask_ok(["snapshot", "create", "a", "b", "--name", "mon"]);
    let base = images.name("nas/golden.qcow2");
    for (disk, onto, why) in [
        ("desk0", format!("{base}@none"), "no snapshot 'none'"),
        ("desk0", base.clone(), "BASE@VERSION"),
        ("desk0", "s3://vms/golden@v2".to_owned(), "a base in a directory alone"),
        ("desk0", format!("{}@mon", images.name("nas/a.qcow2")), "no layer in common"),
        ("a", format!("{base}@v2"), "a disk of a group keeps its base"),
    ] {
        let refused = server.ask_err(["rebase", disk, "--onto", &onto]);
        assert!(refused.contains(why), "{disk} onto {onto}: {refused}");
    }
    desk.end(server);
}

/// Whatever is killed when: the repository has a whole state, and the next server goes on with all that was written.
#[test]
fn a_server_killed_anywhere_in_a_rebase_of_a_tiered_desktop_leaves_whole_states() {
    let desk = Desk::new();
    let [nas, tier, kept] = ["nas", "tier", "kept"].map(|name| desk.images().name(name));
    let copy = |from: &[&str], to: &str| {
        tool_ok("cp", ["-a"].into_iter().chain(from.iter().copied()).chain([to]));
    };
    fs::create_dir(&kept).unwrap();
    copy(&[&nas, &tier], &kept);
    let restore = || {
        tool_ok("rm", ["-rf", &nas, &tier]);
        copy(&[&format!("{kept}/nas"), &format!("{kept}/tier")], &desk.images().name(""));
    };
    let args = desk.args(600);
    let args = args.each_ref().map(String::as_str);
    let rebase = |server: &Server| server.ask(["rebase", "desk0", "--onto", &desk.onto]).status.success();
    let hold = |server: &Server| server.ask(["tier", "hold", "desk0", "--for", "30m"]);
    let log = desk.images().name("log");
    let server = Server::start_traced(&logging(&log), &args);
    hold(&server);
    assert!(rebase(&server));
    assert!(server.stop().success());
    let log = fs::read_to_string(&log).unwrap();
    // The job has a layer of the version, the engine what this host notes of what it published.
    let threads = [desk.v2_layer(), "copy.json".to_owned()].map(|text| calls_of_thread_with(&log, &text));
    let mut ended = Vec::new();
    for call in threads.into_iter().flat_map(|calls| some_of(calls, KILLS)) {
        restore();
        let server = Server::start_traced(&killing(&call), &args);
        hold(&server);
        if rebase(&server) {
            // Threads share the work otherwise than in the run that was looked at. It may be killed at its end.
            let _ = server.stop();
            continue;
        }
        let runtime = server.wait_killed();
        let models = [&*desk.nas.model, &desk.model];
        let is_published =
            |model: &&str| tool("qemu-img", ["compare", "-U", &desk.path, model]).status.success();
        assert!(models.iter().any(is_published), "killed at {call:?}");
        copy(&[&nas], &desk.images().name("nas2"));
        desk.assert_taken_over("nas2", &models);
        tool_ok("rm", ["-rf", &desk.images().name("nas2")]);
        let server = Server::start_in(runtime, &args);
        ended.push(desk.stands_on_v2());
        is_as(&server, &desk.model);
        desk.end(server);
    }
    assert!(ended.len() >= 2 * KILLS, "{ended:?}");
    assert!([true, false].iter().all(|onto| ended.contains(onto)), "{ended:?}");
}
