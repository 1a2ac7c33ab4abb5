//! A running server under control: disks and exports come and go, and what was not asked about does not notice.

use std::io::{Read, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::http::{ask, connect};
use crate::support::server::Server;
use crate::support::{Holder, Images, assert_clean, run_err, stderr, tool, tool_ok, vmstrata, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

fn disk(path: &Path, name: &str) -> String {
    format!("path={},name={name}", path.display())
}

fn unix(images: &Images) -> String {
    format!("unix:{},rw", images.name("nbd.sock"))
}

fn uri(images: &Images, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", images.name("nbd.sock"))
}

fn nbd_io(uri: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, uri]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

/// A client that writes as fast as it can, `count` requests or until it is stopped.
fn load(uri: &str, count: u32) -> Child {
    let count = count.to_string();
    let bench = ["bench", "-f", "raw", "-w", "-c", &count, "-d", "16", "-s", "4k", "-S", "68k", uri];
    Command::new("qemu-img").args(bench).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn disks_come_and_go_while_another_one_is_written() {
    let images = Images::new();
    let (busy, guest) = (images.create("busy.qcow2", &["256M"]), images.create("guest.qcow2", &["16M"]));
    let server = Server::start(&["--disk", &disk(&busy, "busy"), "--nbd", &unix(&images)]);
    let mut writer = load(&uri(&images, "busy"), 60_000);
    let spec = disk(&guest, "guest");
    for round in 1..=8 {
        server.ask_ok(["disk", "add", &spec]);
        let at = uri(&images, "guest");
        assert_eq!(tool_ok("nbdinfo", ["--size", &at]).trim(), (16 << 20).to_string());
        nbd_io(&at, &format!("write -P {round} 0 1M"));
        server.ask_ok(["disk", "remove", "guest"]);
        // The very next moment its files are anybody's.
        tool_ok("qemu-io", ["-c", &format!("read -P {round} 0 1M"), guest.to_str().unwrap()]);
        assert_clean(&guest);
        assert!(!tool("nbdinfo", ["--size", &at]).status.success(), "it is still exported");
    }
    let mut said = String::new();
    let status = writer.wait().unwrap();
    writer.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success(), "the writer noticed: {said}");
    assert!(server.stop().success());
    assert_clean(&busy);
}

#[test]
fn a_disk_shows_that_it_detects_zeroes_and_does() {
    let images = Images::new();
    let path = images.create("disk.qcow2", &["16M"]);
    let spec = disk(&path, "disk") + ",detect-zeroes=unmap";
    let server = Server::start(&["--disk", &spec, "--nbd", &unix(&images)]);
    let shown: Value = serde_json::from_str(&server.ask_ok(["disk", "show", "disk", "--json"])).unwrap();
    assert_eq!(shown["detect_zeroes"], "unmap");
    assert!(server.ask_ok(["disk", "show", "disk"]).contains("detect-zeroes=unmap"));
    for pattern in [7, 0] {
        nbd_io(&uri(&images, "disk"), &format!("write -P {pattern} 0 8M"));
    }
    assert!(server.stop().success());
    let on_host = path.metadata().unwrap().blocks() * 512;
    assert!(on_host < 1 << 20, "{on_host}");
    assert_clean(&path);
}

#[test]
fn a_disk_removed_in_the_middle_of_writes_is_left_clean_and_the_server_goes_on() {
    let images = Images::new();
    let (gone, stays) = (images.create("gone.qcow2", &["64G"]), images.create("stays.qcow2", &["16M"]));
    let args = ["--disk", &disk(&gone, "gone"), "--disk", &disk(&stays, "stays"), "--nbd", &unix(&images)];
    let server = Server::start(&args);
    nbd_io(&uri(&images, "gone"), "write -P 9 60G 1M");
    let mut writer = load(&uri(&images, "gone"), 10_000_000);
    server.wait_for_requests("write", 1000);
    assert!(writer.try_wait().unwrap().is_none(), "the load runs");
    let start = Instant::now();
    server.ask_ok(["disk", "remove", "gone"]);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_clean(&gone);
    tool_ok("qemu-io", ["-c", "read -P 9 60G 1M", gone.to_str().unwrap()]);
    nbd_io(&uri(&images, "stays"), "write -P 1 0 64k");
    let _ = writer.kill();
    writer.wait().unwrap();
    assert!(server.stop().success());
}

#[test]
fn a_file_that_the_server_has_is_refused_at_once_by_the_name_it_has_it_under() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "web"), "--nbd", &unix(&images)]);
    let overlay = images.create("overlay.qcow2", &["-u", "-b", "web.qcow2", "-F", "qcow2", "16M"]);
    std::fs::hard_link(&path, images.path("hard.qcow2")).unwrap();
    std::os::unix::fs::symlink(&path, images.path("soft.qcow2")).unwrap();
    let start = Instant::now();
    for again in [&path, &images.path("hard.qcow2"), &images.path("soft.qcow2")] {
        let said = server.ask_err(["disk", "add", &disk(again, "again")]);
        assert!(said.contains("already served as 'web'"), "{said}");
    }
    assert!(start.elapsed() < Duration::from_secs(4), "no lock is waited for: {:?}", start.elapsed());
    let said = server.ask_err(["disk", "add", &disk(&images.path("soft.qcow2"), "web")]);
    assert!(said.contains("soft.qcow2 is already served as 'web'"), "{said}");
    let said = server.ask_err(["disk", "add", &disk(&overlay, "web")]);
    assert!(said.contains("web.qcow2 is already served as 'web': give this disk another name"), "{said}");
    // What stands on it needs its content to stay.
    let said = server.ask_err(["disk", "add", &disk(&overlay, "above")]);
    assert!(said.contains("web.qcow2 is already served as 'web'"), "{said}");
    let asked = format!("{{\"path\":{:?},\"name\":\"again\"}}", path.to_str().unwrap());
    assert_eq!(ask(&server.control(), "POST", "/v1/disks", &asked).status, 409);
    assert!(server.stop().success());
}

#[test]
fn exports_come_and_go_and_say_how_to_attach() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "web"), "--nbd", &unix(&images)]);
    let guest = images.name("web.sock");
    let said = server.ask_ok(["export", "add", "--vhost-user", &format!("web={guest},queues=2")]);
    assert!(said.contains("vhost-user-blk-pci") && said.contains(&guest), "{said}");
    let second = format!("web={}", images.name("second.sock"));
    assert!(server.ask_err(["export", "add", "--vhost-user", &second]).contains("two guests"));
    assert!(!images.path("second.sock").exists());
    let tcp: Value =
        serde_json::from_str(&server.ask_ok(["export", "add", "--nbd", "tcp:127.0.0.1:0,rw", "--json"]))
            .unwrap();
    let address = tcp["export"]["address"].as_str().unwrap();
    let port = address.rsplit(':').next().unwrap();
    nbd_io(&format!("nbd://127.0.0.1:{port}/web"), "write -P 5 0 64k");
    let gone: Value = serde_json::from_str(&server.ask_ok(["export", "remove", address, "--json"])).unwrap();
    assert_eq!(gone["export"]["address"], address);
    assert!(!tool("nbdinfo", ["--size", &format!("nbd://127.0.0.1:{port}/web")]).status.success());
    nbd_io(&uri(&images, "web"), "read -P 5 0 64k");
    server.ask_ok(["export", "remove", &guest]);
    assert!(!Path::new(&guest).exists(), "the socket was left behind");
    assert!(server.ask_err(["export", "remove", &guest]).contains("vmstrata status"));
    let gone: Value = serde_json::from_str(&server.ask_ok(["disk", "remove", "web", "--json"])).unwrap();
    assert_eq!((&gone["name"], &gone["layers"]), (&"web".into(), &1.into()), "{gone}");
    assert!(server.stop().success());
}

/// The server may have been started elsewhere.
#[test]
fn the_agent_of_an_added_disk_is_where_the_command_was_given() {
    let images = Images::new();
    let [one, two] = ["one.qcow2", "two.qcow2"].map(|name| images.create(name, &["16M"]));
    let server = Server::start(&["--disk", &disk(&one, "one"), "--nbd", &unix(&images)]);
    server.ask_ok(["disk", "add", &format!("{},agent=none/agent.sock", disk(&two, "two"))]);
    let two = two.display().to_string();
    let said = server.ask_err(["snapshot", "create", &two, "--name", "a", "--quiesce", "always"]);
    let here = std::env::current_dir().unwrap().join("none/agent.sock");
    assert!(said.contains(&format!("guest agent {}", here.display())), "{said}");
    assert!(server.stop().success());
}

/// A disk may have many thousands of snapshots, and a rule may keep one.
#[test]
fn a_job_may_name_as_many_snapshots_as_a_chain_can_have() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "a"), "--nbd", &unix(&images)]);
    let names: Vec<String> = (0..65_000).map(|number| format!("{number:0>100}")).collect();
    let body = json!({ "kind": "snapshot_delete", "disk": "a", "snapshots": names }).to_string();
    let refused = ask(&server.control(), "POST", "/v1/jobs", &body);
    assert_eq!(refused.status, 422, "{}", &refused.body[..refused.body.len().min(300)]);
    assert!(refused.body.contains("it has no snapshot"), "{}", &refused.body[..300]);
    assert!(server.stop().success());
}

#[test]
fn a_guest_that_is_attached_is_shown_and_keeps_its_disk_unless_it_is_taken_by_force() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let guest = images.name("a.sock");
    let server = Server::start(&["--disk", &disk(&path, "a"), "--vhost-user", &format!("a={guest}")]);
    assert!(server.ask_ok(["status"]).contains("no guest, 0 requests"));
    let attached = UnixStream::connect(&guest).unwrap();
    wait_until("the guest", || server.ask_ok(["status"]).contains("guest attached, 0 requests"));
    let metrics = ask(&server.control(), "GET", "/v1/metrics", "").body;
    assert!(metrics.contains("vmstrata_vhost_user_attached{disk=\"a\""), "{metrics}");
    for args in [["disk", "remove", "a"], ["export", "remove", "1"]] {
        let said = server.ask_err(args);
        assert!(said.contains("a guest is attached at") && said.contains("--force"), "{said}");
    }
    let odd = ask(&server.control(), "DELETE", "/v1/disks/a?force=yes", "");
    assert_eq!((odd.status, &odd.json()["kind"]), (422, &"invalid".into()), "{odd:?}");
    server.ask_ok(["export", "remove", "1", "--force"]);
    drop(attached);
    server.ask_ok(["export", "add", "--vhost-user", &format!("a={guest}")]);
    let attached = UnixStream::connect(&guest).unwrap();
    wait_until("the guest", || server.ask_ok(["status"]).contains("guest attached, 0 requests"));
    server.ask_ok(["disk", "remove", "a", "--force"]);
    drop(attached);
    let log = server.log();
    assert_eq!(log.matches("frontend gone; the export is closed").count(), 2, "{log}");
    assert!(!log.contains("listening again"), "{log}");
    assert!(server.stop().success());
    assert_clean(&path);
}

#[test]
fn snapshots_of_nothing_and_by_no_name_and_jobs_without_speed_are_refused() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "web"), "--nbd", &unix(&images)]);
    for (to, body, words) in [
        ("/v1/snapshots", r#"{"disks":[],"name":"mon"}"#, "one disk at least"),
        ("/v1/snapshots", r#"{"disks":["web"],"name":"../x y","taken_ns":0}"#, "../x y"),
        (
            "/v1/jobs",
            r#"{"kind":"index_build","disk":"web","bytes_per_second":0}"#,
            "'bytes_per_second' is at least 1",
        ),
        ("/v1/jobs/1", r#"{"action":"limit","bytes_per_second":0}"#, "'bytes_per_second' is at least 1"),
    ] {
        let refused = ask(&server.control(), "POST", to, body);
        let detail = refused.json()["detail"].as_str().unwrap().to_owned();
        assert!(refused.status == 422 && detail.contains(words), "{body}: {refused:?}");
    }
    assert!(server.stop().success());
}

#[test]
fn a_disk_takes_its_own_sockets_with_it() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let guest = images.name("a.sock");
    let server = Server::start(&["--disk", &disk(&path, "a"), "--vhost-user", &format!("a={guest}")]);
    server.ask_ok(["disk", "remove", "a"]);
    assert!(!Path::new(&guest).exists());
    let status: Value = serde_json::from_str(&server.ask_ok(["status", "--json"])).unwrap();
    assert_eq!((&status["disks"], &status["exports"]), (&Value::Array(vec![]), &Value::Array(vec![])));
    server.ask_ok(["disk", "add", &disk(&path, "a")]);
    assert!(server.stop().success());
    assert_clean(&path);
}

#[test]
fn status_shows_what_is_served() {
    let images = Images::new();
    let path = images.long_chain(12);
    let server = Server::start(&["--disk", &disk(&path, "long"), "--nbd", &unix(&images)]);
    let text = server.ask_ok(["status"]);
    assert!(text.contains("long  serving  writable") && text.contains(&images.name("nbd.sock")), "{text}");
    let status = ask(&server.control(), "GET", "/v1/status", "").json();
    assert_eq!(status["disks"][0]["layers"], 12);
    assert_eq!(status["pid"], server.pid().as_raw_pid());
    let detail = ask(&server.control(), "GET", "/v1/disks/long", "").json();
    let chain = detail["chain"].as_array().unwrap();
    assert_eq!(chain.len(), 12);
    assert_eq!(
        (&chain[0]["index"], chain[0]["path"].as_str().unwrap()),
        (&0.into(), &*images.name("0.qcow2"))
    );
    assert_eq!(detail["exports"][0]["export"]["kind"], "nbd");
    let shown: Value = serde_json::from_str(&server.ask_ok(["disk", "show", "long", "--json"])).unwrap();
    assert_eq!((&shown["chain"], &shown["name"]), (&detail["chain"], &"long".into()));
    nbd_io(&uri(&images, "long"), "read 0 64k");
    let text = server.ask_ok(["disk", "show", "long"]);
    assert!(text.starts_with("long: serving, writable, ") && text.contains("12 layers"), "{text}");
    for words in ["reads ", "p99", &images.name("nbd.sock"), &images.name("0.qcow2")] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    assert!(server.ask_err(["disk", "show", "none"]).contains("no disk is named 'none'"));
    assert!(server.stop().success());
}

#[test]
fn without_a_server_the_commands_say_what_to_do() {
    let images = Images::new();
    let socket = images.name("control.sock");
    for args in [&["status"][..], &["disk", "remove", "a"], &["export", "add", "--nbd", "unix:s"]] {
        let message = run_err(1, [args, &["--control", &socket]].concat());
        assert!(message.contains("no server listens at") && message.contains("vmstrata serve"), "{message}");
    }
}

#[test]
fn a_control_socket_belongs_to_one_server_and_is_taken_over_from_a_dead_one() {
    let images = Images::new();
    let (one, two) = (images.create("one.qcow2", &["16M"]), images.create("two.qcow2", &["16M"]));
    let first = Server::start(&["--disk", &disk(&one, "one"), "--nbd", &unix(&images)]);
    let control = first.control();
    let asked = [
        "serve",
        "--disk",
        &disk(&two, "two"),
        "--nbd",
        &format!("unix:{},rw", images.name("two.sock")),
        "--runtime-dir",
        &images.name("run"),
        "--control",
        control.to_str().unwrap(),
    ]
    .map(str::to_owned);
    let output = vmstrata().args(&asked).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("another server listens there"), "{}", stderr(&output));
    assert!(!images.path("two.sock").exists(), "it opened exports before it found out");
    assert_eq!(ask(&control, "GET", "/v1/disks", "").json()["disks"][0]["name"], "one");
    let runtime = first.crash();
    assert!(control.exists(), "a crash leaves the socket");
    let again = Server::start_in(runtime, &["--disk", &disk(&two, "two"), "--nbd", &unix(&images)]);
    assert_eq!(ask(&control, "GET", "/v1/disks", "").json()["disks"][0]["name"], "two");
    assert!(again.stop().success());
    assert!(!control.exists(), "the socket was left behind");
}

#[test]
fn a_second_server_in_the_same_runtime_directory_starts_only_without_a_control_socket() {
    let images = Images::new();
    let (one, two) = (images.create("one.qcow2", &["16M"]), images.create("two.qcow2", &["16M"]));
    let first = Server::start(&["--disk", &disk(&one, "one"), "--nbd", &unix(&images)]);
    let shared = first.control().parent().unwrap().to_str().unwrap().to_owned();
    let (two, nbd) = (disk(&two, "two"), format!("unix:{},rw", images.name("two.sock")));
    let args = ["serve", "--disk", &two, "--nbd", &nbd, "--runtime-dir", &shared];
    let said = run_err(1, args);
    let pid = format!("another server listens there (pid {})", first.pid().as_raw_pid());
    assert!(said.contains(first.control().to_str().unwrap()) && said.contains(&pid), "{said}");
    assert!(!images.path("two.sock").exists(), "it opened exports before it found out");
    let mut second = vmstrata().args(args).arg("--no-control").stdout(Stdio::null()).spawn().unwrap();
    wait_until("the second server", || images.path("two.sock").exists());
    assert_eq!(ask(&first.control(), "GET", "/v1/disks", "").json()["disks"].as_array().unwrap().len(), 1);
    kill_process(Pid::from_child(&second), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert!(first.control().exists(), "the second server took the first one's socket with it");
    assert!(first.stop().success());
}

#[test]
fn metrics_are_served_on_the_loopback_address_and_nothing_else_is() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (text, nbd) = (port.to_string(), unix(&images));
    let server = Server::start(&["--disk", &disk(&path, "a"), "--nbd", &nbd, "--metrics", &text]);
    let fetch_as = |accept: &str, path: &str| {
        let url = format!("http://127.0.0.1:{port}{path}");
        // Less than the server waits for the crowd below to ask for something.
        tool("curl", ["-s", "-i", "-m", "5", "-H", &format!("Accept: {accept}"), &url])
    };
    let fetch = |path: &str| fetch_as("*/*", path);
    let preferred = fetch_as("application/openmetrics-text,text/plain;q=0.3", "/metrics");
    let preferred = String::from_utf8(preferred.stdout).unwrap();
    assert!(preferred.contains("openmetrics-text") && preferred.ends_with("# EOF\n"), "{preferred}");
    let metrics = String::from_utf8(fetch("/metrics").stdout).unwrap();
    assert!(
        metrics.starts_with("HTTP/1.1 200") && metrics.contains("text/plain; version=0.0.4"),
        "{metrics}"
    );
    assert!(metrics.contains("vmstrata_disk_layers{disk=\"a\"} 1\n"), "{metrics}");
    for path in ["/v1/status", "/v1/disks", "/"] {
        assert!(String::from_utf8(fetch(path).stdout).unwrap().starts_with("HTTP/1.1 404"), "{path}");
    }
    // Whoever may read them cannot keep others from the control socket.
    let crowd = loop {
        let connect = |_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let crowd: Vec<_> = (0..70).map(connect).collect();
        // The server lets go of those that ask for nothing: on a slow host, of all before the last has come.
        if !fetch("/metrics").status.success() {
            break crowd;
        }
    };
    assert_eq!(ask(&server.control(), "GET", "/v1/status", "").status, 200);
    drop(crowd);
    assert!(server.stop().success());
}

#[test]
fn events_tell_what_happens_as_it_happens() {
    let images = Images::new();
    let (a, b) = (images.create("a.qcow2", &["16M"]), images.create("b.qcow2", &["16M"]));
    let server = Server::start(&["--disk", &disk(&a, "a"), "--nbd", &unix(&images)]);
    let mut stream = connect(&server.control());
    std::io::Write::write_all(&mut stream, b"GET /v1/events HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut said = String::new();
    let mut wait_for = |part: &str| {
        let mut buffer = [0; 4096];
        while !said.contains(part) {
            let len = stream.read(&mut buffer).unwrap();
            assert!(len > 0, "the stream ended: {said}");
            said.push_str(std::str::from_utf8(&buffer[..len]).unwrap());
        }
    };
    wait_for("text/event-stream");
    server.ask_ok(["disk", "add", &disk(&b, "b")]);
    wait_for("event: disk_added\ndata: {\"event\":\"disk_added\",\"disk\":\"b\"}\n\n");
    server.ask_ok(["resize", b.to_str().unwrap(), "32M"]);
    wait_for("data: {\"event\":\"disk_resized\",\"disk\":\"b\",\"size_bytes\":33554432}\n\n");
    server.ask_ok(["disk", "remove", "b"]);
    wait_for("event: disk_removed");
    // A listener does not keep the server from ending.
    let start = Instant::now();
    assert!(server.stop().success());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_disk_is_resized_and_refusals_say_why() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "a"), "--nbd", &unix(&images)]);
    let put = |name: &str, body: &str| ask(&server.control(), "PUT", &format!("/v1/disks/{name}/size"), body);
    let done = put("a", r#"{"size_bytes":33554432}"#);
    assert_eq!((done.status, &done.json()["from_bytes"]), (200, &json!(16 << 20)));
    for (name, body, status, kind) in [
        ("a", r#"{"size_bytes":1048576}"#, 409, "would-shrink"),
        ("a", r#"{"size_bytes":0}"#, 422, "invalid"),
        ("b", r#"{"size_bytes":1048576}"#, 404, "no-such-disk"),
    ] {
        let refused = put(name, body);
        assert_eq!(refused.status, status, "{body}");
        assert!(refused.json().to_string().contains(kind), "{}", refused.json());
    }
    assert_eq!(put("a", r#"{"size_bytes":1048576,"shrink":true}"#).json()["size_bytes"], 1 << 20);
    assert!(server.stop().success());
}

#[test]
fn a_disk_is_limited_and_freed_while_it_is_served() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let spec = format!("{},iops-total=1000", disk(&path, "a"));
    let server = Server::start(&["--disk", &spec, "--nbd", &unix(&images)]);
    let limits = || ask(&server.control(), "GET", "/v1/disks/a", "").json()["limits"].clone();
    assert_eq!(limits(), json!({ "iops_total": { "rate": 1000 } }));
    // QEMU does not ask for what reads as zeros.
    nbd_io(&server.uri("a"), "write -P 1 0 2M");
    server.ask_ok(["disk", "limit", "a", "bps-read=1"]);
    assert_eq!(limits(), json!({ "bps_read": { "rate": 1 } }), "all others are gone");
    assert!(server.ask_ok(["disk", "show", "a"]).contains("limits: bps-read=1\n"));
    let uri = server.uri("a");
    let reads = ["-r", "-f", "raw", "-c", "read 0 1M", "-c", "read 1M 1M", &uri].map(str::to_owned);
    let reader = std::thread::spawn(move || tool_ok("qemu-io", reads));
    let metric = |name: &str| {
        let text = ask(&server.control(), "GET", "/v1/metrics", "").body;
        let line = text.lines().find(|line| line.starts_with(&format!("vmstrata_{name}{{disk=\"a\"}} ")));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).expect("a metric")
    };
    // The second would wait for days.
    wait_until("a read that waits", || metric("disk_throttled_requests_total") > 0.0);
    assert!(!reader.is_finished());
    server.ask_ok(["disk", "limit", "a", "none"]);
    assert_eq!(reader.join().unwrap().matches("read 1048576/1048576 bytes").count(), 2);
    assert!(metric("disk_throttled_seconds_total") > 0.0);
    let put =
        |name: &str, body: &str| ask(&server.control(), "PUT", &format!("/v1/disks/{name}/limits"), body);
    for (name, body, status, kind) in [
        ("a", r#"{"iops_total":{"rate":0}}"#, 422, "invalid"),
        ("a", r#"{"iops_total":{"rate":10,"max":9}}"#, 422, "invalid"),
        ("b", "{}", 404, "no-such-disk"),
    ] {
        let refused = put(name, body);
        assert_eq!(refused.status, status, "{body}");
        assert!(refused.json().to_string().contains(kind), "{}", refused.json());
    }
    assert_eq!(limits(), Value::Null);
    assert!(server.stop().success());
}

#[test]
fn a_server_without_control_has_no_socket() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "a"), "--nbd", &unix(&images), "--no-control"]);
    assert!(!server.control().exists());
    assert!(server.stop().success());
}

#[test]
fn the_openapi_document_is_served() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let server = Server::start(&["--disk", &disk(&path, "a"), "--nbd", &unix(&images)]);
    let served = ask(&server.control(), "GET", "/v1/openapi.json", "").json();
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let committed: Value = serde_json::from_str(&std::fs::read_to_string(committed).unwrap()).unwrap();
    assert_eq!(served, committed);
    assert!(server.stop().success());
}

#[test]
fn a_disk_has_one_writer_through_all_exports_and_any_number_of_readers() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let (guest, reads) = (images.name("guest.sock"), images.name("reads.sock"));
    let start = |share: &str| {
        let (vhost_user, writes) = (format!("a={guest}{share}"), format!("{}{share}", unix(&images)));
        let exports = ["--vhost-user", &vhost_user, "--nbd", &writes, "--nbd", &format!("unix:{reads}")];
        Server::start(&[&["--disk", &disk(&path, "a")], &exports[..]].concat())
    };
    let write = |server: &Server| tool("qemu-io", ["-f", "raw", "-c", "write 0 64k", &server.uri("a")]);
    let attach = |server: &Server| {
        let frontend = connect(Path::new(&guest));
        wait_until("the guest", || {
            let exports = ask(&server.control(), "GET", "/v1/exports", "").json();
            let mut exports = exports["exports"].as_array().unwrap().iter();
            exports.any(|export| export["export"]["kind"] == "vhost_user" && export["connections"] == 1)
        });
        frontend
    };
    let server = start("");
    let attached = attach(&server);
    assert!(!write(&server).status.success());
    let by = format!("attached for writing by the guest at {guest}");
    assert!(server.log().contains(&by), "{by}: {}", server.log());
    let reader = format!("nbd+unix:///a?socket={reads}");
    tool_ok("qemu-io", ["-f", "raw", "-r", "-c", "read 0 64k", &reader]);
    assert!(tool("nbdinfo", ["--is", "read-only", &reader]).status.success());
    drop(attached);
    wait_until("the guest is gone", || write(&server).status.success());
    let client = Holder::open(Path::new(&server.uri("a")), false);
    let mut second = connect(Path::new(&guest));
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "the frontend is turned away");
    wait_until("the log", || server.log().contains("attached for writing by NBD clients of unix:"));
    client.close();
    assert!(server.stop().success());
    let server = start(",share");
    let _attached = attach(&server);
    assert!(write(&server).status.success(), "{}", server.log());
    assert!(server.stop().success());
}

#[test]
fn an_export_that_other_hosts_reach_is_refused_unless_it_is_called_insecure() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let spec = disk(&path, "a");
    let said = run_err(64, ["serve", "--disk", &spec, "--nbd", "tcp:0.0.0.0:0"]);
    assert!(said.contains("--nbd-tls-client-ca") && said.contains("say insecure"), "{said}");
    let said = run_err(64, ["serve", "--disk", &spec, "--nbd", "unix:s", "--metrics", "0.0.0.0:9100"]);
    assert!(said.contains("0.0.0.0:9100,insecure"), "{said}");
    let server = Server::start(&["--disk", &spec, "--nbd", &unix(&images)]);
    assert!(server.ask_err(["export", "add", "--nbd", "tcp:0.0.0.0:0"]).contains("say insecure"));
    let named = server.ask_err(["export", "add", "--nbd", "tcp:localhost:0,allow=CN=backup:ro"]);
    assert!(named.contains("--nbd-tls-client-ca"), "{named}");
    assert!(server.stop().success());
}

#[test]
fn the_audit_file_says_who_changed_what() {
    let images = Images::new();
    let (a, b) = (images.create("a.qcow2", &["16M"]), images.create("b.qcow2", &["16M"]));
    let audit = images.name("audit");
    let server = Server::start(&["--disk", &disk(&a, "a"), "--nbd", &unix(&images), "--audit", &audit]);
    let mut events = connect(&server.control());
    events.write_all(b"GET /v1/events HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    wait_until("the stream", || events.read(&mut [0; 1 << 12]).unwrap() > 0);
    server.ask_ok(["disk", "add", &disk(&b, "b")]);
    server.ask_ok(["export", "add", "--vhost-user", &format!("b={}", images.name("b.sock"))]);
    for name in ["mon", "tue"] {
        server.ask_ok(["snapshot", "create", a.to_str().unwrap(), "--name", name]);
    }
    server.ask_ok(["snapshot", "delete", a.to_str().unwrap(), "mon"]);
    server.ask_err(["resize", a.to_str().unwrap(), "1M"]);
    server.ask_ok(["resize", a.to_str().unwrap(), "32M"]);
    server.ask_ok(["disk", "limit", "a", "iops-total=1000"]);
    server.ask_ok(["export", "remove", &images.name("b.sock")]);
    server.ask_ok(["disk", "remove", "b"]);
    let text = std::fs::read_to_string(&audit).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let uid = rustix::process::getuid().as_raw();
    assert!(
        lines.iter().all(|line| line["by"]["uid"] == uid && line["by"]["pid"].as_i64() > Some(0)),
        "{text}"
    );
    let said = |line: &Value| {
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
        (text("change"), line["disks"][0].as_str().unwrap_or_default().to_owned(), text("outcome"))
    };
    let expected = [
        ("disk_add", "b", "done"),
        ("export_add", "b", "done"),
        ("snapshot_create", "a", "done"),
        ("snapshot_create", "a", "done"),
        ("job_start", "a", "done"),
        ("snapshot_delete", "a", "done"),
        ("disk_resize", "a", "failed"),
        ("disk_resize", "a", "done"),
        ("disk_limit", "a", "done"),
        ("export_remove", "b", "done"),
        ("disk_remove", "b", "done"),
    ];
    let expected =
        expected.map(|(change, disk, outcome)| (change.to_owned(), disk.to_owned(), outcome.to_owned()));
    assert_eq!(lines.iter().map(said).collect::<Vec<_>>(), expected);
    assert_eq!((&lines[2]["object"], &lines[7]["bytes"]), (&json!("mon"), &json!(32 << 20)));
    assert_eq!(lines[8]["object"], "iops-total=1000");
    assert!(lines[6]["error"].as_str().unwrap().contains("shrink"), "{}", lines[6]);
    let log = server.log();
    assert!(log.contains("outcome=done") && log.contains("outcome=failed"), "{log}");
    assert!(log.contains("change snapshot_create") && log.contains(&format!("uid {uid}, pid ")), "{log}");
    assert!(server.stop().success());
    let mut heard = String::new();
    events.read_to_string(&mut heard).unwrap();
    assert_eq!(heard.matches("event: changed").count(), lines.len(), "{heard}");
}
