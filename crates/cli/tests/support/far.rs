//! A disk whose repository is no directory of this host, whichever kind it is of, and what holds of all of them.

use std::fs;
use std::sync::Arc;
use std::thread;

use super::http::ask;
use super::server::Server;
use super::{Images, assert_clean, run_err, run_json, run_ok, tool, tool_ok, wait_until};
use serde_json::Value;
use vmstrata_repo::Repository;
use vmstrata_tier::{
    Claim, DiskState, Epoch, Error, Head, OwnerId, Publisher, RepositoryAddress, newest, ship, states,
};

/// A disk whose repository is no directory, and hosts each with a directory of its own.
pub struct Far {
    pub images: Images,
    /// Of the disk's repository.
    pub address: String,
    /// What the disk should hold, written by a stock tool.
    pub model: String,
}

impl Far {
    /// With an image that becomes the first layer.
    pub fn new(address: String) -> Self {
        let images = Images::new();
        let (path, model) = (images.name("web.qcow2"), images.name("model.qcow2"));
        for image in [&path, &model] {
            tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", image, "64M"]);
            tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 9 4M 1M", image]);
        }
        Self { images, address, model }
    }

    pub fn args(&self, host: &str) -> [String; 4] {
        let (path, tier) = (self.images.name("web.qcow2"), self.images.name(host));
        let disk = format!("path={path},tier={tier},repository={},window=600", self.address);
        let nbd = format!("unix:{},rw", self.images.name(&format!("{host}.sock")));
        ["--disk".to_owned(), disk, "--nbd".to_owned(), nbd]
    }

    pub fn serve(&self, host: &str) -> Server {
        Server::start(&self.args(host).each_ref().map(String::as_str))
    }

    pub fn takeover(&self, host: &str, more: &[&str]) -> Vec<String> {
        let tier = self.images.name(host);
        let args = ["tier", "takeover", &self.address, "--tier", &tier];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    /// The guest writes, and so does the model.
    pub fn write(&self, server: &Server, command: &str) {
        tool_ok("qemu-io", ["-f", "raw", "-c", command, "-c", "flush", &server.uri("web")]);
        tool_ok("qemu-io", ["-f", "qcow2", "-c", command, &self.model]);
    }

    pub fn assert_served(&self, server: &Server) {
        tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri("web"), &self.model]);
    }

    /// A backup of the state `at` is sound, and holds what `model` does.
    pub fn assert_published(&self, at: &str, model: &str) {
        let (state, backup) = (format!("{}{at}", self.address), self.images.path("backup.qcow2"));
        run_ok(["backup", &state, "-o", backup.to_str().unwrap(), "--force"]);
        assert_clean(&backup);
        tool_ok("qemu-img", ["compare", backup.to_str().unwrap(), model]);
    }
}

pub fn tier(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/disks/web", "").json()["tier"].clone()
}

pub fn another_host_takes_it_over_after_a_kill(far: &Far) -> Server {
    let first = far.serve("a");
    far.write(&first, "write -P 1 0 1M");
    far.write(&first, "write -P 2 12345k 3k");
    let said = first.ask_ok(["tier", "sync", "web"]);
    assert!(said.contains("epoch 2") && said.contains("all is published"), "{said}");
    let said = first.ask_ok(["tier", "status", &far.address]);
    let place = far.address.split("?block").next().unwrap();
    assert!(said.contains(&format!("{place} (2 layers)")), "{said}");
    far.assert_published("", &far.model);
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 3 8M 64k", "-c", "flush", &first.uri("web")]);
    wait_until("the write is seen", || tier(&first)["unpublished_seconds"].is_u64());
    let runtime = first.crash();

    // The image is of no use any more.
    fs::remove_file(far.images.path("web.qcow2")).unwrap();
    let told = run_err(1, far.takeover("b", &[]));
    assert!(told.contains("epoch 2") && told.contains("--yes"), "{told}");
    let taken = run_json(far.takeover("b", &["--yes", "--json"]));
    assert_eq!((&taken["epoch"], &taken["generation"]), (&2.into(), &2.into()));
    let mut args = far.args("b");
    args[1] = args[1].replace("web.qcow2", "mail.qcow2");
    let refused = run_err(1, ["serve"].into_iter().chain(args.iter().map(String::as_str)));
    assert!(refused.contains("is that of the disk web.qcow2"), "{refused}");
    let second = far.serve("b");
    far.assert_served(&second);
    far.write(&second, "write -P 4 0 64k");
    second.ask_ok(["tier", "sync", "web"]);
    far.assert_published("", &far.model);

    let args = far.args("a");
    let start = ["serve", "--runtime-dir", runtime.path().to_str().unwrap()];
    let refused = run_err(1, start.into_iter().chain(args.iter().map(String::as_str)));
    let owner = tier(&second)["owner"].as_str().unwrap().to_owned();
    assert!(refused.contains(&owner) && refused.contains("vmstrata tier takeover"), "{refused}");
    second
}

pub fn its_states_are_named_read_and_gone_back_to(far: &Far, server: &Server) {
    server.ask_ok(["snapshot", "create", "web", "--name", "mon", "--label", "job=nightly"]);
    let monday = far.images.name("monday.qcow2");
    fs::copy(&far.model, &monday).unwrap();
    far.write(server, "write -P 5 512k 1M");
    server.ask_ok(["tier", "sync", "web"]);
    let listed = run_json(["snapshot", "list", &far.address, "--json"]);
    assert_eq!(
        (&listed["snapshots"][0]["name"], &listed["snapshots"][0]["epoch"]),
        (&"mon".into(), &3.into())
    );
    let state = format!("{}@mon", far.address);
    let changed = run_ok(["diff", &state, &far.address]);
    assert!(changed.contains("1.0 MiB") || changed.contains("1 MiB"), "{changed}");
    far.assert_published("@mon", &monday);
    far.assert_published("@-0s", &far.model);
    let said = server.ask_ok(["snapshot", "revert", "web", "mon", "--yes"]);
    assert!(said.contains(".branch-"), "{said}");
    fs::copy(&monday, &far.model).unwrap();
    far.write(server, "write -P 6 8M 64k");
    server.ask_ok(["tier", "sync", "web"]);
    far.assert_published("", &far.model);
    let pins = run_json(["tier", "pins", &far.address, "--json"]);
    assert!(pins.as_array().unwrap().iter().any(|pin| pin["purpose"]["snapshot"]["name"] == "mon"), "{pins}");
    run_ok(["snapshot", "delete", &state]);
    assert!(run_ok(["snapshot", "list", &far.address]).contains("no snapshots"));
    let branches = run_json(["tier", "branches", &far.address, "--tier", &far.images.name("b"), "--json"]);
    let [branch] = &branches.as_array().unwrap()[..] else { panic!("{branches}") };
    let name = branch["branch"].as_str().unwrap();
    let tier = far.images.name("b");
    run_ok(["tier", "branches", &far.address, "--tier", &tier, "--drop", name, "--yes"]);
}

pub fn clones_stand_on_a_named_state(far: &Far, server: &Server) {
    server.ask_ok(["snapshot", "create", "web", "--name", "v1"]);
    let [base, model, host] = ["v1.qcow2", "desk1-model.qcow2", "desks"].map(|name| far.images.name(name));
    fs::copy(&far.model, &base).unwrap();
    fs::copy(&far.model, &model).unwrap();
    far.write(server, "write -P 21 4M 64k");
    server.ask_ok(["tier", "sync", "web"]);

    let (mut args, nbd) = (Vec::new(), format!("unix:{},rw", far.images.name("desks.sock")));
    for desk in ["desk0", "desk1"] {
        let path = far.images.name(&format!("{desk}.qcow2"));
        run_ok(["snapshot", "clone", &format!("{}@v1", far.address), "-o", &path]);
        let disk = format!("path={path},replica={host},repository={}", far.address);
        args.extend(["--disk".to_owned(), disk]);
    }
    args.extend(["--nbd".to_owned(), nbd]);
    let serve = || Server::start(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let is_as = |server: &Server, desk: &str, model: &str| {
        tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri(desk), model]);
    };

    let desks = serve();
    is_as(&desks, "desk0", &base);
    let write = "write -P 22 4100k 12k";
    tool_ok("qemu-io", ["-f", "raw", "-c", write, "-c", "flush", &desks.uri("desk1")]);
    tool_ok("qemu-io", ["-f", "qcow2", "-c", write, &model]);
    desks.ask_ok(["snapshot", "create", "desk1", "--name", "own"]);
    desks.ask_ok(["replica", "fill", "desk0"]);
    let list: Value = serde_json::from_str(&desks.ask_ok(["replica", "list", "desk0", "--json"])).unwrap();
    for layer in list["replicas"][0]["layers"].as_array().unwrap() {
        assert_eq!(layer["kept_bytes"], layer["bytes"], "{list}");
    }
    assert!(desks.stop().success());

    let desks = serve();
    is_as(&desks, "desk0", &base);
    is_as(&desks, "desk1", &model);

    // A newer version is the same for the guest, and the disk stores what it has not.
    server.ask_ok(["snapshot", "create", "web", "--name", "v2"]);
    let (v2, desk) = (format!("{}@v2", far.address), far.images.name("desk0.qcow2"));
    let foreseen = desks.ask_ok(["rebase", "desk0", "--onto", &v2, "--dry-run", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&foreseen).unwrap()["stored_bytes"], 64 << 10);
    let said = desks.ask_ok(["rebase", "desk0", "--onto", &v2]);
    assert!(said.contains("stands on"), "{said}");
    is_as(&desks, "desk0", &base);
    let pins = run_json(["tier", "pins", &far.address, "--json"]);
    let own = |pin: &&Value| pin["purpose"]["reader"].as_str().is_some_and(|who| who.contains("desk0"));
    assert_eq!(pins.as_array().unwrap().iter().filter(own).count(), 1, "{pins}");
    assert!(desks.stop().success());
    let refused = run_err(1, ["rebase", &desk, "--onto", &v2]);
    assert!(refused.contains("serve the disk"), "{refused}");
    let desks = serve();
    is_as(&desks, "desk0", &base);
    assert!(desks.stop().success());
    let elsewhere =
        args[1].replace(&far.address, &format!("{}-other", far.address.split('?').next().unwrap()));
    let refused = run_err(1, ["serve", "--disk", &elsewhere, "--nbd", &args[5]]);
    assert!(refused.contains("web-other"), "{refused}");
}

pub fn who_serves_it_and_was_taken_over_is_fenced(far: &Far, server: Server) {
    run_ok(far.takeover("c", &["--yes"]));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 2 0 64k", &server.uri("web")]);
    let refused = server.ask_err(["tier", "sync", "web"]);
    assert!(refused.contains("publishes here since generation"), "{refused}");
    assert_eq!(tier(&server)["state"], "fenced");
    let write = tool("qemu-io", ["-f", "raw", "-c", "write -P 2 0 64k", &server.uri("web")]);
    assert!(String::from_utf8_lossy(&write.stdout).contains("write failed"), "{write:?}");
    far.assert_published("", &far.model);
    assert!(!server.stop().success(), "its image is as after a crash");
    let third = far.serve("c");
    far.assert_served(&third);
    far.write(&third, "write -P 11 28M 1M");
    third.ask_ok(["disk", "remove", "web"]);
    far.assert_published("", &far.model);
    assert!(third.stop().success());
}

pub fn what_needs_a_directory_is_refused_by_name(far: &Far) {
    let (address, tier) = (&*far.address, far.images.name("c"));
    for args in [
        &["tier", "detach", address, "--tier", &tier, "--yes"][..],
        &["map", address],
        &["info", address],
        &["check", address],
        &["backup", address, "--snapshot=tue", "-o", "tue.qcow2"],
        &["flatten", address, "--yes"],
    ] {
        let told = run_err(1, args);
        assert!(told.contains("vms/web"), "{args:?}: {told}");
    }
}

/// Publishes epochs until it is fenced; returns the heads that it published.
fn publish(repository: &Arc<dyn Repository>, claim: Claim) -> Vec<Head> {
    let mut publisher = Publisher::claim(repository.clone(), OwnerId::draw(), claim).unwrap();
    let mut heads = vec![publisher.head().clone()];
    // Ends without a take-over, too.
    for _ in 0..20 {
        let objects = vec![ship(&**repository, 0, |shipment| shipment.put(b"layer")).unwrap()];
        let disks = vec![DiskState { name: "web.qcow2".to_owned(), size: 4096, objects }];
        let number = publisher.head().epoch.number.next();
        match publisher.publish(Epoch { number, time_ns: 0, disks }) {
            Ok(()) => heads.push(publisher.head().clone()),
            Err(Error::Fenced { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    heads
}

pub fn of_racing_claims_one_publishes_at_a_time(address: &str) {
    let address = RepositoryAddress::parse(address).unwrap();
    let mut heads = publish(&address.open().unwrap(), Claim::First);
    // Each with a client of its own, as other hosts have.
    let host = || {
        let repository = address.open().unwrap();
        thread::spawn(move || (0..3).flat_map(|_| publish(&repository, Claim::TakeOver)).collect::<Vec<_>>())
    };
    let hosts: Vec<_> = (0..3).map(|_| host()).collect();
    heads.extend(hosts.into_iter().flat_map(|host| host.join().unwrap()));
    heads.sort_by_key(|head| head.number);
    for pair in heads.windows(2) {
        let [before, after] = pair else { unreachable!("windows of two") };
        assert_eq!(before.number.next(), after.number);
        let is_same = before.owner == after.owner;
        assert_eq!(is_same, before.generation == after.generation, "{before:?}, {after:?}");
        assert!(before.generation <= after.generation);
        let is_claim = before.epoch == after.epoch;
        assert!(is_claim != is_same, "{before:?}, {after:?}");
    }
    let repository = address.open().unwrap();
    assert_eq!(newest(&*repository).unwrap().as_ref(), heads.last());
    assert_eq!(states(&*repository).unwrap().len() as u64, heads.last().unwrap().epoch.number.get() + 1);
}
