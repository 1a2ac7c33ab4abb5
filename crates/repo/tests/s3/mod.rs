//! An object store that speaks S3, for the time of a test: moto's server, which keeps everything in memory.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use rustix::process::{Pid, Signal, kill_process};

const MOTO: &str = "moto[server,s3]==5.2.5";
/// From any crate whose tests use this module.
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../repo/tests/s3/server.py");
/// Any key is right.
const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];

/// Any signature, too.
const SIGNED: &str = "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request";

/// Clients take their keys from the environment, which a process has from its beginning on: the test of this name runs again, in
/// a process that has them, and `body` there.
pub fn with_keys(test: &str, body: impl FnOnce()) {
    if KEYS.iter().all(|(name, value)| std::env::var(name).is_ok_and(|found| found == *value)) {
        return body();
    }
    let mut child = Command::new(std::env::current_exe().expect("a path"));
    child.args(["--exact", test, "--nocapture"]).envs(KEYS).env_remove("AWS_REGION");
    assert!(child.status().expect("runs").success());
}

/// A store with the bucket `vms`; its process ends when this is dropped, and when the test is killed.
pub struct Store {
    process: Child,
    commands: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    address: String,
}

impl Store {
    pub fn start() -> Self {
        let mut process = Command::new(python().join("bin/python3"))
            .args([SERVER, "--host", "127.0.0.1", "--port", "0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut said = BufReader::new(process.stderr.take().expect("piped"));
        let mut all = String::new();
        let address = loop {
            let from = all.len();
            assert_ne!(said.read_line(&mut all).expect("reads"), 0, "the server ended: {all}");
            if let Some((_, address)) = all[from..].split_once("http://") {
                break address.trim().to_owned();
            }
        };
        // It logs each request, and waits for who reads that.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        let answers = BufReader::new(process.stdout.take().expect("piped"));
        let commands = Mutex::new((process.stdin.take().expect("piped"), answers));
        let store = Self { process, commands, address };
        store.ask("PUT", "/vms");
        store
    }

    /// The address of the repository of objects whose names begin with `prefix`.
    pub fn repository(&self, prefix: &str) -> String {
        format!("s3://vms/{prefix}?endpoint=http://{}", self.address)
    }

    /// Puts its clock forward.
    pub fn pass(&self, seconds: u32) {
        self.command(&seconds.to_string());
    }

    /// Has it ignore `If-Match` or `abort` from now on, as some stores do.
    pub fn ignore(&self, what: &str) {
        self.command(what);
    }

    fn command(&self, line: &str) {
        let (commands, answers) = &mut *self.commands.lock().expect("no panic");
        writeln!(commands, "{line}").expect("it runs");
        let mut answer = String::new();
        // It says other things, too, when it starts.
        while answer.trim_end() != "done" {
            answer.clear();
            assert_ne!(answers.read_line(&mut answer).expect("it runs"), 0, "the server ended");
        }
    }

    /// Makes a request without a body, and returns that of the answer.
    pub fn ask(&self, method: &str, path: &str) -> String {
        self.send(method, path, "")
    }

    /// Makes a request, and returns the body of the answer.
    pub fn send(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("connects");
        let host = &self.address;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {SIGNED}\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{body}",
            body.len()
        )
        .expect("asks");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answers");
        assert!(answer.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        answer.split_once("\r\n\r\n").expect("has a head").1.to_owned()
    }

    /// It answers nothing more.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// It answers again.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("it runs");
    }

    /// The names of all that lies in the bucket.
    pub fn keys(&self) -> Vec<String> {
        self.list("/vms?list-type=2")
    }

    /// The names, in the repository of that prefix, of all that lies there and begins with `start`.
    pub fn keys_in(&self, prefix: &str, start: &str) -> Vec<String> {
        let keys = self.list(&format!("/vms?list-type=2&prefix={prefix}/{start}"));
        keys.into_iter().map(|key| key[prefix.len() + 1..].to_owned()).collect()
    }

    fn list(&self, path: &str) -> Vec<String> {
        let listed = self.ask("GET", path);
        listed
            .split("<Key>")
            .skip(1)
            .map(|rest| rest.split("</Key>").next().expect("ends").to_owned())
            .collect()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A Python of its own with moto, which is fetched once.
fn python() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(target).expect("creates");
    let lock = File::create(target.join("moto.lock")).expect("creates");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("locks");
    let (python, is_there) = (target.join("moto"), target.join("moto.is-there"));
    if !is_there.exists() {
        let run = |command: &mut Command| {
            let status =
                command.stdout(Stdio::null()).status().expect("python3 runs: it is in Debian's python3-venv");
            assert!(status.success(), "{command:?}: {status}");
        };
        run(Command::new("python3").args(["-m", "venv"]).arg(&python));
        run(Command::new(python.join("bin/pip")).args(["install", "--quiet", MOTO]));
        File::create(is_there).expect("creates");
    }
    python
}
