//! Peers that keep to the protocol, and peers that do not.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}"#;

/// A peer that greets with `greeting` and answers the commands in turn, each with some lines.
fn peer(greeting: &str, answers: &[&str]) -> (tempfile::TempDir, JoinHandle<Vec<String>>) {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
    let (greeting, answers) =
        (greeting.to_owned(), answers.iter().map(|&answer| answer.to_owned()).collect::<Vec<_>>());
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        // The client may hang up at any word.
        let _ = stream.write_all(greeting.as_bytes());
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        for answer in answers {
            let Some(Ok(line)) = lines.next() else { break };
            let _ = stream.write_all(answer.replace(ID, &id(&line)).as_bytes());
            asked.push(line);
        }
        asked
    });
    (dir, thread)
}

/// Stands for the id of the command in what a [`peer`] answers.
const ID: &str = "\"?\"";

/// The id of a command, as JSON.
fn id(line: &str) -> String {
    serde_json::from_str::<Value>(line).unwrap()["id"].to_string()
}

fn greeting() -> String {
    format!("{GREETING}\r\n")
}

fn connect(dir: &tempfile::TempDir) -> Result<Qmp, QmpError> {
    Qmp::connect(&dir.path().join("qmp"), PATIENCE)
}

#[test]
fn commands_are_answered_past_events() {
    let stop = r#"{"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 2}}"#;
    let status = format!("{stop}\r\n{{\"return\": {{\"status\": \"paused\"}}}}\r\n");
    let (dir, thread) = peer(&greeting(), &["{\"return\": {}}\n", &status]);
    let mut qmp = connect(&dir).unwrap();
    let answer: Value = qmp.ask("query-status", json!({})).unwrap();
    assert_eq!(answer["status"], "paused");
    let asked = thread.join().unwrap();
    assert!(asked[0].contains("qmp_capabilities") && asked[1].contains("query-status"));
    assert!(matches!(qmp.tell("query-status", json!({})), Err(QmpError::Closed)));
}

#[test]
fn what_was_meant_for_a_client_that_is_gone_is_passed_over() {
    let early =
        "{\"event\": \"STOP\"}\n{\"return\": {}, \"id\": \"1-7\"}\n{\"error\": {}, \"id\": \"1-8\"}\n";
    let late = "{\"return\": 1, \"id\": \"1-9\"}\n{\"error\": {\"class\": \"E\"}, \"id\": 3}\n";
    let answer = |value: u32| format!("{late}{{\"return\": {value}, \"id\": \"?\"}}\n");
    let (dir, thread) = peer(&format!("{early}{}", greeting()), &[&answer(0), &answer(7)]);
    assert_eq!(connect(&dir).unwrap().ask::<u64>("x", json!({})).unwrap(), 7);
    let asked = thread.join().unwrap();
    assert_ne!(id(&asked[0]), id(&asked[1]));
}

#[test]
fn a_refusal_has_the_words_of_qemu() {
    let refused = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such thing\"}}\n";
    let (dir, _thread) = peer(&greeting(), &["{\"return\": {}}\n", refused]);
    let error = connect(&dir).unwrap().tell("qom-get", json!({ "path": "/x" })).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refuses qom-get: no such thing");
}

#[test]
fn peers_that_are_no_qemu_are_errors() {
    for (greeting, part) in [
        ("HTTP/1.1 400 Bad Request\r\n", "no JSON"),
        ("{}\n", "no greeting"),
        ("[[[[\n", "no JSON"),
        ("", "closed its monitor"),
        ("{\"QMP\": ", "closed its monitor"),
    ] {
        let (dir, thread) = peer(greeting, &[]);
        let error = connect(&dir).unwrap_err().to_string();
        assert!(error.contains(part), "{greeting:?}: {error}");
        thread.join().unwrap();
    }
    let deep = format!("{}\n", "[".repeat(100_000));
    let (dir, _thread) = peer(&greeting(), &["{\"return\": {}}\n", &deep]);
    let deep = connect(&dir).unwrap().tell("query-status", json!({}));
    assert!(matches!(deep, Err(QmpError::Malformed { .. })), "{deep:?}");
}

#[test]
fn a_line_without_an_end_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
    let thread = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        while stream.write_all(&[b'x'; 1 << 16]).is_ok() {}
    });
    let error = connect(&dir).unwrap_err();
    assert!(matches!(error, QmpError::Long { .. }), "{error:?}");
    thread.join().unwrap();
}

#[test]
fn silence_ends_at_the_deadline_and_names_the_likely_cause() {
    let dir = tempfile::tempdir().unwrap();
    let _listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
    let start = Instant::now();
    let error = Qmp::connect(&dir.path().join("qmp"), Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("one client at a time"), "{error}");
    assert!(start.elapsed() < PATIENCE);
    let nobody = Qmp::connect(&dir.path().join("none"), PATIENCE).unwrap_err();
    assert!(matches!(nobody, QmpError::Connect { .. }), "{nobody:?}");
}

#[test]
fn a_descriptor_travels_with_its_command() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
    let thread = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(greeting().as_bytes()).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        lines.read_line(&mut String::new()).unwrap();
        stream.write_all(b"{\"return\": {}}\n").unwrap();
        let mut file = received(&stream);
        stream.write_all(b"{\"return\": {}}\n").unwrap();
        file.write_all(b"hello").unwrap();
    });
    let (mut reader, writer) = std::io::pipe().unwrap();
    connect(&dir).unwrap().give("state", writer.as_fd()).unwrap();
    drop(writer);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut reader, &mut text).unwrap();
    assert_eq!(text, "hello");
    thread.join().unwrap();
}

/// The descriptor that came with the next bytes.
fn received(stream: &UnixStream) -> std::fs::File {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let mut into = [std::io::IoSliceMut::new(&mut bytes)];
    recvmsg(stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    file.expect("a descriptor").into()
}
