//! Tiered disks as users serve them: published from one host, taken over by another, cut off from the repository.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{
    Images, assert_clean, audited, run, run_err, run_json, run_ok, tool, tool_ok, vmstrata, wait_until,
};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use vmstrata_tier::is_object_name;

/// A disk on a NAS, and hosts each with a directory of its own.
struct Nas {
    images: Images,
    path: String,
    /// What the disk should hold, written by a stock tool.
    model: String,
}

impl Nas {
    fn new() -> Self {
        let images = Images::new();
        fs::create_dir(images.path("nas")).unwrap();
        let (path, model) = (images.name("nas/web.qcow2"), images.name("model.qcow2"));
        for image in [&path, &model] {
            tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", image, "64M"]);
        }
        Self { images, path, model }
    }

    fn args(&self, host: &str, window: u32) -> [String; 4] {
        self.args_with(host, &format!("window={window}"))
    }

    fn args_with(&self, host: &str, keys: &str) -> [String; 4] {
        let disk = format!("path={},tier={},{keys}", self.path, self.images.name(host));
        let nbd = format!("unix:{},rw", self.images.name(&format!("{host}.sock")));
        ["--disk".to_owned(), disk, "--nbd".to_owned(), nbd]
    }

    /// Serves the disk. It is cut when it is asked to be.
    fn serve(&self, host: &str) -> Server {
        let args = self.args(host, 600);
        Server::start(&args.each_ref().map(String::as_str))
    }

    fn takeover(&self, host: &str, more: &[&str]) -> Vec<String> {
        let tier = self.images.name(host);
        let args = ["tier", "takeover", &self.path, "--tier", &tier];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    /// The guest writes, and so does the model.
    fn write(&self, server: &Server, command: &str) {
        tool_ok("qemu-io", ["-f", "raw", "-c", command, "-c", "flush", &server.uri("web")]);
        tool_ok("qemu-io", ["-f", "qcow2", "-c", command, &self.model]);
    }

    /// A guest that writes, and whose requests may wait; the model has all of it at once.
    fn begin_to_write(&self, server: &Server, commands: &[String]) -> Child {
        let mut guest = Command::new("qemu-io");
        guest.args(["-f", "raw"]).args(commands.iter().flat_map(|command| ["-c", command]));
        let guest = guest.args(["-c", "flush", &server.uri("web")]).stdout(Stdio::null()).spawn().unwrap();
        let model = commands.iter().flat_map(|command| ["-c", command]);
        tool_ok("qemu-io", ["-f", "qcow2"].into_iter().chain(model).chain([self.model.as_str()]));
        guest
    }

    fn repository(&self) -> PathBuf {
        self.images.path("nas/web.qcow2.tier")
    }

    fn away(&self) -> PathBuf {
        self.images.path("nas/away")
    }

    /// Has the server publish the rest, and ends it.
    fn end(&self, server: Server) {
        server.ask_ok(["tier", "sync", "web"]);
        self.assert_published();
        assert!(server.stop().success());
    }

    /// Stock tools find all layers clean, and read at the disk's path what the model has.
    fn assert_published(&self) {
        let layers = fs::read_dir(self.repository()).unwrap().map(|entry| entry.unwrap().path());
        let layers: Vec<PathBuf> =
            layers.filter(|layer| layer.extension().is_some_and(|suffix| suffix == "qcow2")).collect();
        assert!(!layers.is_empty());
        let names = fs::read_dir(self.repository()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut others = names.filter(|name| !is_object_name(name.to_str().unwrap()));
        assert_eq!(others.next(), None, "nothing lies beside the layers");
        layers.iter().for_each(|layer| assert_clean(layer));
        assert_clean(self.path.as_ref());
        tool_ok("qemu-img", ["compare", &self.path, &self.model]);
    }
}

fn tier(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/disks/web", "").json()["tier"].clone()
}

fn metric(server: &Server, name: &str) -> String {
    let text = ask(&server.control(), "GET", "/v1/metrics", "").body;
    let line = text.lines().find(|line| line.starts_with(&format!("vmstrata_tier_{name}{{")));
    line.expect("a metric").rsplit(' ').next().unwrap().to_owned()
}

#[test]
fn a_killed_hosts_disk_is_taken_over_and_that_host_is_fenced() {
    let nas = Nas::new();
    tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 9 4M 1M", &nas.path]);
    tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 9 4M 1M", &nas.model]);
    let first = nas.serve("a");
    nas.write(&first, "write -P 1 0 1M");
    nas.write(&first, "write -P 2 12345k 3k");
    let said = first.ask_ok(["tier", "sync", "web"]);
    assert!(said.contains("epoch 2") && said.contains("all is published"), "{said}");
    nas.assert_published();
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 3 8M 64k", "-c", "flush", &first.uri("web")]);
    wait_until("the write is seen", || tier(&first)["unpublished_seconds"].is_u64());
    assert!(tier(&first)["unpublished_bytes"].as_u64() > Some(0));
    for command in [&["status"][..], &["disk", "show", "web"], &["tier", "status", "web"], &["top", "--once"]]
    {
        let said = first.ask_ok(command.iter().copied());
        assert!(said.contains("epoch 2") && said.contains("not published"), "{said}");
    }
    let runtime = first.crash();

    let told = run_err(1, nas.takeover("b", &[]));
    assert!(told.contains("epoch 2") && told.contains("--yes"), "{told}");
    let audit = nas.images.name("audit");
    let taken = run_json(nas.takeover("b", &["--yes", "--json", "--audit", &audit]));
    assert_eq!((&taken["epoch"], &taken["generation"]), (&2.into(), &2.into()));
    let [line] = &audited(audit.as_ref())[..] else { panic!("one change") };
    let recorded = [&line["change"], &line["disks"][0], &line["object"]];
    assert_eq!(recorded, ["tier_takeover", &nas.path, "epoch 2"]);
    let second = nas.serve("b");
    for command in ["read -P 1 0 1M", "read -P 9 4M 1M", "read -P 0 8M 64k"] {
        let read = tool_ok("qemu-io", ["-f", "raw", "-c", command, &second.uri("web")]);
        assert!(!read.contains("verification failed"), "{command}: {read}");
    }
    nas.write(&second, "write -P 4 0 64k");
    second.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();

    // The first host comes back.
    let args = nas.args("a", 600);
    let start = ["serve", "--runtime-dir", runtime.path().to_str().unwrap()];
    let refused = run_err(1, start.into_iter().chain(args.iter().map(String::as_str)));
    let owner = tier(&second)["owner"].as_str().unwrap().to_owned();
    assert!(refused.contains(&owner) && refused.contains("vmstrata tier takeover"), "{refused}");

    // A disk that is removed is published first.
    nas.write(&second, "write -P 5 32M 1M");
    second.ask_ok(["disk", "remove", "web"]);
    let published = run_json(["tier", "status", &nas.path, "--json"]);
    assert_eq!((&published["owner"], &published["epoch"]), (&owner.into(), &4.into()));
    nas.assert_published();
    assert!(second.stop().success());
    // What the first host had alone is a branch.
    let said = run_ok(nas.takeover("a", &["--yes"]));
    assert!(said.contains(".branch-"), "{said}");
    let first = nas.serve("a");
    nas.write(&first, "write -P 6 48M 1M");
    first.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();
    assert!(first.stop().success());
}

#[test]
fn a_take_over_names_what_the_nas_has_lost() {
    let nas = Nas::new();
    let first = nas.serve("a");
    nas.write(&first, "write -P 1 0 1M");
    first.ask_ok(["tier", "sync", "web"]);
    assert!(first.stop().success());
    let repository = std::fs::read_dir(format!("{}.tier", nas.path)).unwrap();
    let files = repository.map(|file| file.unwrap().path());
    let newest = files.filter(|file| file.to_str().unwrap().contains("/head-")).max().unwrap();
    std::fs::write(&newest, "").unwrap();
    let name = newest.file_name().unwrap().to_str().unwrap();
    let refused = run_err(1, ["tier", "status", &nas.path]);
    assert!(refused.contains(name) && refused.contains("vmstrata tier takeover"), "{refused}");
    let told = run_err(1, nas.takeover("b", &[]));
    assert!(told.contains(&format!("the NAS has lost {name}")) && told.contains("epoch 1, "), "{told}");
    assert!(run_ok(nas.takeover("b", &["--yes"])).contains("epoch 1, "));
    assert!(nas.serve("b").stop().success());
}

#[test]
fn a_running_host_that_was_taken_over_says_so_and_refuses_writes() {
    let nas = Nas::new();
    let first = nas.serve("a");
    nas.write(&first, "write -P 1 0 1M");
    first.ask_ok(["tier", "sync", "web"]);
    run_ok(nas.takeover("b", &["--yes"]));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 2 0 64k", &first.uri("web")]);
    let refused = first.ask_err(["tier", "sync", "web"]);
    assert!(refused.contains("publishes here since generation 2"), "{refused}");
    let status = tier(&first);
    assert_eq!((&status["state"], metric(&first, "fenced").as_str()), (&"fenced".into(), "1"));
    assert!(first.ask_ok(["status"]).contains("FENCED"));
    let write = tool("qemu-io", ["-f", "raw", "-c", "write -P 2 0 64k", &first.uri("web")]);
    assert!(String::from_utf8_lossy(&write.stdout).contains("write failed"), "{write:?}");
    nas.assert_published();
    assert!(!first.stop().success(), "its image is as after a crash");
}

#[test]
fn a_restart_after_a_kill_publishes_what_was_cut_and_what_was_not() {
    let nas = Nas::new();
    let server = nas.serve("a");
    nas.write(&server, "write -P 1 0 1M");
    server.ask_ok(["tier", "sync", "web"]);
    fs::rename(nas.repository(), nas.away()).unwrap();
    nas.write(&server, "write -P 2 512k 1M");
    let refused = server.ask_err(["tier", "sync", "web"]);
    assert!(refused.contains("web.qcow2.tier"), "{refused}");
    nas.write(&server, "write -P 3 20M 1M");
    let runtime = server.crash();
    fs::rename(nas.away(), nas.repository()).unwrap();
    let args = nas.args("a", 600);
    let server = Server::start_in(runtime, &args.each_ref().map(String::as_str));
    wait_until("the epoch that was cut", || tier(&server)["epoch"] == 3);
    server.ask_ok(["tier", "sync", "web"]);
    assert_eq!(tier(&server)["epoch"], 4);
    nas.assert_published();
    assert!(server.stop().success());
}

#[test]
fn a_guest_goes_on_while_its_repository_is_gone_which_then_gets_all() {
    let nas = Nas::new();
    let args = nas.args("a", 1);
    let server = Server::start(&args.each_ref().map(String::as_str));
    nas.write(&server, "write -P 1 0 1M");
    wait_until("an epoch", || tier(&server)["epoch"] == 2);
    fs::rename(nas.repository(), nas.away()).unwrap();
    nas.write(&server, "write -P 2 512k 1M");
    wait_until("it is seen", || tier(&server)["state"] == "stalled");
    assert_eq!(metric(&server, "stalled"), "1");
    assert!(server.ask_ok(["status"]).contains("NOT PUBLISHED"));
    for number in 0..10 {
        nas.write(&server, &format!("write -P {} {}M 300k", 10 + number, number * 5));
    }
    let read = tool_ok("qemu-io", ["-f", "raw", "-c", "read -P 19 45M 300k", &server.uri("web")]);
    assert!(!read.contains("verification failed"), "{read}");
    fs::rename(nas.away(), nas.repository()).unwrap();
    wait_until("all is published", || {
        let tier = tier(&server);
        tier["state"] == "publishing" && tier["unpublished_seconds"].is_null()
    });
    server.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();
    assert_eq!(metric(&server, "unpublished_bytes"), "0");
    assert!(server.stop().success());
}

#[test]
fn a_disk_that_is_removed_unpublished_says_so_and_is_served_again() {
    let nas = Nas::new();
    let server = nas.serve("a");
    fs::rename(nas.repository(), nas.away()).unwrap();
    nas.write(&server, "write -P 1 0 1M");
    let said = server.ask_err(["disk", "remove", "web"]);
    assert!(said.contains("this host's copy has what is not published"), "{said}");
    fs::rename(nas.away(), nas.repository()).unwrap();
    server.ask_ok(["disk", "add", &nas.args("a", 600)[1]]);
    wait_until("the epoch that was cut", || tier(&server)["epoch"] == 2);
    nas.write(&server, "write -P 2 0 64k");
    nas.end(server);
}

#[test]
fn what_does_not_go_with_tiers_is_refused_by_name() {
    let nas = Nas::new();
    let server = nas.serve("a");
    for command in [&["job", "flatten", "web"][..], &["job", "index-build", "web"]] {
        let refused = server.ask_err(command.iter().copied());
        assert!(refused.contains("disk 'web' is tiered"), "{command:?}: {refused}");
    }
    nas.write(&server, "write -P 1 0 1M");
    server.ask_ok(["resize", &nas.path, "96M"]);
    tool_ok("qemu-img", ["resize", "-q", &nas.model, "96M"]);
    nas.write(&server, "write -P 2 80M 1M");
    nas.end(server);
    for command in [&["resize", &nas.path, "128M"][..], &["snapshot", "create", &nas.path, "--name", "mon"]] {
        let refused = run_err(1, command.iter().copied());
        assert!(refused.contains("is a tiered disk"), "{refused}");
    }
    for (keys, why) in [
        ("read-only", "'read-only' does not go with 'tier'"),
        ("window=601", "'window' is 1 to 600 seconds, not 601"),
        ("on-missing=fail", "'on-missing' is wait, error or error:SECONDS (1 to 3600), not 'fail'"),
    ] {
        let disk = format!("path={},tier={},{keys}", nas.path, nas.images.name("c"));
        let refused = run_err(64, ["serve", "--disk", &disk, "--nbd", "unix:/nowhere"]);
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn a_server_that_replaces_another_goes_on_with_what_is_not_published() {
    let nas = Nas::new();
    let mut first = nas.serve("a");
    nas.write(&first, "write -P 1 0 1M");
    let (control, args) = (first.control(), nas.args("a", 600));
    let control = control.to_str().unwrap();
    let replace = ["--replace", "--control", control];
    let args: Vec<&str> = replace.into_iter().chain(args.iter().map(String::as_str)).collect();
    let second = Server::start_in(tempfile::tempdir().unwrap(), &args);
    assert!(first.wait().success());
    nas.write(&second, "write -P 2 30M 1M");
    second.ask_ok(["tier", "sync", "web", "--control", control]);
    nas.assert_published();
    assert!(second.stop().success());
}

#[test]
fn snapshots_of_a_tiered_disk_are_states_in_its_repository() {
    let nas = Nas::new();
    let server = nas.serve("a");
    nas.write(&server, "write -P 1 0 1M");
    let said = server.ask_ok(["snapshot", "create", &nas.path, "--name", "mon", "--label", "job=nightly"]);
    assert!(said.contains("web.qcow2.tier/") && said.contains("writes held"), "{said}");
    let again = server.ask_err(["snapshot", "create", &nas.path, "--name", "mon"]);
    assert!(again.contains("'mon' is there already"), "{again}");
    let monday = nas.images.name("monday.qcow2");
    fs::copy(&nas.model, &monday).unwrap();
    nas.write(&server, "write -P 2 512k 1M");
    server.ask_ok(["tier", "sync", "web"]);

    let listed = run_json(["snapshot", "list", &nas.path, "--json"]);
    let [row] = &listed["snapshots"].as_array().unwrap()[..] else { panic!("{listed}") };
    assert_eq!((&row["name"], &row["epoch"]), (&"mon".into(), &2.into()));
    assert_eq!(row["labels"]["job"], "nightly");
    assert!(run_ok(["snapshot", "list", &nas.path]).contains("job=nightly"));
    let state = format!("{}@mon", nas.path);
    assert!(run_ok(["snapshot", "show", &state]).contains("epoch 2"));
    let changed = run_ok(["diff", &state, &nas.path]);
    assert!(changed.contains("1.0 MiB") || changed.contains("1 MiB"), "{changed}");
    let [clone, backup] = ["clone.qcow2", "backup.qcow2"].map(|name| nas.images.name(name));
    run_ok(["snapshot", "clone", &state, "-o", &clone]);
    run_ok(["backup", &state, "-o", &backup]);
    // A clone's layers have indices, and published layers do not change for that.
    let allow = ["--allow-backing", nas.repository().to_str().unwrap()].map(str::to_owned);
    let with =
        |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).chain(allow.clone()).collect::<Vec<_>>();
    run_ok(with(&["snapshot", "create", &clone, "--name", "own"]));
    let built = run(with(&["index", "build", &clone]));
    let said = String::from_utf8(built.stdout).unwrap();
    assert!(built.status.code() == Some(3) && said.contains("a published layer of a tiered disk"), "{said}");
    let said = run_ok(with(&["flatten", &clone, "--yes", "--remove", "everywhere"]));
    assert!(said.contains("deletes it once no pin needs it"), "{said}");
    let missing = run_err(1, ["map", &format!("{}@tue", nas.path)]);
    assert!(missing.contains("no snapshot 'tue': it has mon"), "{missing}");
    run_ok(["map", &format!("{}@-0s", nas.path)]);

    let lost = server.ask_err(["snapshot", "revert", &nas.path, "mon"]);
    assert!(lost.contains("as a branch"), "{lost}");
    let said = server.ask_ok(["snapshot", "revert", &nas.path, "mon", "--yes"]);
    assert!(said.contains(".branch-"), "{said}");
    fs::copy(&monday, &nas.model).unwrap();
    nas.write(&server, "write -P 3 8M 64k");
    server.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();
    assert!(run_ok(["snapshot", "delete", &nas.path, "mon", "--dry-run"]).contains("would be"));
    run_ok(["snapshot", "delete", &state]);
    assert!(run_ok(["snapshot", "list", &nas.path]).contains("no snapshots"));
    for copy in [&clone, &backup] {
        tool_ok("qemu-img", ["compare", copy, &monday]);
    }
    assert!(server.stop().success());
}

/// Reads at the server without waiting for it: it has come when the child has ended.
fn read_later(server: &Server, command: &str) -> Child {
    let mut reader = Command::new("qemu-io");
    reader.args(["-r", "-f", "raw", "-c", command, &server.uri("web")]);
    reader.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What such a read has printed.
fn ended(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// A server whose disk has pattern 9 in its first 8 MiB, of which the first 64 KiB were read, and whose repository has gone since.
fn cut_off(nas: &Nas, keys: &str) -> Server {
    for image in [&nas.path, &nas.model] {
        tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 9 0 8M", image]);
    }
    let mut args = nas.args("a", 600);
    args[1].push_str(keys);
    let server = Server::start(&args.each_ref().map(String::as_str));
    tool_ok("qemu-io", ["-r", "-f", "raw", "-c", "read -P 9 0 64k", &server.uri("web")]);
    let open = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    wait_until("its layers to be closed", || {
        let files = fs::read_dir(&open).unwrap().filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        !files.into_iter().any(|file| file.starts_with(nas.repository()))
    });
    fs::rename(nas.repository(), nas.away()).unwrap();
    server
}

#[test]
fn reads_of_what_the_cache_lacks_wait_for_the_repository_and_all_else_goes_on() {
    let nas = Nas::new();
    let server = cut_off(&nas, "");
    let mut waiting = read_later(&server, "read -P 9 6M 64k");
    wait_until("it to be noticed", || tier(&server)["reads_wait_seconds"].is_u64());
    for command in [&["status"][..], &["tier", "status", "web"]] {
        let said = server.ask_ok(command.iter().copied());
        assert!(said.contains("READS WAIT") && said.contains("cache: "), "{said}");
    }
    nas.write(&server, "write -P 3 32M 64k");
    let read = tool_ok("qemu-io", ["-f", "raw", "-c", "read -P 9 0 64k", &server.uri("web")]);
    assert!(!read.contains("failed"), "{read}");
    assert!(waiting.try_wait().unwrap().is_none(), "it waits");
    fs::rename(nas.away(), nas.repository()).unwrap();
    let read = ended(waiting);
    assert!(read.contains("read 65536/65536") && !read.contains("failed"), "{read}");
    wait_until("it to answer", || tier(&server)["reads_wait_seconds"].is_null());
    let cache = &tier(&server)["cache"];
    assert!(cache["fetched_chunks"].as_u64() > Some(1), "{cache}");
    assert!(cache["bytes"].as_u64() < cache["max_bytes"].as_u64(), "{cache}");
    nas.end(server);
}

#[test]
fn flushes_wait_in_an_outage_of_a_disk_that_is_to_stall() {
    let nas = Nas::new();
    let args = nas.args_with("a", "window=4,on-outage=stall");
    let server = Server::start(&args.each_ref().map(String::as_str));
    nas.write(&server, "write -P 1 0 1M");
    wait_until("an epoch", || tier(&server)["epoch"] == 2);
    fs::rename(nas.repository(), nas.away()).unwrap();
    nas.write(&server, "write -P 2 512k 1M");
    wait_until("the window is past", || tier(&server)["unpublished_seconds"].as_u64() > Some(4));
    let mut guest = nas.begin_to_write(&server, &["write -P 3 20M 1M".to_owned()]);
    wait_until("its flush waits", || tier(&server)["flushes_wait"].as_u64() > Some(0));
    assert_ne!(metric(&server, "flushes_wait"), "0");
    let said = server.ask_ok(["status"]);
    assert!(said.contains("1 flush WAIT") && said.contains("NOT PUBLISHED"), "{said}");
    assert!(guest.try_wait().unwrap().is_none());
    fs::rename(nas.away(), nas.repository()).unwrap();
    assert!(guest.wait().unwrap().success());
    nas.end(server);
}

#[test]
fn reads_of_what_the_cache_lacks_fail_in_time_if_they_are_to() {
    let nas = Nas::new();
    let server = cut_off(&nas, ",on-missing=error:1");
    let read = ended(read_later(&server, "read -P 9 6M 64k"));
    assert!(read.contains("read failed"), "{read}");
    fs::rename(nas.away(), nas.repository()).unwrap();
    let read = ended(read_later(&server, "read -P 9 6M 64k"));
    assert!(read.contains("read 65536/65536") && !read.contains("failed"), "{read}");
    assert!(server.stop().success());
}

#[test]
fn a_server_whose_reads_wait_ends_and_the_next_finds_what_it_has_fetched() {
    let nas = Nas::new();
    let mut server = cut_off(&nas, "");
    let waiting = read_later(&server, "read -P 9 6M 64k");
    wait_until("it to be noticed", || tier(&server)["reads_wait_seconds"].is_u64());
    kill_process(server.pid(), Signal::TERM).unwrap();
    server.wait();
    assert!(!ended(waiting).contains("read 65536/65536"));
    fs::rename(nas.away(), nas.repository()).unwrap();
    let server = nas.serve("a");
    let read = ended(read_later(&server, "read -P 9 0 8M"));
    assert!(read.contains("read 8388608/8388608") && !read.contains("failed"), "{read}");
    let fetched = tier(&server)["cache"]["fetched_chunks"].as_u64().unwrap();
    let layers = fs::read_dir(nas.repository()).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
    let chunks = layers.max().unwrap().div_ceil(256 << 10);
    assert!((1..chunks).contains(&fetched), "{fetched} of {chunks} chunks");
    assert!(server.stop().success());
}

#[test]
fn a_detached_disk_is_an_ordinary_image_however_often_the_command_is_killed() {
    for how in [&[][..], &["--flatten"]] {
        let nas = Nas::new();
        let server = nas.serve("a");
        for part in 0..4 {
            nas.write(&server, &format!("write -P {} {part}M 3M", part + 1));
            server.ask_ok(["tier", "sync", "web"]);
        }
        let tier = nas.images.name("a");
        let detach = ["tier", "detach", &nas.path, "--tier", &tier];
        let refused = run_err(1, detach.iter().chain(how).chain(&["--yes"]));
        assert!(refused.contains("another process has this copy of the disk open"), "{refused}");
        nas.write(&server, "write -P 9 32M 1M");
        assert!(server.stop().success());
        let refused = run_err(1, detach.iter().chain(how).chain(&["--yes"]));
        assert!(refused.contains("vmstrata tier sync"), "{refused}");
        let server = nas.serve("a");
        server.ask_ok(["tier", "sync", "web"]);
        assert!(server.stop().success());
        let told = run_err(1, detach.iter().chain(how));
        assert!(told.contains("epoch 6") && told.contains("--yes"), "{told}");
        for wait_ms in (2..).step_by(4) {
            let mut child = vmstrata();
            child
                .args(detach.iter().chain(how).chain(&["--yes"]))
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let mut child = child.spawn().unwrap();
            // Anywhere in what it does; longer each time.
            std::thread::sleep(std::time::Duration::from_millis(wait_ms));
            let ended = child.try_wait().unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            assert_clean(nas.path.as_ref());
            tool_ok("qemu-img", ["compare", &nas.path, &nas.model]);
            // If the one before was killed at its very end, there was nothing left to do.
            if ended.is_some() {
                break;
            }
        }
        let left =
            |dir: &str| fs::read_dir(nas.images.path(dir)).unwrap().map(|file| file.unwrap().file_name());
        let copies: Vec<_> = left("a").filter(|name| name != "cache").collect();
        assert!(copies.is_empty(), "{copies:?}");
        assert_eq!(left("nas").count(), if how.is_empty() { 2 } else { 1 });
        let plain = format!("path={}", nas.path);
        let socket = format!("unix:{},rw", nas.images.name("plain.sock"));
        let server = Server::start(&["--disk", &plain, "--nbd", &socket]);
        nas.write(&server, "write -P 8 1M 2M");
        assert!(server.stop().success());
        tool_ok("qemu-img", ["compare", &nas.path, &nas.model]);
    }
}

#[test]
fn branches_are_listed_and_deleted_by_name() {
    let nas = Nas::new();
    let server = nas.serve("a");
    nas.write(&server, "write -P 1 0 1M");
    server.ask_ok(["tier", "sync", "web"]);
    let tier = nas.images.name("a");
    let list = ["tier", "branches", &nas.path, "--tier", &tier];
    assert!(run_ok(list).lines().count() == 1, "a headline");
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 2 0 64k", "-c", "flush", &server.uri("web")]);
    server.crash();
    run_ok(nas.takeover("b", &["--yes"]));
    run_ok(nas.takeover("a", &["--yes"]));
    let listed = run_json(list.iter().chain(&["--json"]));
    let [branch] = &listed.as_array().unwrap()[..] else { panic!("one: {listed}") };
    let name = branch["branch"].as_str().unwrap();
    assert!(branch["bytes"].as_u64() > Some(0) && name.contains(".branch-"), "{branch}");
    assert_eq!(branch["unpublished_epochs"], serde_json::json!([]));
    assert!(run_ok(list).contains(name));
    let told = run_err(1, list.iter().chain(&["--drop", name]));
    assert!(told.contains("would be lost") && told.contains("--yes"), "{told}");
    assert!(run_err(1, list.iter().chain(&["--drop", "other", "--yes"])).contains("no branch of"));
    run_ok(list.iter().chain(&["--drop", name, "--yes"]));
    assert!(!nas.images.path("a").join(name).exists());
}

#[test]
fn writes_wait_in_an_outage_that_has_used_up_its_budget() {
    let nas = Nas::new();
    let args = nas.args_with("a", "window=1,outage-bytes=8M");
    let server = Server::start(&args.each_ref().map(String::as_str));
    nas.write(&server, "write -P 1 0 1M");
    wait_until("an epoch", || tier(&server)["epoch"] == 2);
    fs::rename(nas.repository(), nas.away()).unwrap();
    nas.write(&server, "write -P 2 512k 1M");
    wait_until("it is seen", || tier(&server)["state"] == "stalled");
    let commands: Vec<String> = (0..24).map(|number| format!("write -P {number} {number}M 1M")).collect();
    let mut guest = nas.begin_to_write(&server, &commands);
    wait_until("its writes wait", || tier(&server)["writes_wait"] == true);
    assert_eq!(metric(&server, "writes_wait"), "1");
    // What came in before the watch had its turn on a busy host is more than the budget.
    assert!(tier(&server)["unpublished_bytes"].as_u64() < Some(20 << 20), "{}", tier(&server));
    assert!(server.ask_ok(["top", "--once"]).contains("WRITES WAIT"));
    assert!(server.log().contains("outage-bytes"), "{}", server.log());
    assert!(guest.try_wait().unwrap().is_none());
    fs::rename(nas.away(), nas.repository()).unwrap();
    assert!(guest.wait().unwrap().success());
    nas.end(server);
}

#[test]
fn what_is_flushed_is_on_the_nas_when_that_is_asked_for() {
    let nas = Nas::new();
    let args = nas.args_with("a", "window=600,durability=repository");
    let server = Server::start(&args.each_ref().map(String::as_str));
    for number in 1..4 {
        nas.write(&server, &format!("write -P {number} {number}M 1M"));
    }
    assert!(server.ask_ok(["tier", "status", "web"]).contains("durable in the repository"));
    server.crash();
    run_ok(nas.takeover("b", &["--yes"]));
    let other = nas.serve("b");
    for number in 1..4 {
        let command = format!("read -P {number} {number}M 1M");
        let read = tool_ok("qemu-io", ["-f", "raw", "-c", &command, &other.uri("web")]);
        assert!(!read.contains("verification failed"), "{read}");
    }
    assert!(other.stop().success());
}

#[test]
fn epochs_are_held_and_the_rate_is_changed_while_the_server_runs() {
    let nas = Nas::new();
    let args = nas.args("a", 1);
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.extend(["--tier-rate", "40M"]);
    let server = Server::start(&args);
    assert!(server.ask_ok(["tier", "rate"]).contains("40 MiB a second"));
    assert!(server.ask_ok(["tier", "rate", "none"]).contains("without limit"));
    let held = server.ask_ok(["tier", "hold", "web", "--for", "10m"]);
    assert!(held.contains("HELD"), "{held}");
    nas.write(&server, "write -P 1 0 1M");
    wait_until("the window is past", || tier(&server)["unpublished_seconds"].as_u64() > Some(2));
    assert_eq!((&tier(&server)["epoch"], metric(&server, "held").as_str()), (&1.into(), "1"));
    server.ask_ok(["tier", "hold", "web", "--release"]);
    wait_until("it is published", || tier(&server)["epoch"] == 2);
    let refused = server.ask_err(["tier", "hold", "web", "--for", "2h"]);
    assert!(refused.contains("1 s to 1 h"), "{refused}");
    assert!(server.stop().success());
}

/// Two disks of a guest, and what they should hold.
struct Pair {
    images: Images,
}

impl Pair {
    const NAMES: [&str; 2] = ["log", "data"];

    fn new() -> Self {
        let images = Images::new();
        fs::create_dir(images.path("nas")).unwrap();
        let pair = Self { images };
        for image in Self::NAMES.iter().flat_map(|name| [pair.path(name), pair.model(name)]) {
            tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &image, "64M"]);
        }
        pair
    }

    fn path(&self, name: &str) -> String {
        self.images.name(&format!("nas/{name}.qcow2"))
    }

    fn model(&self, name: &str) -> String {
        self.images.name(&format!("{name}-model.qcow2"))
    }

    fn disk(&self, host: &str, name: &str) -> String {
        format!("path={},tier={},group=guest,window=600", self.path(name), self.images.name(host))
    }

    fn args(&self, host: &str) -> Vec<String> {
        let nbd = ["--nbd".to_owned(), format!("unix:{},rw", self.images.name(&format!("{host}.sock")))];
        let disks = Self::NAMES.iter().flat_map(|name| ["--disk".to_owned(), self.disk(host, name)]);
        disks.chain(nbd).collect()
    }

    fn serve(&self, host: &str) -> Server {
        let args = self.args(host);
        Server::start(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The guest writes to both disks, and so do the models.
    fn write(&self, server: &Server, command: &str) {
        for name in Self::NAMES {
            tool_ok("qemu-io", ["-f", "raw", "-c", command, "-c", "flush", &server.uri(name)]);
            tool_ok("qemu-io", ["-f", "qcow2", "-c", command, &self.model(name)]);
        }
    }

    fn assert_published(&self) {
        for name in Self::NAMES {
            assert_clean(self.path(name).as_ref());
            tool_ok("qemu-img", ["compare", &self.path(name), &self.model(name)]);
        }
    }
}

#[test]
fn a_group_is_published_taken_over_and_removed_as_one() {
    let pair = Pair::new();
    let first = pair.serve("a");
    pair.write(&first, "write -P 1 0 1M");
    let said = first.ask_ok(["tier", "sync", "data"]);
    assert!(said.contains("epoch 2") && said.contains("all is published"), "{said}");
    pair.assert_published();
    let said = first.ask_ok(["tier", "status", "log"]);
    assert!(said.contains("group guest") && said.contains("guest.tier"), "{said}");
    // One of it names the state of all.
    let both = first.ask_ok(["snapshot", "create", "log", "data", "--name", "mon", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&both).unwrap()["snapshots"].as_array().unwrap().len(), 2);
    first.ask_ok(["snapshot", "create", "data", "--name", "tue"]);
    for name in Pair::NAMES {
        let listed = run_ok(["snapshot", "list", &pair.path(name)]);
        assert!(listed.contains("mon") && listed.contains("tue"), "{listed}");
        tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 9 0 1M", "-c", "flush", &first.uri(name)]);
    }
    first.crash();

    let (path, tier) = (pair.path("data"), pair.images.name("b"));
    let told = run_err(1, ["tier", "takeover", &path, "--tier", &tier]);
    assert!(told.contains("log.qcow2") && told.contains("--yes"), "{told}");
    let said = run_ok(["tier", "takeover", &path, "--tier", &tier, "--yes"]);
    assert!(said.contains(&format!("--disk path={},tier={tier},group=guest", pair.path("log"))), "{said}");
    let second = pair.serve("b");
    pair.write(&second, "write -P 2 4M 1M");
    second.ask_ok(["tier", "sync", "log"]);
    pair.assert_published();

    // A disk of another kind is not part of it, nor is a new one.
    let other = pair.images.name("nas/other.qcow2");
    tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &other, "1M"]);
    second.ask_ok(["disk", "add", &format!("path={other}")]);
    let refused = second.ask_err(["snapshot", "create", "log", "other", "--name", "wed"]);
    assert!(refused.contains("not of its group"), "{refused}");
    second.ask_ok(["disk", "remove", "other"]);
    let refused = second.ask_err(["disk", "add", &format!("path={other},tier={tier},group=new")]);
    assert!(refused.contains("group 'new' is not published yet"), "{refused}");
    let refused = run_err(1, ["tier", "detach", &path, "--tier", &tier, "--yes"]);
    assert!(refused.contains("not detached"), "{refused}");

    let said = second.ask_ok(["snapshot", "revert", "log", "tue", "--yes"]);
    assert!(said.contains(".branch-"), "{said}");
    for name in Pair::NAMES {
        tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 0 4M 1M", &pair.model(name)]);
        let read = tool_ok("qemu-io", ["-f", "raw", "-c", "read -P 0 4M 1M", &second.uri(name)]);
        assert!(!read.contains("failed"), "{read}");
    }
    pair.write(&second, "write -P 3 8M 1M");
    second.ask_ok(["disk", "remove", "log"]);
    assert!(!second.ask_ok(["status"]).contains("data.qcow2"));
    pair.assert_published();

    // They are added one after the other, and served when both are there.
    let refused = second.ask_err(["disk", "add", &format!("path={path},tier={tier}")]);
    assert!(refused.contains("of group 'guest'"), "{refused}");
    second.ask_ok(["disk", "add", &pair.disk("b", "log")]);
    assert!(second.ask_ok(["status"]).contains("data.qcow2 is published with it"));
    second.ask_ok(["disk", "add", &pair.disk("b", "data")]);
    for name in Pair::NAMES {
        let uri = format!("nbd+unix:///{name}?socket={}", pair.images.name("b.sock"));
        let read = tool_ok("qemu-io", ["-f", "raw", "-c", "read -P 3 8M 1M", &uri]);
        assert!(!read.contains("failed"), "{read}");
    }
    assert!(second.stop().success());
}
