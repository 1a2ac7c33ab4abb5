//! A disk that vmstrata serves and that moves between directories, by the command that users have.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::client::Client;
use super::history::take::timed;
use super::server::{Disk, Kind, Server, vmstrata};

/// Of what clients write.
const SEED: u64 = 20_261_129;

/// A disk that vmstrata serves, and the directories between which it moves.
pub(super) struct Mover {
    pub(super) server: Server,
    pub(super) path: PathBuf,
    pub(super) to: PathBuf,
}

/// What `vmstrata move --json` says.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Moved {
    to: PathBuf,
    pub(super) copied_bytes: u64,
}

impl Mover {
    pub(super) fn new(path: PathBuf) -> Result<Self> {
        let to = path.parent().context("a directory")?.join("target");
        fs::create_dir_all(&to)?;
        Self::start(path, to, Vec::new())
    }

    /// With the directory that it moves to first, and `flags` for the server.
    pub(super) fn start(path: PathBuf, to: PathBuf, flags: Vec<String>) -> Result<Self> {
        let disk = Disk { path: path.clone(), writable: true, backing: path.parent().map(Path::to_owned) };
        let mut server = Server::start_with(Kind::Vmstrata, &disk, flags)?;
        server.wait_for_vhost_user()?;
        Ok(Self { server, path, to })
    }

    /// A client in the place of its guest: there can be one.
    pub(super) fn client(&mut self) -> Result<Client> {
        self.server.connect(SEED, false)
    }

    /// The command that moves it to its other directory.
    pub(super) fn command(&self, limit: Option<u64>) -> Command {
        let mut command = Command::new(vmstrata());
        command.args(["move", "disk", "--json", "--keep", "1s", "--to"]).arg(&self.to);
        if let Some(limit) = limit {
            command.arg("--limit").arg(limit.to_string());
        }
        command.env("VMSTRATA_CONTROL", self.server.control());
        command
    }

    /// For how many ms writes were held, as the lines of the log that have `line` tell.
    pub(super) fn pauses(&self, line: &str) -> Result<Vec<f64>> {
        let log = self.server.log();
        let pauses: Vec<f64> = numbers(&log, line, "pause_us=").iter().map(|us| us / 1000.0).collect();
        ensure!(!pauses.is_empty(), "the log tells no pause: {log}");
        Ok(pauses)
    }

    /// Notes that it has moved, and waits until its old files are gone, and so are the states of the move.
    pub(super) fn moved(&mut self, said: &[u8]) -> Result<Moved> {
        let moved: Moved = serde_json::from_slice(said).context("what the command says")?;
        let old = self.path.parent().context("a directory")?.to_owned();
        self.path.clone_from(&moved.to);
        self.to.clone_from(&old);
        let start = Instant::now();
        let is_image = |path: PathBuf| path.extension().is_some_and(|end| end == "qcow2");
        while fs::read_dir(&old)?.any(|entry| entry.is_ok_and(|entry| is_image(entry.path()))) {
            ensure!(start.elapsed() < Duration::from_secs(60), "{}: is not emptied", old.display());
            thread::sleep(Duration::from_millis(50));
        }
        Ok(moved)
    }
}

/// The fields of a number that a line of the log has.
fn numbers(log: &str, line: &str, field: &str) -> Vec<f64> {
    let lines = log.lines().filter(|said| said.contains(line));
    lines.filter_map(|said| said.split_once(field)?.1.split_whitespace().next()?.parse().ok()).collect()
}

/// Runs a command, and work that may ask whether it runs still. Returns what the command printed, the time that it took, and what
/// came of the work.
pub(super) fn beside<T>(
    command: &mut Command,
    work: impl FnOnce(&dyn Fn() -> bool) -> Result<T>,
) -> Result<((Vec<u8>, Duration), T)> {
    thread::scope(|scope| {
        let running = scope.spawn(|| timed(command));
        let worked = work(&|| !running.is_finished())?;
        Ok((running.join().expect("no panic")?, worked))
    })
}
