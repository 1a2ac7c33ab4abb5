//! A live stock program: `qemu-storage-daemon`, told what to do by QMP over a unix socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::stock::{path_str, qemu_img, text, try_qemu_io};

/// For how long an answer or an event is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// The daemon; killed when it is dropped.
pub struct Daemon {
    child: Child,
    socket: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Daemon {
    /// A daemon that has no file open yet.
    pub fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let child = Command::new("qemu-storage-daemon")
            .args(["--chardev", "socket,id=qmp,fd=0", "--monitor", "chardev=qmp"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .expect("qemu-storage-daemon is required by these tests");
        let mut daemon = Self { child, socket: BufReader::new(ours), events: Vec::new() };
        assert!(daemon.next()["QMP"].is_object(), "a greeting");
        daemon.run("qmp_capabilities", json!({}));
        daemon
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.socket.read_line(&mut line).expect("the daemon answers in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Runs a command; what it returns, or why it was refused.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn try_run(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let request = json!({ "execute": command, "arguments": arguments });
        self.socket.get_mut().write_all(format!("{request}\n").as_bytes()).expect("the daemon listens");
        loop {
            let mut answer = self.next();
            if !answer["event"].is_null() {
                self.events.push(answer);
            } else if answer["error"].is_null() {
                return Ok(answer["return"].take());
            } else {
                return Err(answer["error"]["desc"].to_string());
            }
        }
    }

    pub fn run(&mut self, command: &str, arguments: Value) -> Value {
        let said = arguments.to_string();
        self.try_run(command, arguments).unwrap_or_else(|error| panic!("{command} {said}: {error}"))
    }

    /// Opens a disk as the node `name`, and what its header leads to.
    pub fn open_disk(&mut self, name: &str, file: &Path) {
        let file = json!({ "driver": "file", "filename": path_str(file) });
        self.run("blockdev-add", json!({ "driver": "qcow2", "node-name": name, "file": file }));
    }

    /// Opens a file as the node `name`, on top of the node `below`.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn try_open(
        &mut self,
        name: &str,
        file: &Path,
        below: Option<&str>,
        read_only: bool,
    ) -> Result<Value, String> {
        self.try_run(
            "blockdev-add",
            json!({
                "driver": "qcow2", "node-name": name, "read-only": read_only, "backing": below,
                "file": { "driver": "file", "filename": path_str(file) },
            }),
        )
    }

    /// Opens a chain, base first, as the nodes `l0`, `l1`, ...: the last for writing.
    pub fn open_chain(&mut self, files: &[PathBuf]) {
        self.open_nodes(files, |number| number + 1 < files.len());
    }

    /// As [`Daemon::open_chain`], all of it for reading.
    pub fn open_chain_for_reading(&mut self, files: &[PathBuf]) {
        self.open_nodes(files, |_| true);
    }

    fn open_nodes(&mut self, files: &[PathBuf], read_only: impl Fn(usize) -> bool) {
        for (number, file) in files.iter().enumerate() {
            let below = number.checked_sub(1).map(|below| format!("l{below}"));
            let opened = self.try_open(&format!("l{number}"), file, below.as_deref(), read_only(number));
            opened.expect("opens");
        }
    }

    /// Exports the node `name` to a guest, for writing.
    pub fn export(&mut self, name: &str, dir: &Path) -> Guest {
        let socket = dir.join("nbd.sock");
        self.run(
            "nbd-server-start",
            json!({ "addr": { "type": "unix", "data": { "path": path_str(&socket) } } }),
        );
        let export =
            json!({ "type": "nbd", "id": "guest", "node-name": name, "name": "disk", "writable": true });
        self.run("block-export-add", export);
        Guest(format!("nbd+unix:///disk?socket={}", path_str(&socket)))
    }

    /// Begins a job; there is one at a time.
    pub fn begin_job(&mut self, command: &str, mut arguments: Value) {
        arguments["job-id"] = "job".into();
        arguments["auto-dismiss"] = false.into();
        self.run(command, arguments);
    }

    /// Waits until the job is what `status` says.
    pub fn wait_for_job(&mut self, status: &str) {
        loop {
            for event in std::mem::take(&mut self.events) {
                if event["event"] == "JOB_STATUS_CHANGE" && event["data"]["status"] == status {
                    return;
                }
            }
            let event = self.next();
            self.events.push(event);
        }
    }

    /// Lets the job that is ready come to its end.
    pub fn complete_job(&mut self) {
        self.run("job-complete", json!({ "id": "job" }));
        self.end_job();
    }

    /// Runs a job that ends by itself.
    pub fn run_job(&mut self, command: &str, arguments: Value) {
        self.begin_job(command, arguments);
        self.end_job();
    }

    fn end_job(&mut self) {
        self.wait_for_job("concluded");
        let jobs = self.run("query-jobs", json!({}));
        assert!(jobs[0]["error"].is_null(), "{jobs}");
        self.run("job-dismiss", json!({ "id": "job" }));
    }

    /// Lets it end as whoever runs it would: it closes its files, and its locks are gone.
    pub fn quit(mut self) {
        self.run("quit", json!({}));
        assert!(self.child.wait().expect("it ends").success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Who uses the disk that a daemon exports.
pub struct Guest(String);

impl Guest {
    /// All that it reads, by way of a file in `dir`.
    pub fn content(&self, dir: &Path) -> Vec<u8> {
        let out = dir.join("read-by-guest");
        qemu_img(&["convert", "-f", "raw", "-O", "raw", &self.0, path_str(&out)]);
        std::fs::read(out).expect("converted")
    }

    /// Writes `byte` to all of `range`, and notes it in `model`.
    pub fn write(&self, model: &mut [u8], byte: u8, range: Range<usize>) {
        let command = format!("write -q -P {byte} {} {}", range.start, range.len());
        let output = try_qemu_io(Path::new(&self.0), &["-f", "raw"], &[command, "flush".to_owned()]);
        assert!(output.status.success(), "{}", text(&output));
        model[range].fill(byte);
    }
}
