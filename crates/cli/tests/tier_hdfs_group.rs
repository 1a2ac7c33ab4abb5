//! Disks of a guest that are published together in HDFS, and snapshots of its memory, beside a NameNode and a DataNode.
#![cfg(feature = "hdfs")]

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::hdfs::Cluster;
use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::vault::Repositories;
use crate::support::{
    Images, assert_clean, run_err, run_json, run_ok, stderr, tool, tool_ok, vmstrata, wait_until,
};
use serde_json::Value;

/// Two disks of a guest in HDFS, hosts each with a directory of its own, and the vault of the guest's memory.
struct Pair {
    images: Images,
    vault: Repositories,
    /// Of their repository.
    address: String,
}

impl Pair {
    const NAMES: [&str; 2] = ["log", "data"];

    fn new(cluster: &mut Cluster) -> Self {
        let address = cluster.repository("/vms/guest");
        let pair = Self { images: Images::new(), vault: Repositories::new(), address };
        for image in Self::NAMES.iter().flat_map(|name| [pair.image(name), pair.model(name)]) {
            tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &image, "64M"]);
        }
        pair
    }

    fn image(&self, name: &str) -> String {
        self.images.name(&format!("{name}.qcow2"))
    }

    /// What the disk should hold, written by a stock tool.
    fn model(&self, name: &str) -> String {
        self.images.name(&format!("{name}-model.qcow2"))
    }

    fn disk(&self, host: &str, name: &str) -> String {
        let (image, tier) = (self.image(name), self.images.name(host));
        format!("path={image},tier={tier},repository={},group=guest,window=600", self.address)
    }

    /// The address of one of the disks.
    fn address_of(&self, name: &str) -> String {
        format!("{}#{name}.qcow2", self.address)
    }

    /// The same, as vmstrata says it.
    fn short_address_of(&self, name: &str) -> String {
        self.address_of(name).replace("?block=1M", "")
    }

    fn socket(&self, host: &str) -> String {
        self.images.name(&format!("{host}.sock"))
    }

    fn args(&self, host: &str) -> Vec<String> {
        let nbd = ["--nbd".to_owned(), format!("unix:{},rw", self.socket(host))];
        Self::NAMES.iter().flat_map(|name| ["--disk".to_owned(), self.disk(host, name)]).chain(nbd).collect()
    }

    fn serve(&self, host: &str) -> Server {
        Server::start(&self.args(host).iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The guest writes to both disks.
    fn write(server: &Server, command: &str) {
        for name in Self::NAMES {
            tool_ok("qemu-io", ["-f", "raw", "-c", command, "-c", "flush", &server.uri(name)]);
        }
    }

    /// So do the models.
    fn write_all(&self, server: &Server, command: &str) {
        Self::write(server, command);
        for name in Self::NAMES {
            tool_ok("qemu-io", ["-f", "qcow2", "-c", command, &self.model(name)]);
        }
    }

    fn assert_served(&self, server: &Server) {
        for name in Self::NAMES {
            let (served, model) = (server.uri(name), self.model(name));
            tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &served, &model]);
        }
    }

    /// Backups of the state `at` of both disks are sound, and hold what the models with this suffix do.
    fn assert_published(&self, at: &str, suffix: &str) {
        for name in Self::NAMES {
            let (state, backup) =
                (format!("{}{at}", self.address_of(name)), self.images.path("backup.qcow2"));
            run_ok(["backup", &state, "-o", backup.to_str().unwrap(), "--force"]);
            assert_clean(&backup);
            let model = format!("{}{suffix}", self.model(name));
            tool_ok("qemu-img", ["compare", backup.to_str().unwrap(), &model]);
        }
    }

    /// `vmstrata vm WORDS ... --vault a --vault b`: its exit code, and what it says.
    fn vm<'a>(&self, server: Option<&Server>, words: impl IntoIterator<Item = &'a str>) -> (i32, String) {
        let mut command = vmstrata();
        command.arg("vm").args(words);
        ["a", "b"].iter().for_each(|name| _ = command.arg("--vault").arg(self.vault.path(name)));
        let none = self.images.path("no-server");
        let output = command.env("VMSTRATA_CONTROL", server.map_or(none, Server::control)).output().unwrap();
        let said = String::from_utf8(output.stdout.clone()).unwrap() + &stderr(&output);
        (output.status.code().unwrap(), said)
    }

    /// What is listed of the snapshot of memory: its state, and why.
    fn memory_state(&self, server: Option<&Server>) -> (String, String) {
        let (code, said) = self.vm(server, ["list", "--json"]);
        assert_eq!(code, 0, "{said}");
        let listed: Value = serde_json::from_str(&said).unwrap();
        let text = |key: &str| listed["snapshots"][0][key].as_str().unwrap_or_default().to_owned();
        (text("state"), text("state-why"))
    }

    /// Restores with a script as QEMU, which notes that it was started, and fails; what is said, and whether it was.
    fn restore(&self, server: &Server, host: &str, flags: &[&str]) -> (String, bool) {
        let noted = self.images.path("noted");
        let _ = fs::remove_file(&noted);
        let script = format!("echo \"$@\" > {}; exit 3", noted.display());
        let mut args = self.vault.args("web@tue", flags, &script);
        args.push("sh".to_owned());
        for name in Self::NAMES {
            let option =
                format!("driver=nbd,export={name},server.type=unix,server.path={}", self.socket(host));
            args.extend(["-x".to_owned(), option]);
        }
        let output = vmstrata().args(args).env("VMSTRATA_CONTROL", server.control()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        (stderr(&output), noted.exists())
    }
}

/// A machine with both disks, whose firmware finds nothing to start; killed when dropped.
struct Machine {
    qemu: Child,
    monitor: PathBuf,
}

impl Machine {
    fn start(pair: &Pair) -> Self {
        let (memory, monitor) = (pair.vault.path("memory-of-qemu"), pair.images.path("qmp"));
        let object = format!("memory-backend-file,id=mem,size=64M,share=on,mem-path={}", memory.display());
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "64", "-object", &object]);
        command.args(["-machine", "q35,memory-backend=mem"]);
        for name in Pair::NAMES {
            let at = format!("server.type=unix,server.path={}", pair.socket("b"));
            command.args(["-blockdev", &format!("driver=nbd,node-name={name},export={name},{at}")]);
            command.args(["-device", &format!("virtio-blk-pci,drive={name}")]);
        }
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        let machine = Self { qemu: command.stdin(Stdio::null()).spawn().unwrap(), monitor };
        wait_until("the monitor", || machine.monitor.exists());
        machine
    }

    /// The words that take a snapshot of it.
    fn snapshot(&self, name: &str) -> Vec<String> {
        let monitor = self.monitor.to_str().unwrap();
        let words = ["snapshot", "web", "--name", name, "--qmp", monitor, "--copies", "2", "--one-device"];
        words.map(str::to_owned).into()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn tier(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/disks/data", "").json()["tier"].clone()
}

#[test]
fn disks_of_a_group_are_published_in_hdfs_together() {
    let mut cluster = Cluster::start(1);
    let pair = Pair::new(&mut cluster);
    let first = a_killed_server_goes_on_with_both(&pair);
    one_of_them_is_named_behind_the_address(&pair, &first);
    let second = another_host_takes_both_over(&pair, first);
    memory_is_complete_once_both_are_published(&pair, &second, &mut cluster);
    they_come_and_go_together(&pair, second);
}

fn a_killed_server_goes_on_with_both(pair: &Pair) -> Server {
    let first = pair.serve("a");
    pair.write_all(&first, "write -P 1 0 1M");
    let said = first.ask_ok(["tier", "sync", "data"]);
    assert!(said.contains("epoch 2") && said.contains("all is published"), "{said}");
    let said = first.ask_ok(["tier", "status", &pair.address]);
    assert!(said.contains("group guest") && said.contains("/vms/guest (4 layers)"), "{said}");
    pair.assert_published("", "");
    pair.write_all(&first, "write -P 2 4M 1M");
    Pair::NAMES.iter().for_each(|name| fs::remove_file(pair.image(name)).unwrap());
    let args = pair.args("a");
    let first = Server::start_in(first.crash(), &args.iter().map(String::as_str).collect::<Vec<_>>());
    pair.assert_served(&first);
    first.ask_ok(["tier", "sync", &pair.address]);
    pair.assert_published("", "");
    first
}

fn one_of_them_is_named_behind_the_address(pair: &Pair, server: &Server) {
    server.ask_ok(["snapshot", "create", &pair.address, "--name", "mon"]);
    for name in Pair::NAMES {
        fs::copy(pair.model(name), format!("{}.mon", pair.model(name))).unwrap();
    }
    pair.write_all(server, "write -P 3 8M 1M");
    server.ask_ok(["tier", "sync", "log"]);
    for name in Pair::NAMES {
        let changed = run_ok(["diff", &format!("{}@mon", pair.address_of(name)), &pair.address_of(name)]);
        assert!(changed.contains("1.0 MiB") || changed.contains("1 MiB"), "{changed}");
    }
    // As its server calls it.
    let changed = server.ask_ok(["diff", "data@mon", "data"]);
    assert!(changed.contains("1.0 MiB") || changed.contains("1 MiB"), "{changed}");
    let listed = run_json(["snapshot", "list", &pair.address, "--json"]);
    let row = &listed["snapshots"][0];
    assert_eq!((&row["name"], &row["layer"]), (&"mon".into(), &Value::Null));
    assert_eq!(row["virtual-size"].as_u64(), Some(128 << 20));
    pair.assert_published("@mon", ".mon");

    let names = Pair::NAMES.map(|name| pair.short_address_of(name));
    let other = format!("{}#other.qcow2", pair.address);
    let of_none = format!("{}@mon", pair.address);
    for state in [&pair.address, &of_none, &other] {
        let told = run_err(1, ["backup", state, "-o", &pair.images.name("none.qcow2")]);
        assert!(names.iter().all(|name| told.contains(name)), "{told}");
    }
    let told = server.ask_err(["resize", &pair.address, "128M"]);
    assert!(told.contains("name one of its disks"), "{told}");
    let told = server.ask_err(["snapshot", "show", &other, "mon"]);
    assert!(told.contains("no disk other.qcow2"), "{told}");
}

fn another_host_takes_both_over(pair: &Pair, first: Server) -> Server {
    Pair::write(&first, "write -P 9 0 1M");
    let tier_dir = pair.images.name("b");
    let told = run_err(1, ["tier", "takeover", &pair.address, "--tier", &tier_dir]);
    assert!(told.contains(&pair.short_address_of("log")) && told.contains("--yes"), "{told}");
    let said = run_ok(["tier", "takeover", &pair.address, "--tier", &tier_dir, "--yes"]);
    let serve = format!("--disk path=log.qcow2,tier={tier_dir},repository={},group=guest", pair.address);
    assert!(said.contains(&serve) && said.contains("path=data.qcow2,"), "{said}");
    let told = first.ask_err(["tier", "sync", "data"]);
    assert!(told.contains("publishes here since generation 3"), "{told}");
    for name in Pair::NAMES {
        let write = tool("qemu-io", ["-f", "raw", "-c", "write -P 2 0 64k", &first.uri(name)]);
        assert!(String::from_utf8_lossy(&write.stdout).contains("write failed"), "{write:?}");
    }
    drop(first.crash());
    let second = pair.serve("b");
    pair.assert_served(&second);
    second
}

fn memory_is_complete_once_both_are_published(pair: &Pair, server: &Server, cluster: &mut Cluster) {
    Pair::write(server, "write -P 4 0 1M");
    cluster.ask("safe-mode on");
    let machine = Machine::start(pair);
    let (code, said) = pair.vm(Some(server), machine.snapshot("tue").iter().map(String::as_str));
    assert!(code == 0 && said.contains("2 disks taken") && said.contains("incomplete"), "{said}");
    drop(machine);
    let shown = pair.vm(Some(server), ["show", "web@tue"]).1;
    assert!(Pair::NAMES.iter().all(|name| shown.contains(&pair.short_address_of(name))), "{shown}");
    Pair::write(server, "write -P 5 512k 1M");
    let (state, why) = pair.memory_state(Some(server));
    assert!(state == "incomplete" && why.contains("is not published yet"), "{state}: {why}");
    let (said, started) = pair.restore(server, "b", &[]);
    assert!(said.contains("web@tue is not complete") && !started, "{said}");
    cluster.ask("safe-mode off");
    wait_until("it is complete", || pair.memory_state(Some(server)).0 == "complete");
    assert_eq!(pair.memory_state(None).0, "complete");
    assert_eq!(pair.vm(None, ["verify"]).0, 0);
    assert_eq!(run_ok(["tier", "pins", &pair.address]).matches("snapshot tue").count(), 1);

    let (said, started) = pair.restore(server, "b", &["--clone-disks"]);
    assert!(said.contains("only where the repository is a directory") && !started, "{said}");
    let (said, started) = pair.restore(server, "b", &[]);
    assert!(said.contains("is based on another state") && !started, "{said}");
    let revert = format!("snapshot revert '{}' tue --yes", pair.short_address_of("log"));
    assert!(said.contains(&revert) && !said.contains("--clone-disks"), "{said}");
    let said = server.ask_ok(["snapshot", "revert", &pair.short_address_of("log"), "tue", "--yes"]);
    assert!(said.contains(".branch-"), "{said}");
    let (said, started) = pair.restore(server, "b", &[]);
    assert!(started, "{said}");
    pair.write_all(server, "write -P 4 0 1M");
    pair.assert_served(server);

    let deleted = pair.vm(Some(server), ["delete", "web@tue", "--disks"]);
    assert!(deleted.0 == 0 && !deleted.1.contains("is left"), "{deleted:?}");
    assert!(!run_ok(["tier", "pins", &pair.address]).contains("snapshot tue"));
}

fn they_come_and_go_together(pair: &Pair, server: Server) {
    server.ask_ok(["tier", "hold", "log", "--for", "10m"]);
    assert!(tier(&server)["held_seconds"].is_u64());
    pair.write_all(&server, "write -P 6 12M 1M");
    let told = server.ask_err(["disk", "remove", &pair.address]);
    assert!(told.contains("name one of its disks: log, data"), "{told}");
    server.ask_ok(["resize", &pair.address_of("data"), "96M"]);
    let size = |name: &str| {
        ask(&server.control(), "GET", &format!("/v1/disks/{name}"), "").json()["size_bytes"].clone()
    };
    assert_eq!(Pair::NAMES.map(size), [64 << 20, 96 << 20]);
    server.ask_ok(["disk", "remove", &pair.address_of("data")]);
    assert!(!server.ask_ok(["status"]).contains("log.qcow2"));
    pair.assert_published("", "");
    run_ok(["snapshot", "delete", &pair.address, "mon"]);
    assert!(run_ok(["snapshot", "list", &pair.address_of("log")]).contains("no snapshots"));

    let alone = pair.disk("b", "log").replace(",group=guest", "");
    let told = server.ask_err(["disk", "add", &alone]);
    assert!(told.contains("serve them together"), "{told}");
    server.ask_ok(["disk", "add", &pair.disk("b", "log")]);
    assert!(server.ask_ok(["status"]).contains("data.qcow2 is published with it"));
    server.ask_ok(["disk", "add", &pair.disk("b", "data")]);
    for name in Pair::NAMES {
        let uri = format!("nbd+unix:///{name}?socket={}", pair.socket("b"));
        tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &uri, &pair.model(name)]);
    }
    let branches = ["tier", "branches", &pair.address, "--tier", &pair.images.name("b"), "--json"];
    assert_eq!(run_json(branches).as_array().unwrap().len(), 1);
    assert!(server.stop().success());
}
