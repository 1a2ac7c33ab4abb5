//! HDFS's own NameNode and DataNodes, for the time of a test.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tempfile::TempDir;

/// From any crate whose tests use this module.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../repo/tests/hdfs");

/// A cluster; its process ends when this is dropped, and when the test is killed.
pub struct Cluster {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    pub port: u16,
    dir: TempDir,
}

/// A block of a file: its length, and the DataNodes that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub len: u64,
    pub nodes: Vec<String>,
}

impl Cluster {
    pub fn start(datanodes: usize) -> Self {
        let jars = jars();
        let dir = tempfile::tempdir().expect("a directory");
        let errors = File::create(dir.path().join("errors")).expect("creates");
        let mut process = Command::new("java")
            .args(["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"])
            .arg(jars.join("*"))
            .arg(format!("{SOURCES}/Cluster.java"))
            .arg(dir.path().join("data"))
            .arg(datanodes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .expect("java runs: it is in Debian's default-jdk-headless");
        let commands = process.stdin.take().expect("piped");
        let answers = BufReader::new(process.stdout.take().expect("piped"));
        let mut cluster = Self { process, commands, answers, port: 0, dir };
        let ready = cluster.answer();
        let port = ready.strip_prefix("ready ").unwrap_or_else(|| panic!("{ready}"));
        cluster.port = port.parse().expect("a port");
        cluster
    }

    /// Has the cluster do something.
    pub fn ask(&mut self, command: &str) -> String {
        writeln!(self.commands, "{command}").expect("the cluster runs");
        let answer = self.answer();
        assert!(!answer.starts_with("failed") && !answer.starts_with("unknown"), "{command}: {answer}");
        answer
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the cluster runs");
        if line.is_empty() {
            let errors = std::fs::read_to_string(self.dir.path().join("errors")).unwrap_or_default();
            panic!("the cluster ended: {errors}");
        }
        line.trim_end().to_owned()
    }

    /// Makes a directory, and gives the address of the repository in it, with the smallest blocks that HDFS takes.
    pub fn repository(&mut self, dir: &str) -> String {
        self.ask(&format!("mkdir {dir}"));
        format!("hdfs://127.0.0.1:{}{dir}?block=1M", self.port)
    }

    /// The blocks of a file.
    pub fn blocks(&mut self, path: &str) -> Vec<Block> {
        let answer = self.ask(&format!("blocks {path}"));
        let block = |words: &str| {
            let mut words = words.split(',');
            let len = words.next().expect("a length").parse().expect("a number");
            Block { len, nodes: words.map(str::to_owned).collect() }
        };
        answer.split(' ').filter(|words| !words.is_empty()).map(block).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The directory of Hadoop's jars, which Maven fetches once.
fn jars() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(target).expect("creates");
    let lock = File::create(target.join("hdfs-jars.lock")).expect("creates");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("locks");
    let (jars, fetched) = (target.join("hdfs-jars"), target.join("hdfs-jars.new"));
    if !jars.exists() {
        let status = Command::new("mvn")
            .args(["--quiet", "--batch-mode", "--file"])
            .arg(format!("{SOURCES}/pom.xml"))
            .arg("dependency:copy-dependencies")
            .arg(format!("-DoutputDirectory={}", fetched.display()))
            .stdout(Stdio::null())
            .status()
            .expect("mvn runs: it is in Debian's maven");
        assert!(status.success(), "mvn could not fetch Hadoop: {status}");
        std::fs::rename(fetched, &jars).expect("renames");
    }
    jars
}
