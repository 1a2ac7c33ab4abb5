//! What the tests of the command share: running it, running stock tools beside it, and making images.
//!
//! Stock tools are the oracle: no expectation about an image is written down that qemu-img can be asked for.

// Each test binary compiles this module for itself and uses a part of it.
#![allow(dead_code, unreachable_pub)]

pub mod contract;
#[cfg(any(feature = "hdfs", feature = "s3"))]
pub mod far;
pub mod guest;
pub mod http;
pub mod killed;
pub mod loop_device;
pub mod nas;
pub mod server;
pub mod trial;
pub mod vault;

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// The command under test, with nothing of the caller's environment that changes what it prints.
pub fn vmstrata() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmstrata"));
    command
        .env_remove("RUST_LOG")
        .env_remove("NOTIFY_SOCKET")
        .env_remove("VMSTRATA_CONTROL")
        .env_remove("VMSTRATA_AUDIT");
    command
}

/// Runs `vmstrata` to its end.
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    vmstrata().args(args).output().expect("vmstrata starts")
}

/// Runs `vmstrata`, which must succeed, and returns stdout.
pub fn run_ok<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> String {
    let output = run(args);
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs `vmstrata`, which must succeed, and reads stdout as JSON.
pub fn run_json<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Value {
    serde_json::from_str(&run_ok(args)).expect("JSON on stdout")
}

/// Runs `vmstrata`, which must fail with `code` and print nothing but a message on stderr, and returns the message.
pub fn run_err<S: AsRef<OsStr>>(code: i32, args: impl IntoIterator<Item = S>) -> String {
    let output = run(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!message.contains("panicked"), "{message}");
    message
}

/// The commands that the help of `command` lists.
pub fn commands_of(command: &[&str]) -> Vec<String> {
    let help = run_ok(command.iter().copied().chain(["--help"]));
    let listed = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest);
    let lines = listed.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .filter_map(|line| line.split_whitespace().next())
        .filter(|n| *n != "help")
        .map(str::to_owned)
        .collect()
}

/// The lines of an audit file.
pub fn audited(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Waits until something holds: not for ever, but longer than anything takes on a loaded machine.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || if holds() { Ok(()) } else { Err("not in time") });
}

/// Waits until there is a value, as [`wait_until`] does.
pub fn wait_for<T, E: std::fmt::Debug>(what: &str, mut value: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match value() {
            Ok(value) => return value,
            Err(why) => assert!(start.elapsed() < Duration::from_secs(120), "{what}: {why:?}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What a process wrote to stderr.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a stock tool to its end.
pub fn tool<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Output {
    Command::new(name).args(args).output().unwrap_or_else(|error| panic!("{name}: {error}; see scripts/test"))
}

/// Runs a stock tool, which must succeed, and returns stdout.
pub fn tool_ok<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> String {
    let output = tool(name, args);
    let said = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    assert!(output.status.success(), "{name}: {:?}: {said}{}", output.status, stderr(&output));
    said
}

/// Runs a stock tool, which must succeed, and reads stdout as JSON.
pub fn tool_json<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Value {
    serde_json::from_str(&tool_ok(name, args)).expect("JSON on stdout")
}

/// A directory of images.
pub struct Images {
    dir: TempDir,
}

impl Images {
    /// An empty one.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory") }
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The same as text.
    pub fn name(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// The names of all that is in it, in order.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).expect("lists");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("lists").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    /// `qemu-img create -f qcow2` with these arguments after the file.
    pub fn create(&self, name: &str, args: &[&str]) -> PathBuf {
        let path = self.path(name);
        let mut all = vec!["create", "-q", "-f", "qcow2", path.to_str().expect("UTF-8")];
        all.extend(args);
        tool_ok("qemu-img", all);
        path
    }

    /// Runs qemu-io commands on the layer alone, without what lies below it.
    pub fn write_layer(&self, name: &str, commands: &[&str]) {
        let options = format!("driver=qcow2,file.driver=file,file.filename={},backing=", self.name(name));
        let mut args = vec!["--image-opts", options.as_str()];
        args.extend(commands.iter().flat_map(|command| ["-c", command]));
        let said = tool_ok("qemu-io", args);
        assert!(!said.contains("failed"), "{said}");
    }

    /// A chain of `layers` files `0.qcow2`, `1.qcow2`, ... with one 64 KiB cluster each, at its own number;
    /// every tenth cluster is written again in the layer above. Returns the active layer.
    pub fn long_chain(&self, layers: usize) -> PathBuf {
        let size = format!("{}", (layers as u64 + 8) << 16);
        for layer in 0..layers {
            let name = format!("{layer}.qcow2");
            let below = format!("{}.qcow2", layer.saturating_sub(1));
            let backing: &[&str] = if layer == 0 { &[] } else { &["-u", "-b", &below, "-F", "qcow2"] };
            self.create(&name, &[backing, &[&size]].concat());
            let own = write_command(layer, layer);
            let again = write_command(layer, layer.saturating_sub(1));
            let commands: &[&str] = if layer % 10 == 1 { &[&own, &again] } else { &[&own] };
            self.write_layer(&name, commands);
        }
        self.path(&format!("{}.qcow2", layers - 1))
    }
}

fn write_command(layer: usize, cluster: usize) -> String {
    format!("write -P {} {} 64k", layer % 255 + 1, cluster << 16)
}

/// Whether `qemu-img check` finds nothing at all in `path`.
pub fn assert_clean(path: &Path) {
    let output = tool("qemu-img", [OsStr::new("check"), path.as_os_str()]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {said}{}", path.display(), stderr(&output));
}

/// A stock tool that has an image open, and locked as QEMU locks it.
pub struct Holder(Child);

impl Holder {
    /// Opens `path`; returns once it is locked.
    pub fn open(path: &Path, read_only: bool) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(read_only.then_some("-r")).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("qemu-io starts");
        // The prompt comes when the image is open.
        let mut prompt = [0; 9];
        child.stdout.as_mut().expect("piped").read_exact(&mut prompt).expect("qemu-io opens the image");
        assert_eq!(&prompt, b"qemu-io> ");
        Self(child)
    }

    /// Ends it at the end of its input.
    pub fn close(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("our child").success());
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
