//! An object store that speaks S3, for the time of a test: moto's server, which keeps everything in memory.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

const MOTO: &str = "moto[server,s3]==5.2.5";
/// Any key is right.
const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];

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

/// A store with the bucket `vms`; its process ends when this is dropped.
pub struct Store {
    process: Child,
    address: String,
}

impl Store {
    pub fn start() -> Self {
        let server = python().join("bin/moto_server");
        let mut process = Command::new(server)
            .args(["--host", "127.0.0.1", "--port", "0"])
            .stdout(Stdio::null())
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
        let store = Self { process, address };
        store.ask("PUT", "/vms");
        store
    }

    /// The address of the repository of objects whose names begin with `prefix`.
    pub fn repository(&self, prefix: &str) -> String {
        format!("s3://vms/{prefix}?endpoint=http://{}", self.address)
    }

    /// Makes a request without a body, and returns that of the answer.
    pub fn ask(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("connects");
        let host = &self.address;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
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
        let listed = self.ask("GET", "/vms?list-type=2");
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
