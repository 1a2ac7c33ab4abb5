//! An object store that speaks S3, in the place of the NAS.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use super::network::{NAS, Network, S3_PORT};
use super::server::Nas;
use crate::answer::wait_for_answer;
use crate::guest::{must, target};

const VERSITYGW: &str = "github.com/versity/versitygw/cmd/versitygw@v1.8.0";
const MOTO: &str = "moto[server,s3]==5.2.5";
const KEY: &str = "vmstrata";
const SECRET: &str = "secret-of-a-benchmark";
const BUCKET: &str = "vms";
/// The digest of no bytes, which curl leaves out and S3 wants.
const EMPTY: &str = "x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const UP_MAX: Duration = Duration::from_secs(60);

/// Which server it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// versitygw, which keeps objects as files. Go builds it.
    Versitygw,
    /// moto's, which keeps them in memory, and takes 0.1 s for each range of a large one: for tests.
    Moto,
}

impl StoreKind {
    /// The name people read.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Versitygw => "versitygw",
            Self::Moto => "moto",
        }
    }
}

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
    /// When no server can be fetched, or it does not answer.
    pub fn start(nas: &'a Nas, kind: StoreKind) -> Result<Self> {
        let network = nas.network();
        let dir = tempfile::tempdir_in(target()?)?;
        let mut command = match kind {
            StoreKind::Versitygw => {
                let mut command = network.command("nas", &versitygw()?);
                let objects = dir.path().join("objects");
                fs::create_dir(&objects)?;
                command.args(["--access", KEY, "--secret", SECRET, "--port", &format!("{NAS}:{S3_PORT}")]);
                command.arg("posix").arg(objects);
                command
            }
            StoreKind::Moto => {
                let mut command = network.command("nas", &moto()?);
                command.args(["--host", &NAS.to_string(), "--port", &S3_PORT.to_string()]);
                command
            }
        };
        let log = dir.path().join("log");
        let out = File::create(&log)?;
        let process = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn()?;
        let mut store = Self { network, process, _dir: dir };
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let bucket = || match ask(network, "PUT", "")? {
            200..300 => Ok(()),
            status => anyhow::bail!("no bucket: {status}"),
        };
        wait_for_answer(&mut store.process, "the object store", UP_MAX, said, bucket)?;
        Ok(store)
    }

    /// The address of the repository of objects whose names begin with `prefix`, as a host reaches it.
    pub fn repository(&self, host: u8, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}?endpoint=http://{}:{S3_PORT}", self.network.server_of(host))
    }

    /// A command of a host that has the keys of the store.
    pub fn command(&self, host: u8, program: &Path) -> Command {
        let mut command = self.network.on_host(host, program);
        command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET).env_remove("AWS_REGION");
        command
    }

    /// Whether the bucket has an object of this name.
    ///
    /// # Errors
    /// A store that does not answer.
    pub fn has(&self, name: &str) -> Result<bool> {
        match ask(self.network, "HEAD", name)? {
            200 => Ok(true),
            404 => Ok(false),
            status => anyhow::bail!("{name}: {status}"),
        }
    }

    /// Removes the object of this name, if there is one.
    ///
    /// # Errors
    /// A store that does not answer.
    pub fn remove(&self, name: &str) -> Result<()> {
        let status = ask(self.network, "DELETE", name)?;
        ensure!(matches!(status, 200..300 | 404), "{name}: {status}");
        Ok(())
    }
}

impl Drop for ObjectStore<'_> {
    fn drop(&mut self) {
        // One that has ended is killed again without harm.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes a request without a body where the store is, without a delay; returns the status of the answer.
fn ask(network: &Network, method: &str, name: &str) -> Result<u16> {
    let mut curl = network.command("nas", Path::new("curl"));
    curl.args(["--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]);
    curl.args([
        "--aws-sigv4",
        "aws:amz:us-east-1:s3",
        "--user",
        &format!("{KEY}:{SECRET}"),
        "--header",
        EMPTY,
    ]);
    match method {
        "HEAD" => curl.arg("--head"),
        method => curl.args(["--request", method]),
    };
    let output =
        curl.arg(format!("http://{NAS}:{S3_PORT}/{BUCKET}/{name}")).output().context("package curl")?;
    ensure!(output.status.success(), "curl ended with {}", output.status);
    Ok(String::from_utf8(output.stdout)?.parse()?)
}

/// Where a program is, which `fetch` brings there once.
fn fetched(name: &str, fetch: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let dir = target()?.join("tmp");
    fs::create_dir_all(&dir)?;
    let lock = File::create(dir.join(format!("{name}.lock")))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let (program, is_there) = (dir.join(name), dir.join(format!("{name}.is-there")));
    if !is_there.exists() {
        fetch(&program)?;
        File::create(is_there)?;
    }
    Ok(program)
}

fn versitygw() -> Result<PathBuf> {
    let install = |into: &Path| {
        must(Command::new("go").args(["install", VERSITYGW]).env("GOBIN", into))
            .context("Go 1.26 or later")?;
        Ok(())
    };
    Ok(fetched("versitygw", install)?.join("versitygw"))
}

/// In a Python of its own.
fn moto() -> Result<PathBuf> {
    let install = |python: &Path| {
        must(Command::new("python3").args(["-m", "venv"]).arg(python)).context("package python3-venv")?;
        must(Command::new(python.join("bin/pip")).args(["install", "--quiet", MOTO])).map(drop)
    };
    Ok(fetched("moto", install)?.join("bin/moto_server"))
}
