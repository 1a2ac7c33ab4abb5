//! Snapshots of memory of guests on tiered disks: complete when the disks' states are published, and not before.

use std::fs;

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::vault::Repositories;
use crate::support::{Images, run_ok, stderr, tool_ok, vmstrata, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;
use vmstrata_memory::vault::DiskState;

/// A disk on a NAS, and the vault of a guest's memory.
struct World {
    images: Images,
    repositories: Repositories,
    path: String,
}

impl World {
    fn new() -> Self {
        let (images, repositories) = (Images::new(), Repositories::new());
        fs::create_dir(images.path("nas")).unwrap();
        let path = images.name("nas/web.qcow2");
        tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &path, "64M"]);
        Self { images, repositories, path }
    }

    /// Serves the disk on a host. It is cut when it is asked to be.
    fn serve(&self, host: &str) -> Server {
        self.serve_in(host, tempfile::tempdir().unwrap())
    }

    /// The same with the journals of a server that was killed.
    fn serve_in(&self, host: &str, runtime: TempDir) -> Server {
        let disk = format!("path={},tier={},window=600", self.path, self.images.name(host));
        Server::start_in(runtime, &["--disk", &disk, "--nbd", &format!("unix:{},rw", self.socket())])
    }

    fn socket(&self) -> String {
        self.images.name("nbd.sock")
    }

    fn write(server: &Server, command: &str) {
        tool_ok("qemu-io", ["-f", "raw", "-c", command, "-c", "flush", &server.uri("web")]);
    }

    /// The NAS goes, or comes back.
    fn set_away(&self, is_away: bool) {
        let (here, away) = (self.images.path("nas/web.qcow2.tier"), self.images.path("nas/away"));
        if is_away { fs::rename(here, away) } else { fs::rename(away, here) }.unwrap();
    }

    /// Has the disk cut, and saves memory that was taken then.
    fn take(&self, server: &Server, name: &str, number: u8) {
        let taken_ns = u64::from(number);
        let spec = json!({ "disks": ["web"], "name": name, "taken_ns": taken_ns, "publish_later": true });
        let answer = ask(&server.control(), "POST", "/v1/snapshots", &spec.to_string());
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(answer.json()["disks"][0]["layer"], format!("{}@{name}", self.path));
        let state = DiskState { tiered_ns: Some(taken_ns), ..DiskState::new(&self.path, name) };
        self.repositories.save_with(name, number, taken_ns, vec![state]);
    }

    /// `vmstrata vm COMMAND ... --vault a --vault b`
    fn vm<'a>(&self, server: Option<&Server>, words: impl IntoIterator<Item = &'a str>) -> (i32, String) {
        let mut command = vmstrata();
        command.arg("vm").args(words);
        ["a", "b"].iter().for_each(|name| _ = command.arg("--vault").arg(self.repositories.path(name)));
        let none = self.images.path("no-server");
        let output = command.env("VMSTRATA_CONTROL", server.map_or(none, Server::control)).output().unwrap();
        let said = String::from_utf8(output.stdout.clone()).unwrap() + &stderr(&output);
        (output.status.code().unwrap(), said)
    }

    /// What is listed of a snapshot: its state, and why.
    fn state(&self, server: Option<&Server>, name: &str) -> (String, String) {
        let (code, said) = self.vm(server, ["list", "--json"]);
        assert_eq!(code, 0, "{said}");
        let listed: Value = serde_json::from_str(&said).unwrap();
        let row = listed["snapshots"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
        let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
        (text("state"), text("state-why"))
    }

    fn assert_state(&self, server: Option<&Server>, name: &str, state: &str, why: &str) {
        let found = self.state(server, name);
        assert!(found.0 == state && found.1.contains(why), "{name}: {found:?}");
    }

    /// Restores with a script as QEMU, which notes that it was started, and fails; what is said, and whether it was.
    fn restore(&self, server: &Server, flags: &[&str]) -> (String, Option<String>) {
        let noted = self.images.path("noted");
        let _ = fs::remove_file(&noted);
        let script = format!("echo \"$@\" > {}; exit 3", noted.display());
        let mut args = self.repositories.args("web@mon", flags, &script);
        let option = format!("driver=nbd,export=web,server.type=unix,server.path={}", self.socket());
        args.extend(["sh".to_owned(), "-x".to_owned(), option]);
        let output = vmstrata().args(args).env("VMSTRATA_CONTROL", server.control()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        (stderr(&output), fs::read_to_string(noted).ok())
    }

    fn pins(&self) -> String {
        run_ok(["tier", "pins", &self.path])
    }
}

#[test]
fn a_snapshot_is_complete_once_its_disk_is_published_by_whichever_server() {
    let world = World::new();
    let server = world.serve("a");
    World::write(&server, "write -P 1 0 1M");
    world.set_away(true);
    world.take(&server, "mon", 1);
    World::write(&server, "write -P 2 512k 1M");
    world.assert_state(Some(&server), "mon", "incomplete", "is not published yet");
    let shown = world.vm(Some(&server), ["show", "web@mon"]).1;
    assert!(shown.contains("incomplete since 1970-01-01T00:00:00"), "{shown}");
    let verified = world.vm(Some(&server), ["verify", "web@mon"]);
    assert!(verified.0 == 2 && verified.1.contains("its disks are incomplete"), "{verified:?}");
    let (said, started) = world.restore(&server, &[]);
    assert!(said.contains("web@mon is not complete") && started.is_none(), "{said}");

    let runtime = server.crash();
    world.assert_state(None, "mon", "unknown", "no repository of a tiered disk");
    world.set_away(false);
    world.assert_state(None, "mon", "incomplete", "serve it");
    let server = world.serve_in("a", runtime);
    wait_until("it is complete", || world.state(Some(&server), "mon").0 == "complete");
    world.assert_state(None, "mon", "complete", "");
    assert!(world.pins().contains("snapshot mon"));
    assert_eq!(world.vm(None, ["verify"]).0, 0);
    let copy = world.images.name("copy.qcow2");
    run_ok(["backup", &format!("{}@mon", world.path), "-o", &copy]);
    let read = tool_ok("qemu-io", ["-c", "read -P 1 0 1M", "-c", "read -P 0 1M 63M", &copy]);
    assert!(!read.contains("failed"), "{read}");

    let (said, started) = world.restore(&server, &[]);
    assert!(said.contains("is based on another state") && started.is_none(), "{said}");
    let (said, started) = world.restore(&server, &["--clone-disks"]);
    assert!(started.is_some_and(|options| options.contains("export=web.mon.clone,")), "{said}");
    server.ask_ok(["snapshot", "revert", &world.path, "mon", "--yes"]);
    let (said, started) = world.restore(&server, &[]);
    assert!(started.is_some(), "{said}");
    World::write(&server, "write -P 3 8M 64k");
    let (said, started) = world.restore(&server, &[]);
    assert!(said.contains("written since") && started.is_none(), "{said}");

    let deleted = world.vm(Some(&server), ["delete", "web@mon", "--disks"]);
    assert!(deleted.0 == 0 && !deleted.1.contains("stays"), "{deleted:?}");
    assert!(!world.pins().contains("snapshot mon"));
    assert!(server.stop().success());
}

#[test]
fn a_snapshot_that_is_not_published_can_be_given_up_and_is_lost_when_another_host_has_the_disk() {
    let world = World::new();
    let server = world.serve("a");
    server.ask_ok(["tier", "hold", "web", "--for", "10m"]);
    for (name, number) in [("mon", 1), ("tue", 2), ("wed", 3)] {
        World::write(&server, &format!("write -P {number} {number}M 1M"));
        if number == 2 {
            // Held epochs are published when somebody waits for that.
            server.ask_ok(["tier", "sync", "web"]);
        }
        world.take(&server, name, number);
    }
    world.assert_state(Some(&server), "mon", "complete", "");
    for name in ["tue", "wed"] {
        world.assert_state(Some(&server), name, "incomplete", "held for another");
    }
    // Rules see what can be restored.
    let plan = world.vm(Some(&server), ["prune", "web", "--keep", "last=1", "--dry-run"]);
    assert!(plan.1.contains("0 snapshots to delete, 1 to keep"), "{plan:?}");
    assert_eq!(world.vm(Some(&server), ["delete", "web@tue", "--disks"]).0, 0);
    run_ok(["tier", "takeover", &world.path, "--tier", &world.images.name("b"), "--yes"]);
    server.ask_ok(["tier", "hold", "web", "--release"]);
    wait_until("it is lost", || world.state(Some(&server), "wed").0 == "lost");
    world.assert_state(Some(&server), "wed", "lost", "never published");
    world.assert_state(Some(&server), "mon", "complete", "");
    assert!(world.vm(Some(&server), ["list"]).1.contains("web@wed: lost since"));
    assert_eq!(world.vm(Some(&server), ["delete", "web@wed", "--disks"]).0, 0);
    let pins = world.pins();
    assert!(pins.contains("snapshot mon") && !pins.contains("snapshot tue"), "{pins}");
}

#[test]
fn disks_of_a_group_are_kept_and_let_go_of_together() {
    let world = World::new();
    let paths = [world.path.clone(), world.images.name("nas/data.qcow2")];
    tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &paths[1], "64M"]);
    let tier = world.images.name("a");
    let disks = paths.each_ref().map(|path| format!("path={path},tier={tier},window=600,group=guest"));
    let nbd = format!("unix:{},rw", world.socket());
    let server = Server::start(&["--disk", &disks[0], "--disk", &disks[1], "--nbd", &nbd]);
    World::write(&server, "write -P 1 0 1M");
    let spec = json!({ "disks": ["web", "data"], "name": "mon", "taken_ns": 1, "publish_later": true });
    let answer = ask(&server.control(), "POST", "/v1/snapshots", &spec.to_string());
    assert_eq!(answer.status, 201, "{answer:?}");
    let state = |path: &String| DiskState { tiered_ns: Some(1), ..DiskState::new(path, "mon") };
    world.repositories.save_with("mon", 1, 1, paths.iter().map(state).collect());
    wait_until("it is complete", || world.state(Some(&server), "mon").0 == "complete");
    assert_eq!(world.pins().matches("snapshot mon").count(), 1);
    let deleted = world.vm(Some(&server), ["delete", "web@mon", "--disks"]);
    assert!(deleted.0 == 0 && !deleted.1.contains("is left"), "{deleted:?}");
    assert!(!world.pins().contains("snapshot mon"));
    assert!(server.stop().success());
}
