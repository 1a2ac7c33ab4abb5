//! The server under test, and the commands that users give it.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::wait::{self, Waited};

/// The longest that a start, an end or a command may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(90);
/// What the disk is called.
pub(super) const NAME: &str = "disk";
const DISCARD: &str = "--discard-unflushed";

/// How to start it.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) program: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) run: PathBuf,
    pub(super) out: PathBuf,
    /// Of the sockets: their paths must be short.
    pub(super) sockets: PathBuf,
    pub(super) direct: bool,
    pub(super) knows: Knows,
}

/// What a program knows, which may be an older one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Knows {
    /// The flag for a disk whose journal is lost.
    discard: bool,
    /// Exports whose clients only read unless `rw` is said.
    rw: bool,
}

impl Setup {
    /// What `program` knows.
    pub(super) fn knows(program: &Path) -> Result<Knows> {
        let help = Command::new(program).args(["serve", "--help"]).output();
        let help = help.with_context(|| format!("{} does not run", program.display()))?;
        let help = String::from_utf8_lossy(&help.stdout);
        Ok(Knows { discard: help.contains(DISCARD), rw: help.contains("[,rw]") })
    }

    pub(super) fn nbd(&self) -> PathBuf {
        self.sockets.join("nbd")
    }

    pub(super) fn vhost(&self) -> PathBuf {
        self.sockets.join("vhost")
    }

    fn control(&self) -> PathBuf {
        self.sockets.join("control")
    }

    fn log(&self) -> PathBuf {
        self.out.join("server.log")
    }

    /// The last lines of what the servers have logged.
    pub(super) fn last_log(&self) -> String {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Starts the server, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub(super) fn start(&self, journal_is_lost: bool) -> Result<Server> {
        for socket in [self.nbd(), self.vhost(), self.control()] {
            let _ = fs::remove_file(socket);
        }
        let log = File::options().create(true).append(true).open(self.log())?;
        let cache = if self.direct { "direct" } else { "host" };
        let mut command = Command::new(&self.program);
        command
            .arg("serve")
            .arg("--disk")
            .arg(format!("path={},name={NAME},cache={cache}", self.disk.display()));
        // Both write at the same time, each its own part.
        let writes = if self.knows.rw { ",rw,share" } else { "" };
        command.arg("--nbd").arg(format!("unix:{}{writes}", self.nbd().display()));
        command.arg("--vhost-user").arg(format!("{NAME}={},share", self.vhost().display()));
        command.arg("--runtime-dir").arg(&self.run).arg(format!("--control={}", self.control().display()));
        command.args(["--ready-fd", "1"]);
        // Why each request fails, not only the first few.
        command.env("RUST_LOG", "info,vmstrata_export=debug");
        if journal_is_lost && self.knows.discard {
            command.arg(DISCARD);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut process = Waited::new(command.spawn().context("the server does not run")?)?;
        let mut output = process.child.stdout.take().context("the server's output")?;
        let until = Instant::now() + PATIENCE;
        let mut said = Vec::new();
        while !String::from_utf8_lossy(&said).contains("READY=1") {
            ensure!(
                wait::for_input(&output, until)?,
                "the server is not ready after {PATIENCE:?}: {}",
                self.last_log()
            );
            let mut part = [0; 4096];
            let count = output.read(&mut part)?;
            ensure!(count > 0, "the server does not start: {}", self.last_log());
            said.extend_from_slice(&part[..count]);
        }
        Ok(Server { process, _output: output })
    }

    /// Begins a command of `vmstrata`; those that go to a server get its control socket.
    pub(super) fn command(&self, words: &[&str], to_server: bool) -> Result<Running> {
        let mut command = Command::new(&self.program);
        command.args(words);
        if to_server {
            command.env("VMSTRATA_CONTROL", self.control());
        }
        // Files, as nobody reads while it is waited for.
        let (stdout, stderr) = (tempfile::tempfile_in(&self.out)?, tempfile::tempfile_in(&self.out)?);
        command.stdin(Stdio::null()).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
        let process = Waited::new(command.spawn().context("vmstrata does not run")?)?;
        Ok(Running { process, stdout, stderr, words: words.join(" ") })
    }
}

/// A server that is ready. It is killed when dropped.
#[derive(Debug)]
pub(super) struct Server {
    process: Waited,
    /// Kept, so that it never writes into a pipe that nobody has.
    _output: std::process::ChildStdout,
}

impl Server {
    /// Kills it as kill -9 does.
    ///
    /// # Errors
    /// When it has ended before by itself.
    pub(super) fn kill(mut self) -> Result<()> {
        if let Some(status) = self.process.ended(Instant::now())? {
            bail!("the server ended by itself with {status}");
        }
        self.process.child.kill()?;
        self.process.ended(Instant::now() + PATIENCE)?.context("the killed server does not end")?;
        Ok(())
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    /// When it does not end, or not well.
    pub(super) fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.process.child), Signal::TERM)?;
        let status = self.process.ended(Instant::now() + PATIENCE)?.context("the server does not end")?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

/// A command under way.
#[derive(Debug)]
pub(super) struct Running {
    process: Waited,
    stdout: File,
    stderr: File,
    words: String,
}

/// What a command ended with.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) words: String,
}

impl Ended {
    /// What it printed.
    ///
    /// # Errors
    /// When it failed.
    pub(super) fn good(self) -> Result<String> {
        ensure!(self.status.success(), "vmstrata {}: {}: {}", self.words, self.status, self.stderr.trim());
        Ok(self.stdout)
    }
}

impl Running {
    /// Its end, or `None` when it still runs at `until`.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub(super) fn ended(&mut self, until: Instant) -> Result<Option<Ended>> {
        let Some(status) = self.process.ended(until)? else { return Ok(None) };
        let text = |mut file: &File| -> Result<String> {
            let mut bytes = Vec::new();
            file.rewind()?;
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let (stdout, stderr) = (text(&self.stdout)?, text(&self.stderr)?);
        Ok(Some(Ended { status, stdout, stderr, words: self.words.clone() }))
    }

    /// Its end.
    ///
    /// # Errors
    /// When it does not come.
    pub(super) fn wait(mut self) -> Result<Ended> {
        let ended = self.ended(Instant::now() + PATIENCE)?;
        ended.with_context(|| format!("vmstrata {} does not end in {PATIENCE:?}", self.words))
    }
}
