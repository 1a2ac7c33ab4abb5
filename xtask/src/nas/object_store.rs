//! An object store that speaks S3, in the place of the NAS: moto's server, which keeps everything in memory.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use super::network::{NAS, Network, S3_PORT};
use super::server::Nas;
use crate::answer::wait_for_answer;
use crate::guest::{must, target};

const MOTO: &str = "moto[server,s3]==5.2.5";
/// Any key is right.
const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
const BUCKET: &str = "vms";
const UP_MAX: Duration = Duration::from_secs(60);

/// A store with an empty bucket, which hosts of a NAS's network reach as they reach the NAS. It ends when this is dropped.
#[derive(Debug)]
pub struct ObjectStore<'a> {
    network: &'a Network,
    process: Child,
    _dir: TempDir,
}

impl<'a> ObjectStore<'a> {
    /// Starts it beside the NAS.
    ///
    /// # Errors
    /// When moto cannot be fetched, or does not answer.
    pub fn start(nas: &'a Nas) -> Result<Self> {
        let (network, dir) = (nas.network(), tempfile::tempdir()?);
        let mut command = network.command("nas", &python()?.join("bin/moto_server"));
        command.args(["--host", &NAS.to_string(), "--port", &S3_PORT.to_string()]);
        let log = dir.path().join("log");
        let out = File::create(&log)?;
        let process = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn()?;
        let mut store = Self { network, process, _dir: dir };
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let bucket = || ask(network, "PUT", &format!("/{BUCKET}")).map(drop);
        wait_for_answer(&mut store.process, "moto", UP_MAX, said, bucket)?;
        Ok(store)
    }

    /// The address of the repository of objects whose names begin with `prefix`, as a host reaches it.
    pub fn repository(&self, host: u8, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}?endpoint=http://{}:{S3_PORT}", self.network.server_of(host))
    }

    /// A command of a host that has the keys of the store.
    pub fn command(&self, host: u8, program: &Path) -> Command {
        let mut command = self.network.on_host(host, program);
        command.envs(KEYS).env_remove("AWS_REGION");
        command
    }

    /// Whether the bucket has an object of this name.
    ///
    /// # Errors
    /// A store that does not answer.
    pub fn has(&self, name: &str) -> Result<bool> {
        let listed = ask(self.network, "GET", &format!("/{BUCKET}?list-type=2&prefix={name}"))?;
        Ok(listed.contains(&format!("<Key>{name}</Key>")))
    }

    /// Removes the object of this name, if there is one.
    ///
    /// # Errors
    /// A store that does not answer.
    pub fn remove(&self, name: &str) -> Result<()> {
        ask(self.network, "DELETE", &format!("/{BUCKET}/{name}")).map(drop)
    }
}

impl Drop for ObjectStore<'_> {
    fn drop(&mut self) {
        // One that has ended is killed again without harm.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes a request without a body where the store is, without a delay; returns the answer's body.
fn ask(network: &Network, method: &str, path: &str) -> Result<String> {
    let ask = || -> Result<String> {
        network.enter("nas")?;
        let mut stream = TcpStream::connect((NAS, S3_PORT))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {NAS}:{S3_PORT}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        Ok(answer.split_once("\r\n\r\n").context("an answer with a head")?.1.to_owned())
    };
    // Sockets are of the namespace of the thread that makes them.
    thread::scope(|scope| scope.spawn(ask).join().expect("does not panic"))
}

/// A Python of its own with moto, which is fetched once.
fn python() -> Result<PathBuf> {
    let dir = target()?.join("tmp");
    fs::create_dir_all(&dir)?;
    let lock = File::create(dir.join("moto.lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let (python, is_there) = (dir.join("moto"), dir.join("moto.is-there"));
    if !is_there.exists() {
        must(Command::new("python3").args(["-m", "venv"]).arg(&python)).context("package python3-venv")?;
        must(Command::new(python.join("bin/pip")).args(["install", "--quiet", MOTO]))?;
        File::create(is_there)?;
    }
    Ok(python)
}
