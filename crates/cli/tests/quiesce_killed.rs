//! A server that is killed while a guest is frozen for a snapshot: the guest goes on.

use crate::support;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::support::server::Server;
use crate::support::{Images, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// What an agent knows, and what it was told.
#[derive(Default)]
struct Guest {
    frozen: bool,
    told: Vec<String>,
}

type Shared = Arc<(Mutex<Guest>, Condvar)>;

/// An agent that freezes without a word of it, so that whoever asked waits with the guest frozen.
fn agent(images: &Images) -> (String, Shared) {
    let socket = images.name("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let guest = Shared::default();
    let own = Arc::clone(&guest);
    std::thread::spawn(move || listener.incoming().for_each(|stream| serve(stream.unwrap(), &own)));
    (socket, guest)
}

/// One connection; another one waits until it ends, as with a character device of QEMU.
fn serve(stream: UnixStream, guest: &Shared) {
    let mut answers = stream.try_clone().unwrap();
    for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
        let text = line.strip_prefix(b"\xff").unwrap_or(&line);
        let command: Value = serde_json::from_slice(text).expect("JSON");
        let name = command["execute"].as_str().unwrap().trim_start_matches("guest-").to_owned();
        let answer = {
            let mut guest = guest.0.lock().unwrap();
            guest.told.push(name.clone());
            match name.as_str() {
                "fsfreeze-freeze" => guest.frozen = true,
                "fsfreeze-thaw" => guest.frozen = false,
                _ => {}
            }
            match name.as_str() {
                "sync-delimited" => command["arguments"]["id"].clone(),
                "fsfreeze-status" if guest.frozen => json!("frozen"),
                "fsfreeze-status" => json!("thawed"),
                _ => json!(1),
            }
        };
        guest.1.notify_all();
        let delimiter: &[u8] = if name == "sync-delimited" { b"\xff" } else { b"" };
        let answer = [delimiter, format!("{}\n", json!({ "return": answer })).as_bytes()].concat();
        if name != "fsfreeze-freeze" && answers.write_all(&answer).is_err() {
            return;
        }
    }
}

fn wait_frozen(guest: &Shared, frozen: bool) {
    let waited =
        guest.1.wait_timeout_while(guest.0.lock().unwrap(), PATIENCE, |guest| guest.frozen != frozen);
    let (guest, timeout) = waited.unwrap();
    assert!(!timeout.timed_out(), "frozen: {}, told {:?}", guest.frozen, guest.told);
}

fn start(images: &Images, agent: &str, runtime: Option<TempDir>) -> Server {
    let disk = format!("path={},agent={agent}", images.name("web.qcow2"));
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let runtime = runtime.unwrap_or_else(|| tempfile::tempdir().unwrap());
    Server::start_in(runtime, &["--disk", &disk, "--nbd", &nbd])
}

/// Asks for a snapshot, and returns once the guest is frozen for it.
fn freeze(server: &Server, images: &Images, guest: &Shared) -> Child {
    let mut create = support::vmstrata();
    create.args(["snapshot", "create", "--name", "a", "--control"]).arg(server.control());
    let asked =
        create.arg(images.path("web.qcow2")).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_frozen(guest, true);
    asked
}

/// The words of a process of ours. One that has just begun runs its program before it has any; others have none for good.
fn command_line(process: &Path) -> Option<String> {
    let ours = fs::canonicalize(env!("CARGO_BIN_EXE_vmstrata")).unwrap();
    while fs::read_link(process.join("exe")).ok()? == ours {
        let words = fs::read_to_string(process.join("cmdline")).ok()?;
        if !words.is_empty() {
            return Some(words);
        }
    }
    None
}

/// The process that guards the guest of this agent.
fn guard(agent: &str) -> Option<Pid> {
    fs::read_dir("/proc").unwrap().flatten().find_map(|process| {
        let words = command_line(&process.path())?;
        let is_it = words.contains("thaw-guard") && words.contains(agent);
        Pid::from_raw(process.file_name().to_str()?.parse().ok().filter(|_| is_it)?)
    })
}

fn notes(runtime: &TempDir) -> Vec<PathBuf> {
    let notes = fs::read_dir(runtime.path().join("frozen"));
    notes.into_iter().flatten().map(|note| note.unwrap().path()).collect()
}

#[test]
fn a_guest_goes_on_when_the_server_that_froze_it_is_killed() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let (agent, guest) = agent(&images);
    let server = start(&images, &agent, None);
    let mut asked = freeze(&server, &images, &guest);
    assert!(guard(&agent).is_some(), "nobody guards the guest");
    let runtime = server.crash();
    asked.wait().unwrap();
    // Without any server.
    wait_frozen(&guest, false);
    wait_until("the guard's end", || guard(&agent).is_none());
    assert_eq!(notes(&runtime), [""; 0].map(PathBuf::from));
}

#[test]
fn a_guest_whose_guard_was_killed_too_goes_on_with_the_next_server() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let (agent, guest) = agent(&images);
    let server = start(&images, &agent, None);
    let mut asked = freeze(&server, &images, &guest);
    kill_process(guard(&agent).unwrap(), Signal::KILL).unwrap();
    let runtime = server.crash();
    asked.wait().unwrap();
    assert!(guest.0.lock().unwrap().frozen);
    assert_eq!(notes(&runtime).len(), 1);
    let server = start(&images, &agent, Some(runtime));
    wait_frozen(&guest, false);
    wait_until("a word of it", || {
        server.log().contains("thawed a guest that a killed server had left frozen")
    });
    assert!(server.stop().success());
}

#[test]
fn a_guest_that_someone_else_has_frozen_is_left_alone() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let (agent, guest) = agent(&images);
    guest.0.lock().unwrap().frozen = true;
    let server = start(&images, &agent, None);
    server.ask_ok(["snapshot", "create", "--quiesce", "never", &images.name("web.qcow2"), "--name", "a"]);
    let runtime = server.crash();
    assert!(start(&images, &agent, Some(runtime)).stop().success());
    let guest = guest.0.lock().unwrap();
    assert_eq!((guest.frozen, guest.told.len()), (true, 0), "{:?}", guest.told);
}
