//! One server takes over from another under clients that do not notice.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::http::{ask, ask_raw};
use crate::support::server::Server;
use crate::support::{Images, assert_clean, tool_ok, vmstrata};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// What a client needs that waits for its server.
fn reconnecting(images: &Images) -> String {
    format!(
        "driver=nbd,server.type=unix,server.path={},export=web,reconnect-delay=60",
        images.name("nbd.sock")
    )
}

/// `vmstrata serve --replace` in the runtime directory of the server before.
fn replace(server: &Server, args: &[&str], log: &std::path::Path) -> Child {
    let mut child = vmstrata()
        .args(["serve", "--json", "--replace", "--runtime-dir"])
        .arg(server.control().parent().unwrap())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(log).unwrap())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Result<Value, _> = serde_json::from_str(&line);
    assert!(ready.is_ok(), "not ready: {line}{}", std::fs::read_to_string(log).unwrap());
    child
}

fn tell(stdin: &mut ChildStdin, command: &str) {
    writeln!(stdin, "{command}").unwrap();
}

#[test]
fn clients_of_a_replaced_server_see_no_error_and_nothing_is_lost() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["8G"]);
    let args = [
        "--disk",
        &format!("path={},name=web", path.display()),
        "--nbd",
        &format!("unix:{},rw", images.name("nbd.sock")),
    ];
    let mut server = Server::start(&args);
    let first = server.pid();
    // One that is busy all the time, and one that wrote before and reads after.
    let bench = ["bench", "--image-opts", "-w", "-c", "100000", "-d", "16", "-s", "4k", "-S", "4k"];
    let mut busy = Command::new("qemu-img")
        .args(bench)
        .arg(reconnecting(&images))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut calm = Command::new("qemu-io")
        .args(["--image-opts", &reconnecting(&images)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = calm.stdin.take().unwrap();
    tell(&mut stdin, "write -P 7 7G 1M");
    server.wait_for_requests("write", 1000);
    assert!(busy.try_wait().unwrap().is_none(), "the load is over before it begins");
    let start = Instant::now();
    let mut second = replace(&server, &args, &images.path("second.log"));
    let pause = start.elapsed();
    assert!(server.wait().success(), "the first server did not end clean");
    assert!(pause < Duration::from_secs(10), "{pause:?}");
    tell(&mut stdin, "read -P 7 7G 1M");
    tell(&mut stdin, "write -P 8 7G 4k");
    tell(&mut stdin, "quit");
    drop(stdin);
    let said = calm.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success() && !text.contains("ailed") && !text.contains("rror"), "{text}");
    let status = busy.wait().unwrap();
    let mut noticed = String::new();
    busy.stderr.take().unwrap().read_to_string(&mut noticed).unwrap();
    assert!(status.success(), "the busy client noticed: {noticed}");
    let now = ask(&server.control(), "GET", "/v1/status", "").json();
    assert_eq!(now["pid"], second.id());
    assert_ne!(now["pid"], first.as_raw_pid());
    kill_process(Pid::from_child(&second), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_clean(&path);
    tool_ok("qemu-io", ["-c", "read -P 8 7G 4k", "-c", "read -P 7 7516196864 1020k", path.to_str().unwrap()]);
}

/// A configuration with a mistake in it is told before the guests have lost their server.
#[test]
fn a_server_that_could_not_open_a_disk_replaces_none() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["16M"]);
    images.create("torn.qcow2", &["-u", "-b", "gone.qcow2", "-F", "qcow2", "16M"]);
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let disk = format!("path={}", path.display());
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    // A guest of its own has one, another process the backing file of another.
    let in_use = images.create("in-use.qcow2", &["16M"]);
    images.create("on-it.qcow2", &["-b", "in-use.qcow2", "-F", "qcow2"]);
    let mut holder =
        Command::new("qemu-io").arg(&in_use).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut orders = holder.stdin.take().unwrap();
    tell(&mut orders, "length");
    let mut answer = BufReader::new(holder.stdout.take().unwrap());
    answer.read_line(&mut String::new()).unwrap();
    let all = [
        ("torn.qcow2", "gone.qcow2"),
        ("nothing.qcow2", "nothing.qcow2"),
        ("in-use.qcow2", "in-use.qcow2 is in use"),
        ("on-it.qcow2", "in-use.qcow2 is in use"),
    ];
    for (broken, part) in all {
        let output = vmstrata()
            .args(["serve", "--replace", "--runtime-dir"])
            .arg(server.control().parent().unwrap())
            .args(["--disk", &disk, "--nbd", &nbd, "--disk", &format!("path={}", images.name(broken))])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("to be replaced goes on") && said.contains(part), "{said}");
        tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri("web")]);
    }
    drop(orders);
    assert!(holder.wait().unwrap().success());
    assert!(server.stop().success());
}

/// Nobody loses what the server before has not open either; what it has open must be possible for a server that keeps going, too.
#[test]
fn what_waits_in_both_servers_is_in_nobodys_way() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["16M"]);
    images.create("torn.qcow2", &["-u", "-b", "gone.qcow2", "-F", "qcow2", "16M"]);
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let (disk, torn) = (format!("path={}", path.display()), format!("path={}", images.name("torn.qcow2")));
    let args = ["--keep-going", "--disk", &disk, "--disk", &torn, "--nbd", &nbd];
    let mut server = Server::start(&args);
    for broken in [
        &["--disk", &format!("{torn},name=web"), "--nbd", &nbd][..],
        &["--disk", &disk, "--nbd", &nbd, "--metrics", "192.0.2.1:9100,insecure"],
    ] {
        let output = vmstrata()
            .args(["serve", "--replace", "--keep-going", "--runtime-dir"])
            .arg(server.control().parent().unwrap())
            .args(broken)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("to be replaced goes on"), "{said}");
    }
    let mut second = replace(&server, &args, &images.path("second.log"));
    assert!(server.wait().success());
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri("web")]);
    kill_process(Pid::from_child(&second), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
}

#[test]
fn where_there_is_none_to_replace_a_server_is_the_first() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let disk = format!("path={},name=a", path.display());
    let server = Server::start(&[
        "--replace",
        "--disk",
        &disk,
        "--nbd",
        &format!("unix:{},rw", images.name("nbd.sock")),
    ]);
    assert!(server.control().exists());
    // Asked twice at once, as by two servers that are to replace it: it ends clean all the same.
    let request = b"POST /v1/shutdown HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(ask_raw(&server.control(), &request.repeat(2)).unwrap().status, 202);
    let mut server = server;
    assert!(server.wait().success(), "asked to end, it ends as by a signal");
    assert_clean(&path);
}

/// A socket in a missing directory, where a file lies, for an unknown group, or on an unknown host.
#[test]
fn a_server_that_could_not_open_a_export_replaces_none() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["16M"]);
    let (nbd, disk) = (format!("unix:{},rw", images.name("nbd.sock")), format!("path={}", path.display()));
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    let missing = images.name("no-such-directory/web.sock");
    // Longer than any host's name, so that nobody is asked for it.
    let host = format!("tcp:{}:7,insecure", "h".repeat(300));
    for (flag, place, part) in [
        ("--vhost-user", format!("web={missing}"), "No such file or directory"),
        ("--vhost-user", format!("web={}", path.display()), "not a socket"),
        ("--vhost-user", format!("web={},group=nosuchgroup", images.name("web.sock")), "there is no group"),
        ("--nbd-group", "nosuchgroup".to_owned(), "there is no group"),
        ("--nbd", format!("unix:{missing}"), "No such file or directory"),
        ("--nbd", format!("unix:{}", path.display()), "not a socket"),
        ("--nbd", host, "hhh"),
    ] {
        let output = vmstrata()
            .args(["serve", "--replace", "--runtime-dir"])
            .arg(server.control().parent().unwrap())
            .args(["--disk", &disk, "--nbd", &nbd, flag, &place])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("to be replaced goes on") && said.contains(part), "{said}");
        tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri("web")]);
    }
    assert!(server.stop().success());
}
