//! The control socket against clients that are wrong, slow, many or malicious.

use crate::support;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::http::{ask, ask_raw, connect, read_answer};
use crate::support::server::Server;
use crate::support::{Holder, Images, stderr, tool_ok};
use serde_json::Value;

fn start(images: &Images) -> Server {
    let path = images.create("a.qcow2", &["16M"]);
    let (disk, nbd) =
        (format!("path={},name=a", path.display()), format!("unix:{},rw", images.name("nbd.sock")));
    Server::start(&["--disk", &disk, "--nbd", &nbd])
}

fn still_serves(server: &Server) {
    assert_eq!(ask(&server.control(), "GET", "/v1/status", "").status, 200);
    tool_ok("qemu-io", ["-f", "raw", "-c", "read 0 64k", &server.uri("a")]);
}

/// Asks for what cannot be had, and looks at the problem that comes back.
fn refused(server: &Server, method: &str, path: &str, body: &str, status: u16, kind: &str) -> Value {
    let answer = ask(&server.control(), method, path, body);
    let problem = answer.json();
    assert_eq!((answer.status, problem["kind"].as_str().unwrap()), (status, kind), "{body}: {problem}");
    assert!(answer.header.contains("application/problem+json"), "{}", answer.header);
    assert_eq!((&problem["status"], &problem["type"]), (&status.into(), &format!("vmstrata:{kind}").into()));
    problem
}

#[test]
fn what_is_not_there_and_what_makes_no_sense_is_a_problem_with_its_kind() {
    let images = Images::new();
    let server = start(&images);
    for (method, path, body, status, kind) in [
        ("GET", "/v1/disks/none", "", 404, "no-such-disk"),
        ("DELETE", "/v1/disks/none", "", 404, "no-such-disk"),
        ("DELETE", "/v1/exports/99", "", 404, "no-such-export"),
        ("DELETE", "/v1/exports/x", "", 404, "no-such-export"),
        ("GET", "/v1/jobs/99", "", 404, "no-such-job"),
        ("POST", "/v1/jobs/1", r#"{"action":"cancel"}"#, 404, "no-such-job"),
        ("POST", "/v1/jobs", r#"{"kind":"index_build","disk":"none"}"#, 404, "no-such-disk"),
        ("GET", "/v2/status", "", 404, "no-such-path"),
        ("PUT", "/v1/disks", "", 405, "no-such-method"),
        ("POST", "/v1/disks", "{", 400, "bad-json"),
        ("POST", "/v1/disks", "", 400, "bad-json"),
        ("POST", "/v1/disks", r#"{"path":"a","readonly":true}"#, 422, "invalid"),
        ("POST", "/v1/disks", r#"{"path":"a","name":"b=c"}"#, 422, "invalid"),
        ("POST", "/v1/disks", r#"{"path":"x","name":"a"}"#, 409, "name-taken"),
        ("POST", "/v1/disks", r#"{"path":"","name":"b"}"#, 422, "invalid"),
        ("POST", "/v1/disks", r#"{"path":"b\u0000"}"#, 422, "invalid"),
        ("POST", "/v1/disks", r#"{"path":"b","agent":""}"#, 422, "invalid"),
        ("POST", "/v1/disks", r#"{"path":"b","at":"mon","clone":"","name":"b"}"#, 422, "invalid"),
        ("POST", "/v1/disks", r#"{"path":"b","backing":[""]}"#, 422, "invalid"),
        ("POST", "/v1/snapshots", r#"{"disks":["a"],"name":"s","agent":""}"#, 422, "invalid"),
        ("POST", "/v1/disks/a/revert", r#"{"snapshot":"s","keep":""}"#, 422, "invalid"),
        ("POST", "/v1/jobs", r#"{"kind":"flatten","disk":"a","onto":{"file":"/a\u0000"}}"#, 422, "invalid"),
        ("POST", "/v1/exports", r#"{"kind":"vhost_user","disk":"a","socket":"s\u0000"}"#, 422, "invalid"),
        ("POST", "/v1/exports", r#"{"kind":"nbd","address":"unix:s\u0000"}"#, 422, "invalid"),
        ("POST", "/v1/exports", r#"{"kind":"nbd","address":"tcp:h\u0000"}"#, 422, "invalid"),
        ("POST", "/v1/exports", r#"{"kind":"fuse"}"#, 422, "invalid"),
        ("POST", "/v1/exports", r#"{"kind":"nbd","address":"/run/x"}"#, 422, "invalid"),
        ("POST", "/v1/exports", r#"{"kind":"vhost_user","disk":"x","socket":"s"}"#, 404, "no-such-disk"),
        (
            "POST",
            "/v1/exports",
            r#"{"kind":"vhost_user","disk":"a","socket":"s","queues":999}"#,
            422,
            "invalid",
        ),
    ] {
        refused(&server, method, path, body, status, kind);
    }
    still_serves(&server);
    let status = ask(&server.control(), "GET", "/v1/status", "").json();
    assert_eq!(
        (status["disks"].as_array().unwrap().len(), status["exports"].as_array().unwrap().len()),
        (1, 1)
    );
    assert!(server.stop().success());
}

#[test]
fn a_file_that_cannot_be_served_is_named_in_the_problem() {
    let images = Images::new();
    let server = start(&images);
    let version = images.create("version.qcow2", &["16M"]);
    let mut bytes = std::fs::read(&version).unwrap();
    bytes[4..8].copy_from_slice(&99_u32.to_be_bytes());
    std::fs::write(&version, bytes).unwrap();
    images.create("orphan.qcow2", &["-u", "-b", "/absent/base.qcow2", "-F", "qcow2", "16M"]);
    for (name, status, kind) in [
        ("a.qcow2", 409, "already-served"),
        ("absent.qcow2", 422, "file-not-allowed"),
        ("orphan.qcow2", 422, "file-not-allowed"),
        ("version.qcow2", 422, "not-supported"),
    ] {
        let body = format!(r#"{{"path":{:?},"name":"new"}}"#, images.name(name));
        let problem = refused(&server, "POST", "/v1/disks", &body, status, kind);
        let said = problem.to_string();
        assert!(said.contains(name) || said.contains("/absent/base.qcow2"), "{said}");
    }
    let body = format!(r#"{{"path":{:?}}}"#, images.name("version.qcow2"));
    let problem = refused(&server, "POST", "/v1/disks", &body, 422, "not-supported");
    assert_eq!(problem["file"].as_str().unwrap(), images.name("version.qcow2"), "{problem}");
    let on_file = images.name("version.qcow2");
    let export = format!(r#"{{"kind":"vhost_user","disk":"a","socket":{on_file:?}}}"#);
    refused(&server, "POST", "/v1/exports", &export, 409, "not-a-socket");
    still_serves(&server);
    assert!(server.stop().success());
}

#[test]
fn bodies_and_headers_are_bounded() {
    let images = Images::new();
    let server = start(&images);
    let control = server.control();
    let huge = format!(r#"{{"path":"{}"}}"#, "a".repeat(70_000));
    assert_eq!(ask(&control, "POST", "/v1/disks", &huge).status, 413);
    // Said to be huge, and endless without a length.
    let announced = b"POST /v1/disks HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n";
    assert_eq!(ask_raw(&control, announced).unwrap().status, 413);
    let mut endless = b"POST /v1/disks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..40 {
        endless.extend(b"1000\r\n");
        endless.extend([b' '; 4096]);
        endless.extend(b"\r\n");
    }
    assert_eq!(ask_raw(&control, &endless).unwrap().status, 413);
    let header = format!("GET /v1/status HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    assert_eq!(ask_raw(&control, header.as_bytes()).unwrap().status, 431);
    for garbage in
        [&b"\x00\x01\x02\x03\r\n\r\n"[..], b"NBDMAGIC", b"GET / HTTP/9\r\n\r\n", b"\r\n\r\n\r\n\r\nx y"]
    {
        let mut stream = connect(&control);
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        if let Some(answer) = read_answer(&mut stream) {
            assert!((400..600).contains(&answer.status), "{garbage:?}: {answer:?}");
        }
    }
    still_serves(&server);
    assert!(server.stop().success());
}

#[test]
fn slow_clients_are_cut_off_and_hold_up_nobody() {
    let images = Images::new();
    let server = start(&images);
    let control = server.control();
    let mut slow_header = connect(&control);
    slow_header.write_all(b"GET /v1/status HTT").unwrap();
    let mut slow_body = connect(&control);
    slow_body.write_all(b"POST /v1/disks HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{").unwrap();
    let start = Instant::now();
    still_serves(&server);
    assert!(start.elapsed() < Duration::from_secs(5), "others wait for slow ones");
    let timed_out = read_answer(&mut slow_body).unwrap();
    assert_eq!(timed_out.json()["kind"], "too-slow");
    let mut rest = Vec::new();
    let _ = slow_header.read_to_end(&mut rest);
    assert!(start.elapsed() < Duration::from_secs(25), "{:?}", start.elapsed());
    still_serves(&server);
    assert!(server.stop().success());
}

#[test]
fn a_crowd_finds_the_export_shut_and_the_server_unmoved() {
    let images = Images::new();
    let server = start(&images);
    let control = server.control();
    let crowd: Vec<_> = (0..64).map(|_| connect(&control)).collect();
    let mut late = connect(&control);
    let _ = late.write_all(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(read_answer(&mut late).is_none(), "the 65th connection is closed");
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri("a")]);
    drop(crowd);
    support::wait_until("a free place", || {
        let mut stream = connect(&control);
        let _ = stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        read_answer(&mut stream).is_some_and(|answer| answer.status == 200)
    });
    assert!(server.stop().success());
}

/// Whoever only listens leaves room for those who ask.
#[test]
fn streams_of_events_take_half_of_the_places_at_most() {
    let images = Images::new();
    let server = start(&images);
    let control = server.control();
    let listen = || {
        let mut stream = connect(&control);
        stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).unwrap();
        (stream, String::from_utf8_lossy(&begin).into_owned())
    };
    let listening: Vec<_> = (0..32).map(|_| listen()).collect();
    assert!(listening.iter().all(|(_, said)| said.ends_with("200")));
    assert!(listen().1.ends_with("503"));
    still_serves(&server);
    drop(listening);
    support::wait_until("a place", || listen().1.ends_with("200"));
    assert!(server.stop().success());
}

#[test]
fn a_name_that_is_no_text_is_a_problem_like_others() {
    let images = Images::new();
    let server = start(&images);
    for path in ["/v1/disks/%ff", "/v1/exports/%ff", "/v1/jobs/%ff"] {
        let answer = ask(&server.control(), "GET", path, "");
        assert_eq!((answer.status, &answer.json()["kind"]), (422, &"invalid".into()), "{path}");
    }
    let export = ask(&server.control(), "GET", "/v1/exports/1", "").json();
    assert_eq!(export["id"], 1, "{export}");
    assert_eq!(ask(&server.control(), "GET", "/v1/exports/99", "").json()["kind"], "no-such-export");
    assert!(server.stop().success());
}

/// Waits until the disk `b` is in a state, or is not there.
fn wait_for(server: &Server, state: Option<&str>) {
    support::wait_for("its state", || {
        let answer = ask(&server.control(), "GET", "/v1/disks/b", "");
        let found = (answer.status == 200).then(|| answer.json()["state"].as_str().unwrap().to_owned());
        if found.as_deref() == state { Ok(()) } else { Err(found) }
    });
}

fn ask_for(server: &Server, path: &Path) -> UnixStream {
    let body = format!(r#"{{"path":{:?}}}"#, path.to_str().unwrap());
    let mut stream = connect(&server.control());
    let request =
        format!("POST /v1/disks HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

#[test]
fn a_client_that_leaves_does_not_stop_what_it_asked_for() {
    let images = Images::new();
    let server = start(&images);
    let path = images.create("b.qcow2", &["16M"]);
    for _ in 0..3 {
        // The disk is being opened, and will be until its file is free.
        let holder = Holder::open(&path, false);
        let stream = ask_for(&server, &path);
        wait_for(&server, Some("opening"));
        drop(stream);
        // The server has one thread for connections: by now it has seen this one end.
        wait_for(&server, Some("opening"));
        holder.close();
        wait_for(&server, Some("serving"));
        assert_eq!(ask(&server.control(), "DELETE", "/v1/disks/b", "").status, 204);
    }
    still_serves(&server);
    assert!(server.stop().success());
}

/// Whether what it asked for is begun is a race between its request and its leaving. It is never done by half, and is in
/// nobody's way.
#[test]
fn a_client_that_leaves_at_once_leaves_nothing_half_done() {
    let images = Images::new();
    let server = start(&images);
    let path = images.create("b.qcow2", &["16M"]);
    let body = format!(r#"{{"path":{:?}}}"#, path.to_str().unwrap());
    for _ in 0..20 {
        drop(ask_for(&server, &path));
        let answer = ask(&server.control(), "POST", "/v1/disks", &body);
        assert!([201, 409].contains(&answer.status), "{answer:?}");
        wait_for(&server, Some("serving"));
        assert_eq!(ask(&server.control(), "DELETE", "/v1/disks/b", "").status, 204);
        wait_for(&server, None);
        // Nobody has its file open any more.
        tool_ok("qemu-io", ["-f", "qcow2", "-c", "write 0 64k", path.to_str().unwrap()]);
    }
    still_serves(&server);
    assert!(server.stop().success());
}

/// What a process of another user gets that connects to the control socket, in the words of a stock tool.
fn connect_as(user: Option<u32>, socket: &Path) -> String {
    let mut command = Command::new("qemu-io");
    command.args(["-r", "-f", "raw", "-c", "quit", &format!("nbd+unix:///?socket={}", socket.display())]);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    stderr(&command.output().expect("qemu-io is required by these tests"))
}

#[test]
fn only_the_owner_may_connect() {
    let images = Images::new();
    let server = start(&images);
    let control = server.control();
    let mode = std::fs::metadata(&control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // It is not its directory that keeps others out.
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(control.parent().unwrap(), open).unwrap();
    let owner = connect_as(None, &control);
    assert!(!owner.is_empty() && !owner.contains("Permission denied"), "{owner}");
    // Only root can be somebody else.
    if rustix::process::geteuid().is_root() {
        let other = connect_as(Some(65_534), &control);
        assert!(other.contains("Permission denied"), "{other}");
    }
    still_serves(&server);
    assert!(server.stop().success());
}
