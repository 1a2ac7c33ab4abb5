//! `vmstrata serve` from the outside: clients, signals, locks, crashes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::server::Server;
use crate::support::{
    Holder, Images, assert_clean, run_err, stderr, tool, tool_json, tool_ok, vmstrata, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

/// `--disk path=FILE,name=disk` and more.
fn disk(path: &Path, more: &str) -> String {
    format!("path={},name=disk{more}", path.display())
}

fn unix(images: &Images) -> String {
    format!("unix:{},rw", images.name("nbd.sock"))
}

/// Runs one qemu-io command on an NBD export, which must not fail.
fn nbd_io(uri: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, uri]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

fn assert_same_content(one: &str, other: &str, format: &str) {
    let said = tool("qemu-img", ["compare", "-f", format, "-F", "raw", one, other]);
    assert!(said.status.success(), "{}{}", String::from_utf8_lossy(&said.stdout), stderr(&said));
}

#[test]
fn a_chain_of_300_layers_reads_the_same_as_through_stock_tools() {
    let images = Images::new();
    let top = images.long_chain(300);
    let server = Server::start(&["--disk", &disk(&top, ",read-only"), "--nbd", &unix(&images)]);
    assert_eq!(server.ready["disks"][0]["layers"], 300);
    let info = tool_json("nbdinfo", ["--json", &server.uri("disk")]);
    assert_eq!(info["exports"][0]["export-size"], (300 + 8) << 16);
    tool_ok("nbdcopy", [&server.uri("disk"), &images.name("copy.raw")]);
    assert_same_content(top.to_str().unwrap(), &images.name("copy.raw"), "qcow2");
    assert!(server.stop().success());
}

#[test]
fn what_clients_write_is_in_the_image_when_the_server_has_ended() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    images.write_layer("base.qcow2", &["write -P 1 0 4M"]);
    let top = images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let base_before = fs::read(images.path("base.qcow2")).unwrap();
    let server = Server::start(&["--disk", &disk(&top, ""), "--nbd", &unix(&images)]);
    nbd_io(&server.uri("disk"), "write -P 2 4k 8k");
    nbd_io(&server.uri("disk"), "write -P 3 10M 1M");
    nbd_io(&server.uri("disk"), "write -z 1M 64k");
    tool_ok("nbdcopy", [&server.uri("disk"), &images.name("copy.raw")]);
    assert!(server.stop().success());
    assert_clean(&top);
    assert_same_content(top.to_str().unwrap(), &images.name("copy.raw"), "qcow2");
    for (pattern, range) in [(1, "0 4k"), (2, "4k 8k"), (1, "12k 1012k"), (0, "1M 64k"), (3, "10M 1M")] {
        let said = tool_ok("qemu-io", ["-c", &format!("read -P {pattern} {range}"), top.to_str().unwrap()]);
        assert!(!said.contains("failed"), "{pattern} at {range}: {said}");
    }
    assert_eq!(fs::read(images.path("base.qcow2")).unwrap(), base_before, "the base changed");
}

#[test]
fn a_served_disk_is_locked_against_stock_tools_and_free_afterwards() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    let top = images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let server = Server::start(&["--disk", &disk(&top, ""), "--nbd", &unix(&images)]);
    for (file, mode) in [
        ("top.qcow2", &["-c", "quit"][..]),
        ("top.qcow2", &["-r", "-c", "quit"]),
        ("base.qcow2", &["-c", "quit"]),
    ] {
        let refused = tool("qemu-io", [mode, &[&images.name(file)]].concat());
        assert!(stderr(&refused).contains("lock"), "{file} {mode:?}: {}", stderr(&refused));
    }
    tool_ok("qemu-io", ["-r", "-c", "quit", &images.name("base.qcow2")]);
    assert!(server.stop().success());
    for file in ["top.qcow2", "base.qcow2"] {
        tool_ok("qemu-io", ["-c", "quit", &images.name(file)]);
    }
}

#[test]
fn a_disk_that_stock_tools_write_is_refused() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    let top = images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let spec = disk(&top, "");
    let runtime = images.name("run");
    let serve = ["serve", "--disk", &spec, "--nbd", &unix(&images), "--runtime-dir", &runtime];
    for file in ["top.qcow2", "base.qcow2"] {
        let user = Holder::open(&images.path(file), false);
        let message = run_err(1, serve);
        assert!(message.contains(file) && message.contains("in use"), "{message}");
        assert!(!images.path("nbd.sock").exists(), "a socket was left behind");
        user.close();
    }
    let reader = Holder::open(&images.path("base.qcow2"), true);
    assert!(Server::start(&serve[1..5]).stop().success());
    reader.close();
}

#[test]
fn read_only_disks_can_be_served_twice_and_not_be_written() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let spec = disk(&path, ",read-only");
    let first = Server::start(&["--disk", &spec, "--nbd", &unix(&images)]);
    let second =
        Server::start(&["--disk", &spec, "--nbd", &format!("unix:{},rw", images.name("second.sock"))]);
    let refused = tool("qemu-io", ["-f", "raw", "-c", "write 0 64k", &first.uri("disk")]);
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(tool_json("nbdinfo", ["--json", &second.uri("disk")])["exports"][0]["is_read_only"], true);
    assert!(first.stop().success() && second.stop().success());
}

#[test]
fn two_disks_on_one_base_are_served_side_by_side() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    images.write_layer("base.qcow2", &["write -P 9 0 1M"]);
    let mut args = vec!["--nbd".to_owned(), "tcp:127.0.0.1:0,rw".to_owned()];
    for name in ["one", "two"] {
        let path = images.create(&format!("{name}.qcow2"), &["-b", "base.qcow2", "-F", "qcow2"]);
        args.extend(["--disk".to_owned(), format!("path={}", path.display())]);
    }
    let server = Server::start(&args.iter().map(String::as_str).collect::<Vec<_>>());
    for (name, pattern) in [("one", 1), ("two", 2)] {
        nbd_io(&server.uri(name), &format!("write -P {pattern} 64k 64k"));
    }
    for (name, pattern) in [("one", 1), ("two", 2)] {
        nbd_io(&server.uri(name), &format!("read -P {pattern} 64k 64k"));
        nbd_io(&server.uri(name), "read -P 9 0 64k");
    }
    let listed = tool_json("nbdinfo", ["--list", "--json", &server.uri("one")]);
    let names: Vec<_> =
        listed["exports"].as_array().unwrap().iter().map(|export| &export["export-name"]).collect();
    assert_eq!(names, ["one", "two"]);
    assert!(server.stop().success());
    assert_clean(&images.path("one.qcow2"));
    assert_clean(&images.path("two.qcow2"));
}

/// A client that is told what to do line by line, and so stays connected in between.
struct Client {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Client {
    fn connect(uri: &str) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", uri]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Self { child, said }
    }

    fn write(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        // Two lines: what was done, and how fast.
        let mut said = String::new();
        self.said.read_line(&mut said).unwrap();
        self.said.read_line(&mut said).unwrap();
        assert!(said.contains("wrote"), "{said}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn writes_that_completed_survive_a_killed_server() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let args = ["--disk", &disk(&path, ""), "--nbd", &unix(&images)];
    let server = Server::start(&args);
    let mut client = Client::connect(&server.uri("disk"));
    // Without a flush: what keeps them is the journal in the runtime directory.
    client.write("write -P 1 0 64k");
    client.write("write -P 2 5M 256k");
    client.write("write -P 3 5M 4k");
    let runtime = server.crash();
    drop(client);
    let checked = tool("qemu-img", ["check", path.to_str().unwrap()]);
    assert!(matches!(checked.status.code(), Some(0 | 3)), "corrupt after a crash: {}", stderr(&checked));
    let server = Server::start_in(runtime, &args);
    for (pattern, range) in [(1, "0 64k"), (3, "5M 4k"), (2, "5124k 252k")] {
        nbd_io(&server.uri("disk"), &format!("read -P {pattern} {range}"));
    }
    assert!(server.stop().success());
    assert_clean(&path);
}

#[test]
fn a_server_told_to_end_in_the_middle_of_writes_ends_clean() {
    let images = Images::new();
    images.create("base.qcow2", &["256M"]);
    images.write_layer("base.qcow2", &["write -P 1 0 64M"]);
    let top = images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let server = Server::start(&["--disk", &disk(&top, ""), "--nbd", &unix(&images)]);
    let bench = ["bench", "-f", "raw", "-w", "-c", "1000000", "-d", "32", "-s", "4k", "-S", "68k"];
    let mut writer = Command::new("qemu-img")
        .args(bench)
        .arg(server.uri("disk"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let allocated = || std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&top).unwrap()) * 512;
    let empty = allocated();
    wait_until("writes", || allocated() >= empty + (1 << 20));
    let status = server.stop();
    // The writer finds its server gone.
    let _ = writer.kill();
    writer.wait().unwrap();
    assert!(status.success(), "{status:?}");
    assert_clean(&top);
}

#[test]
fn a_second_signal_ends_a_server_whose_client_does_not_take_its_replies() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["64M"]);
    images.write_layer("a.qcow2", &["write -P 1 0 64M"]);
    let mut server = Server::start(&["--disk", &disk(&path, ""), "--nbd", &unix(&images)]);
    let bench = ["bench", "-f", "raw", "-c", "1000000", "-d", "16", "-s", "1M"];
    let mut reader =
        Command::new("qemu-img").args(bench).arg(server.uri("disk")).stdout(Stdio::null()).spawn().unwrap();
    server.wait_for_requests("read", 100);
    // Stopped with 16 MiB on their way to it, far more than a socket holds.
    kill_process(Pid::from_child(&reader), Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    kill_process(server.pid(), Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(server.is_running(), "it did not wait for its client: {}", server.log());
    let insisted = std::time::Instant::now();
    kill_process(server.pid(), Signal::TERM).unwrap();
    assert_eq!(server.wait().code(), Some(143));
    assert!(insisted.elapsed() < Duration::from_secs(2), "{:?}", insisted.elapsed());
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert_clean(&path);
}

#[test]
fn whoever_waits_is_told_when_it_is_ready_and_when_it_ends() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let manager = UnixDatagram::bind(images.path("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut child = vmstrata()
        .args(["serve", "--disk", &disk(&path, ""), "--nbd", &unix(&images), "--ready-fd", "2"])
        .args(["--runtime-dir", &images.name("run")])
        .env("NOTIFY_SOCKET", images.path("notify"))
        .env("RUST_LOG", "off")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let told = |manager: &UnixDatagram| {
        let mut buffer = [0; 256];
        let len = manager.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    };
    assert_eq!(told(&manager), "READY=1\nSTATUS=1 disk");
    nbd_io(&format!("nbd+unix:///disk?socket={}", images.name("nbd.sock")), "read 0 64k");
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT)
        .unwrap();
    assert_eq!(told(&manager), "STOPPING=1");
    assert!(child.wait().unwrap().success());
    let mut ready = String::new();
    child.stderr.take().unwrap().read_to_string(&mut ready).unwrap();
    assert_eq!(ready, "READY=1\n");
}

#[test]
fn the_printed_qemu_lines_attach_the_disk() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["64M"]);
    let socket = images.name("a,b.sock");
    let server = Server::start(&[
        "--disk",
        &disk(&path, ""),
        "--vhost-user",
        &format!("disk={},serial=S1", socket.replace(',', ",,")),
    ]);
    let lines = server.ready["disks"][0]["vhost_user"][0]["qemu"].as_array().unwrap().clone();
    let mut qemu = Command::new("qemu-system-x86_64")
        .args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-qmp", "stdio"])
        .args(lines.iter().map(|word| word.as_str().unwrap()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let commands = br#"{"execute":"qmp_capabilities"} {"execute":"query-pci"} {"execute":"quit"}"#;
    qemu.stdin.as_mut().unwrap().write_all(commands).unwrap();
    let output = qemu.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(said.contains(r#""qdev_id": "disk""#), "{said}{}", stderr(&output));
    assert!(server.log().contains("frontend connected"), "{}", server.log());
    assert!(server.stop().success());
    assert!(!Path::new(&socket).exists(), "the socket was left behind");
    assert_clean(&path);
}

#[test]
fn what_keeps_a_server_from_starting_is_said_and_nothing_is_left_locked() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    images.create("orphan.qcow2", &["-u", "-b", "gone.qcow2", "-F", "qcow2", "16M"]);
    fs::write(images.path("file"), "no socket").unwrap();
    fs::write(images.path("bad.pem"), "no certificate").unwrap();
    let (good, orphan, absent) =
        (disk(&path, ""), disk(&images.path("orphan.qcow2"), ""), disk(&images.path("absent"), ""));
    let (runtime, file, pem) = (images.name("run"), images.name("file"), images.name("bad.pem"));
    let nbd = unix(&images);
    let on_file = format!("unix:{file}");
    let vhost_on_file = format!("disk={file}");
    for (args, part) in [
        (&["--disk", &absent, "--nbd", &nbd][..], "absent"),
        (&["--disk", &orphan, "--nbd", &nbd], "gone.qcow2"),
        (&["--disk", &good, "--nbd", &on_file], "cannot listen"),
        (&["--disk", &good, "--vhost-user", &vhost_on_file], "not a socket"),
        (&["--disk", &good, "--nbd", "tcp:host.invalid:1,insecure"], "host.invalid"),
        (&["--disk", &good, "--nbd", &nbd, "--nbd-tls-cert", &pem, "--nbd-tls-key", &pem], "bad.pem"),
        (&["--disk", &good, "--nbd", &nbd, "--ready-fd", "987654"], "--ready-fd 987654"),
        (&["--disk", &orphan, "--nbd", &nbd, "--allow-backing", "/absent/dir"], "/absent/dir"),
    ] {
        let mut command = vmstrata();
        command.args(["serve", "--runtime-dir", &runtime]).args(args).stdout(Stdio::null());
        let output = command.output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        let last = said.lines().last().unwrap();
        assert!(last.starts_with("vmstrata: error: ") && last.contains(part), "{args:?}: {said}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"no socket");
    assert_clean(&path);
    tool_ok("qemu-io", ["-c", "quit", path.to_str().unwrap()]);
}

#[test]
fn clients_without_tls_are_turned_away_when_there_is_a_certificate() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let (cert, key) = (images.name("cert.pem"), images.name("key.pem"));
    let subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"];
    let request =
        ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", &key, "-out", &cert];
    tool_ok("openssl", [&request[..], &subject].concat());
    let args = [
        "--disk",
        &disk(&path, ""),
        "--nbd",
        "tcp:localhost:0",
        "--nbd-tls-cert",
        &cert,
        "--nbd-tls-key",
        &key,
    ];
    let server = Server::start(&args);
    let uri = server.uri("disk");
    assert!(uri.starts_with("nbds://localhost:"), "{uri}");
    assert!(!tool("nbdinfo", [uri.replace("nbds:", "nbd:")]).status.success(), "served without TLS");
    fs::create_dir(images.path("pki")).unwrap();
    fs::copy(&cert, images.path("pki/ca-cert.pem")).unwrap();
    let size = tool_ok("nbdinfo", ["--size", &format!("{uri}?tls-certificates={}", images.name("pki"))]);
    assert_eq!(size.trim(), (16 << 20).to_string());
    assert!(server.stop().success());
}

#[test]
fn logs_can_be_json() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let config = images.name("vmstrata.toml");
    std::fs::write(&config, "log-format = \"json\"\n").unwrap();
    for how in [["--log-format", "json"], ["--config", &config]] {
        let args = ["--disk", &disk(&path, ""), "--nbd", &unix(&images)];
        let server = Server::start(&[&args[..], &how].concat());
        nbd_io(&server.uri("disk"), "read 0 64k");
        for line in server.log().lines() {
            let event: serde_json::Value =
                serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
            assert!(event["level"].is_string() && event["message"].is_string(), "{line}");
        }
        assert!(server.log().contains("opened: 1 layer"), "{}", server.log());
        assert!(server.stop().success());
    }
}

/// Every line of the log fails to be written, from the first on.
#[test]
fn a_log_that_cannot_be_written_ends_no_server() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["1M"]);
    let (runtime, full) = (tempfile::tempdir().unwrap(), fs::File::options().write(true).open("/dev/full"));
    let mut server = vmstrata()
        .env("RUST_LOG", "debug")
        .args(["serve", "--json", "--disk", &disk(&path, ""), "--nbd", &unix(&images)])
        .arg("--runtime-dir")
        .arg(runtime.path())
        .stdout(Stdio::piped())
        .stderr(full.unwrap())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).expect("it is ready");
    let uri = ready["disks"][0]["nbd"][0]["uri"].as_str().unwrap().to_owned();
    nbd_io(&uri, "write -P 7 0 64k");
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success(), "it ends clean");
    assert_clean(&path);
}
