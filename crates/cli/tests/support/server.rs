//! A `vmstrata serve` for a test: started, waited for, ended; never left behind.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::http::ask;

/// Longer than anything takes on a loaded machine, shorter than the test's own limit.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running server.
pub struct Server {
    child: Child,
    /// What it printed when it was ready.
    pub ready: Value,
    log: PathBuf,
    runtime: TempDir,
}

impl Server {
    /// Starts `vmstrata serve` with these arguments and waits until it is ready.
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().expect("a temporary directory"), args)
    }

    /// The same with the journals of an earlier server.
    pub fn start_in(runtime: TempDir, args: &[&str]) -> Self {
        Self::start_by(super::vmstrata(), runtime, args)
    }

    /// The same under `strace` with these options, of which `-D` is one.
    pub fn start_traced(options: &[String], args: &[&str]) -> Self {
        let mut strace = Command::new("strace");
        strace.args(options).arg(super::vmstrata().get_program());
        Self::start_by(strace, tempfile::tempdir().expect("a temporary directory"), args)
    }

    fn start_by(mut command: Command, runtime: TempDir, args: &[&str]) -> Self {
        let log = runtime.path().join("stderr");
        let mut child = command
            .args(["serve", "--json", "--runtime-dir"])
            .arg(runtime.path())
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("a log file"))
            .spawn()
            .expect("vmstrata starts");
        let stdout = child.stdout.take().expect("piped");
        let line = first_line(BufReader::new(stdout));
        let Some(ready) = line.and_then(|line| serde_json::from_str(&line).ok()) else {
            let _ = child.kill();
            let status = child.wait();
            panic!("not ready: {status:?}: {}", fs::read_to_string(&log).unwrap_or_default());
        };
        Self { child, ready, log, runtime }
    }

    /// The first URI of the disk `name`.
    pub fn uri(&self, name: &str) -> String {
        let disks = self.ready["disks"].as_array().expect("a list of disks");
        let disk = disks.iter().find(|disk| disk["name"] == name).expect("a disk of this name");
        disk["nbd"][0]["uri"].as_str().expect("an NBD URI").to_owned()
    }

    /// Its control socket, where it is unless told otherwise.
    pub fn control(&self) -> PathBuf {
        self.runtime.path().join("control.sock")
    }

    /// Runs `vmstrata` against it.
    pub fn ask<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Output {
        let mut command = super::vmstrata();
        command.args(args).env("VMSTRATA_CONTROL", self.control());
        command.output().expect("vmstrata starts")
    }

    /// Runs `vmstrata` against it, which must succeed, and returns stdout.
    pub fn ask_ok<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> String {
        let output = self.ask(args);
        assert!(output.status.success(), "{:?}: {}", output.status, super::stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Runs `vmstrata` against it, which must fail with exit code 1, and returns what it says.
    pub fn ask_err<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> String {
        let output = self.ask(args);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        super::stderr(&output)
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("our child").is_none()
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Asks it to end and waits until it has.
    pub fn stop(mut self) -> ExitStatus {
        kill_process(self.pid(), Signal::TERM).expect("the server runs");
        self.wait()
    }

    /// Kills it as a crash would; returns what outlives it.
    pub fn crash(mut self) -> TempDir {
        kill_process(self.pid(), Signal::KILL).expect("the server runs");
        assert_eq!(self.wait().signal(), Some(9));
        std::mem::replace(&mut self.runtime, tempfile::tempdir().expect("a temporary directory"))
    }

    /// Waits until clients have made at least so many requests of a kind.
    pub fn wait_for_requests(&self, kind: &str, count: u64) {
        let requests = |disk: &Value| disk["stats"][kind]["requests"].as_u64().expect("a count");
        super::wait_until("requests", || {
            let stats = ask(&self.control(), "GET", "/v1/stats", "").json();
            stats["disks"].as_array().expect("disks").iter().map(requests).sum::<u64>() >= count
        });
    }

    /// Waits until it is killed; returns what outlives it.
    pub fn wait_killed(mut self) -> TempDir {
        assert_eq!(self.wait().signal(), Some(9), "{}", self.log());
        std::mem::replace(&mut self.runtime, tempfile::tempdir().expect("a temporary directory"))
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("the server does not end: {}", self.log());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
    }
}

/// The first line, or `None` when the writer goes away or takes too long.
fn first_line(mut reader: impl BufRead + Send + 'static) -> Option<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let read = reader.read_line(&mut line);
        let _ = sender.send(read.ok().filter(|len| *len > 0).map(|_| line));
        // Stdout stays open, so that a server that prints more does not die of it.
        let _ = std::io::copy(&mut reader, &mut std::io::sink());
    });
    receiver.recv_timeout(PATIENCE).ok().flatten()
}
