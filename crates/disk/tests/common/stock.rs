//! Stock tools as oracles.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::judged::Judged;

static JUDGED: LazyLock<Judged> = LazyLock::new(Judged::default);

/// Runs a tool, again while a file is locked, see [`super::patiently`].
fn unlocked(tool: &str, args: &[&str]) -> Output {
    let mut output = run(tool, args);
    let deadline = Instant::now() + Duration::from_secs(2);
    while text(&output).contains("Failed to get") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        output = run(tool, args);
    }
    output
}

/// Runs `qemu-img`; panics unless it succeeds.
pub fn qemu_img(args: &[&str]) -> String {
    let output = unlocked("qemu-img", args);
    assert!(output.status.success(), "qemu-img {args:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `qemu-img` whatever comes of it.
pub fn try_qemu_img(args: &[&str]) -> Output {
    unlocked("qemu-img", args)
}

/// Runs `qemu-io` commands on an image; panics unless all of them succeed.
pub fn qemu_io(path: &Path, commands: &[String]) {
    let output = try_qemu_io(path, &[], commands);
    let said = text(&output);
    let failed = said.contains("failed") || said.contains("error");
    assert!(output.status.success() && !failed, "qemu-io {commands:?} {}: {said}", path.display());
}

/// Runs `qemu-io` whatever comes of it.
pub fn try_qemu_io(path: &Path, options: &[&str], commands: &[String]) -> Output {
    let mut args: Vec<&str> = options.to_vec();
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(path_str(path));
    run("qemu-io", &args)
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{program} does not run: {error}"))
}

/// What a tool said, on both streams.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

pub fn path_str(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// What `qemu-img check` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    pub code: i32,
    pub said: String,
}

impl Checked {
    pub fn is_clean(&self) -> bool {
        self.code == 0
    }

    /// Clean, or clusters that no one uses: what a crash may leave.
    pub fn is_safe(&self) -> bool {
        self.code == 0 || self.code == 3
    }
}

/// Runs `qemu-img check` on a qcow2 file.
pub fn check(path: &Path) -> Checked {
    let (code, said) = JUDGED.of(path, &["check"], || {
        let output = unlocked("qemu-img", &["check", "-f", "qcow2", path_str(path)]);
        (output.status.code().unwrap_or(-1), text(&output).into_bytes())
    });
    Checked { code, said: String::from_utf8(said).expect("it was text") }
}

pub fn assert_clean(path: &Path) {
    let checked = check(path);
    assert!(checked.is_clean(), "{}: {}", path.display(), checked.said);
}

pub fn assert_safe(path: &Path) {
    let checked = check(path);
    assert!(checked.is_safe(), "{}: {}", path.display(), checked.said);
}

/// The content of an image as stock tools read it.
pub fn content(path: &Path, format: &str) -> Vec<u8> {
    convert(path, &["-f", format])
}

/// The content of an internal snapshot as stock tools read it.
pub fn snapshot_content(path: &Path, name: &str) -> Vec<u8> {
    convert(path, &["-f", "qcow2", "-l", &format!("snapshot.name={name}")])
}

/// The content of a qcow2 image as stock tools read it, or what they say. A chain that leads back to itself is opened by
/// them for ever: after five seconds they have not read it.
pub fn try_content(path: &Path) -> Result<Vec<u8>, String> {
    let out = PathBuf::from(format!("{}.{:x}.raw", path.display(), std::process::id()));
    let convert = ["5", "qemu-img", "convert", "-f", "qcow2", "-O", "raw", path_str(path), path_str(&out)];
    let output = run("timeout", &convert);
    let bytes = std::fs::read(&out);
    let _ = std::fs::remove_file(&out);
    if output.status.success() { Ok(bytes.expect("converted")) } else { Err(text(&output)) }
}

fn convert(path: &Path, how: &[&str]) -> Vec<u8> {
    JUDGED.of(path, how, || (0, converted(path, how))).1
}

fn converted(path: &Path, how: &[&str]) -> Vec<u8> {
    let out = PathBuf::from(format!("{}.{:x}.raw", path.display(), std::process::id()));
    let mut args = vec!["convert", "-O", "raw"];
    args.extend(how);
    args.extend([path_str(path), path_str(&out)]);
    qemu_img(&args);
    let bytes = std::fs::read(&out).expect("converted");
    std::fs::remove_file(&out).expect("converted");
    bytes
}

/// One line of `qemu-img map`.
#[derive(Clone, Debug)]
pub struct Mapped {
    pub start: u64,
    pub len: u64,
    /// Distance from the active layer.
    pub depth: u64,
    pub present: bool,
    pub zero: bool,
    pub data: bool,
    pub offset: Option<u64>,
}

/// `qemu-img map --output=json`.
pub fn map(path: &Path, format: &str) -> Vec<Mapped> {
    let json = qemu_img(&["map", "-f", format, "--output=json", path_str(path)]);
    let value: serde_json::Value = serde_json::from_str(&json).expect("qemu-img prints JSON");
    let number = |line: &serde_json::Value, key: &str| line[key].as_u64();
    let flag = |line: &serde_json::Value, key: &str| line[key].as_bool().expect("a flag");
    let lines = value.as_array().expect("a list of extents").iter();
    lines
        .map(|line| Mapped {
            start: number(line, "start").expect("start"),
            len: number(line, "length").expect("length"),
            depth: number(line, "depth").expect("depth"),
            present: flag(line, "present"),
            zero: flag(line, "zero"),
            data: flag(line, "data"),
            offset: number(line, "offset"),
        })
        .collect()
}

/// A stock process that has an image open until it is dropped.
pub struct User(Child);

impl User {
    /// One that writes.
    pub fn writing(path: &Path) -> Self {
        Self::with(path, &["-f", "qcow2"])
    }

    /// One that opens the image with these options of `qemu-io`.
    pub fn with(path: &Path, options: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(options)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It asks for commands once it has the image, and its lock. Before, it opens and closes the file more than once.
        let mut prompt = [0; 7];
        child.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
        assert_eq!(&prompt, b"qemu-io");
        Self(child)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}
