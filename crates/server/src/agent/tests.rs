//! Agents that follow a script: every shape of answer, silence, and going away.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const SHORT: Patience = Patience {
    sync: Duration::from_millis(300),
    freeze: Duration::from_millis(300),
    thaw: Duration::from_millis(600),
};

/// Freezes in a process that starts no other.
fn freeze(socket: &Path, patience: Patience) -> Result<Frozen, AgentFault> {
    super::freeze(socket, patience, &guards(socket))
}

/// Notes beside the agent's socket.
pub(crate) fn guards(socket: &Path) -> Guards {
    let dir = socket.parent().filter(|dir| dir.is_dir()).map_or_else(std::env::temp_dir, Path::to_owned);
    Guards::new(&dir, None)
}

/// What a scripted agent says to a command: bytes, and whether it stays.
type Say = (Vec<u8>, bool);

/// An agent at a socket, and the commands that it was given, a connection each.
pub(crate) struct Scripted {
    dir: TempDir,
    heard: Arc<Mutex<Vec<Vec<String>>>>,
}

impl Scripted {
    /// `say` is asked for the answer to a command of a connection; both are numbered.
    pub(crate) fn start(say: impl Fn(usize, &Value) -> Say + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("agent.sock")).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hearing = Arc::clone(&heard);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                hearing.lock().push(Vec::new());
                serve(stream.unwrap(), |command| {
                    hearing.lock()[number].push(command["execute"].as_str().unwrap_or("?").to_owned());
                    say(number, command)
                });
            }
        });
        Self { dir, heard }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    pub(crate) fn heard(&self) -> Vec<Vec<String>> {
        self.heard.lock().clone()
    }
}

fn serve(stream: UnixStream, mut say: impl FnMut(&Value) -> Say) {
    let mut answers = stream.try_clone().unwrap();
    let mut lines = BufReader::new(stream);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        let text = line.strip_prefix(b"\xff").unwrap_or(&line);
        let (said, stays) = say(&serde_json::from_slice(text).expect("JSON"));
        line.clear();
        if answers.write_all(&said).is_err() || !stays {
            return;
        }
    }
}

/// What a real agent says.
pub(crate) fn properly(command: &Value) -> Say {
    let answer = |value: Value| format!("{}\n", json!({ "return": value })).into_bytes();
    match command["execute"].as_str() {
        Some("guest-sync-delimited") => {
            let answer = answer(command["arguments"]["id"].clone());
            (
                [&b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"the 0xff\"}}\n\xff"[..], &answer]
                    .concat(),
                true,
            )
        }
        _ => (answer(json!(2)), true),
    }
}

fn is(command: &Value, name: &str) -> bool {
    command["execute"] == format!("guest-{name}")
}

const ROUND: [&str; 3] = ["guest-sync-delimited", "guest-fsfreeze-freeze", "guest-fsfreeze-thaw"];

#[test]
fn a_guest_is_frozen_and_thawed_also_by_being_dropped() {
    let agent = Scripted::start(|_, command| properly(command));
    let frozen = freeze(&agent.socket(), SHORT).unwrap();
    assert_eq!((frozen.file_systems, frozen.socket()), (2, agent.socket().as_path()));
    frozen.thaw().unwrap();
    drop(freeze(&agent.socket(), SHORT).unwrap());
    let socket = agent.socket();
    let panicked = std::panic::catch_unwind(move || {
        let _frozen = freeze(&socket, SHORT).unwrap();
        panic!("in the middle");
    });
    assert!(panicked.is_err());
    assert_eq!(agent.heard(), [ROUND; 3]);
}

#[test]
fn what_is_left_of_an_earlier_conversation_is_passed_over() {
    let agent = Scripted::start(|_, command| {
        let (said, stays) = properly(command);
        let stale = b"lue\": 7}}\n{\"return\": 1}\n\xff{\"return\": 99}\n\xffgarb\xffage\n";
        (if is(command, "sync-delimited") { [stale, &said[..]].concat() } else { said }, stays)
    });
    freeze(&agent.socket(), SHORT).unwrap().thaw().unwrap();
}

#[test]
fn an_agent_that_is_not_there_or_not_listening_freezes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = freeze(&dir.path().join("agent.sock"), SHORT).unwrap_err();
    assert!(matches!(nowhere, AgentFault::Connect(_)), "{nowhere}");
    let long = freeze(Path::new(&format!("/tmp/{}", "a".repeat(200))), SHORT).unwrap_err();
    assert!(matches!(long, AgentFault::Connect(_)), "{long}");
    // A listener that accepts no client, as a chardev that has one already; and one with no room for more.
    let path = dir.path().join("full.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(UnixStream::connect(&path).unwrap());
        let start = Instant::now();
        let silent = freeze(&path, SHORT).unwrap_err();
        assert!(matches!(silent, AgentFault::Silent(_)), "{silent}");
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}

#[test]
fn an_agent_that_refuses_is_not_thawed_for_someone_else_may_have_frozen_it() {
    let agent = Scripted::start(|_, command| {
        let no = r#"{"error": {"class": "GenericError", "desc": "it is frozen\nalready"}}"#.to_owned() + "\n";
        if is(command, "fsfreeze-freeze") { (no.into_bytes(), true) } else { properly(command) }
    });
    let refused = freeze(&agent.socket(), SHORT).unwrap_err();
    assert_eq!(refused.to_string(), "it refused: it is frozenalready");
    assert_eq!(agent.heard(), [ROUND[..2].to_vec()]);
}

/// Whatever the answer to a freeze is, if it is no answer the guest is asked to thaw.
#[test]
fn a_freeze_that_is_not_answered_is_followed_by_a_thaw() {
    let answers: [(&[u8], bool, &str); 6] = [
        (b"", true, "did not answer"),
        (b"", false, "hung up"),
        (b"{\"return\": ", true, "did not answer"),
        (b"not json\n", true, "no answer"),
        (b"{\"return\": \"two\"}\n", true, "no answer"),
        (b"[]\n", true, "no answer"),
    ];
    for (answer, stays, words) in answers {
        let agent = Scripted::start(move |_, command| {
            if is(command, "fsfreeze-freeze") { (answer.to_vec(), stays) } else { properly(command) }
        });
        let fault = freeze(&agent.socket(), SHORT).unwrap_err();
        assert!(fault.to_string().contains(words), "{answer:?}: {fault}");
        let heard = agent.heard();
        assert_eq!(heard.last().unwrap(), &["guest-sync-delimited", "guest-fsfreeze-thaw"], "{answer:?}");
    }
}

#[test]
fn an_agent_that_says_too_much_or_drips_is_given_up() {
    for place in ["sync-delimited", "fsfreeze-freeze"] {
        let agent = Scripted::start(move |_, command| {
            if is(command, place) { (vec![b'x'; 4 << 20], false) } else { properly(command) }
        });
        let fault = freeze(&agent.socket(), SHORT).unwrap_err();
        assert!(matches!(fault, AgentFault::TooLong(_)), "{place}: {fault}");
    }
    // A byte now and then does not make a deadline move.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drip.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let dripping = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        while stream.write_all(b"\xff").is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let start = Instant::now();
    let fault = freeze(&path, SHORT).unwrap_err();
    assert!(matches!(fault, AgentFault::Silent(_)), "{fault}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    dripping.join().unwrap();
}

#[test]
fn an_agent_that_hung_up_between_freeze_and_thaw_is_thawed_by_a_new_connection() {
    let agent = Scripted::start(|connection, command| {
        let (said, stays) = properly(command);
        // Restarted twice: the second one goes away before it is asked anything.
        (said, stays && !(connection == 0 && is(command, "fsfreeze-freeze")) && connection != 1)
    });
    freeze(&agent.socket(), SHORT).unwrap().thaw().unwrap();
    let heard = agent.heard();
    assert_eq!((heard.len(), heard[2].last().unwrap().as_str()), (3, "guest-fsfreeze-thaw"));
}

#[test]
fn a_guest_that_does_not_thaw_is_an_error_in_the_end_and_not_before() {
    let agent =
        Scripted::start(
            |_, command| {
                if is(command, "fsfreeze-thaw") { (Vec::new(), false) } else { properly(command) }
            },
        );
    let start = Instant::now();
    let fault = freeze(&agent.socket(), SHORT).unwrap().thaw().unwrap_err();
    assert!(matches!(fault, AgentFault::HungUp | AgentFault::Connect(_)), "{fault}");
    assert!(start.elapsed() >= SHORT.thaw - 2 * BREATH, "{:?}", start.elapsed());
    assert!(agent.heard().len() > 2, "{:?}", agent.heard());
}

/// A guard that writes down what the server says to it, beside the agent's socket.
fn writing_guards(socket: &Path) -> (Guards, PathBuf) {
    let dir = socket.parent().unwrap();
    let (program, said) = (dir.join("guard"), dir.join("said"));
    let script = format!("#!/bin/sh\ncat > '{0}.new'\nmv '{0}.new' '{0}'\n", said.display());
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    (Guards::new(dir, Some(program)), said)
}

fn wait_for(file: &Path) -> Vec<u8> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match std::fs::read(file) {
            Ok(said) => return said,
            Err(error) => assert!(Instant::now() < deadline, "{}: {error}", file.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_guest_that_is_not_thawed_is_left_to_the_guard_which_is_sent_home_only_after_a_thaw() {
    let agent =
        Scripted::start(
            |_, command| {
                if is(command, "fsfreeze-thaw") { (Vec::new(), false) } else { properly(command) }
            },
        );
    let (guards, said) = writing_guards(&agent.socket());
    super::freeze(&agent.socket(), SHORT, &guards).unwrap().thaw().unwrap_err();
    assert_eq!(wait_for(&said), b"", "the guard was sent home from a frozen guest");

    let agent = Scripted::start(|_, command| properly(command));
    let (guards, said) = writing_guards(&agent.socket());
    super::freeze(&agent.socket(), SHORT, &guards).unwrap().thaw().unwrap();
    assert_eq!(wait_for(&said), b"d");
}

#[test]
fn no_thaw_is_tried_without_time_for_an_answer() {
    let mut attempts = Vec::new();
    let fault = insist(Path::new("agent.sock"), SHORT.thaw, |attempt| -> Result<(), _> {
        attempts.push(attempt);
        Err(AgentFault::Silent(attempt))
    });
    assert!(matches!(fault, Err(AgentFault::Silent(_))));
    assert!(attempts.len() > 1 && attempts.iter().all(|&attempt| attempt >= BREATH), "{attempts:?}");
}

/// An agent that is busy freezing does not answer; it finds the thaw after that.
#[test]
fn a_busy_agent_gets_its_thaw_even_without_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("busy.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let hearing = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut heard = String::new();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        heard.push_str(&String::from_utf8_lossy(&bytes));
        heard
    });
    thaw_anew(&path, Duration::from_millis(400)).unwrap_err();
    let heard = hearing.join().unwrap();
    assert!(heard.contains("guest-sync-delimited") && heard.contains("guest-fsfreeze-thaw"), "{heard}");
}

#[test]
fn a_guest_that_a_killed_server_left_frozen_is_thawed_before_it_is_frozen_again() {
    let agent = Scripted::start(|_, command| properly(command));
    let (guards, socket) = (guards(&agent.socket()), agent.socket());
    // What is left of a server that was killed, and its guard with it.
    drop(guards.start(&socket, guards.note(&socket, SHORT.sync).unwrap()).unwrap());
    super::freeze(&socket, SHORT, &guards).unwrap().thaw().unwrap();
    super::freeze(&socket, SHORT, &guards).unwrap().thaw().unwrap();
    let thaw = "guest-fsfreeze-thaw";
    assert_eq!(agent.heard(), [vec![ROUND[0], thaw, ROUND[1], thaw], ROUND.to_vec()]);
}

/// A note says where the next server thaws a guest.
#[test]
fn notes_are_for_their_user_alone_and_links_are_no_notes() {
    let agent = Scripted::start(|_, command| properly(command));
    let (guards, socket) = (guards(&agent.socket()), agent.socket());
    let dir = socket.parent().unwrap().join("frozen");
    let mode = |path: &Path| std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
    let note = guards.note(&socket, SHORT.sync).unwrap();
    let path = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    assert_eq!((mode(&dir), mode(&path)), (0o700, 0o600));
    drop(note);
    let theirs = dir.with_file_name("theirs");
    std::os::unix::fs::symlink(&theirs, &path).unwrap();
    assert!(matches!(guards.note(&socket, SHORT.sync), Err(AgentFault::Io(_))));
    assert!(!theirs.exists());
}

#[test]
fn one_guest_is_frozen_by_one_snapshot_at_a_time() {
    let agent = Scripted::start(|_, command| properly(command));
    let frozen = freeze(&agent.socket(), SHORT).unwrap();
    let busy = freeze(&agent.socket(), SHORT).unwrap_err();
    assert!(matches!(busy, AgentFault::Busy(_)), "{busy}");
    frozen.thaw().unwrap();
    freeze(&agent.socket(), SHORT).unwrap().thaw().unwrap();
}
