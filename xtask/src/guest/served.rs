//! A guest on a disk that vmstrata serves, which is killed, and started again from a snapshot of its memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Attach, Guest, Hardware, Task, Vm};
use crate::bench::server::{self, Disk, Server};

/// Between two looks at whether a guest is served.
const LOOK: Duration = Duration::from_millis(20);
/// A guest that works asks for something within this time.
const SERVED_MAX: Duration = Duration::from_secs(60);

/// How the guest gets to its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// A vhost-user-blk socket.
    VhostUser,
    /// An NBD export.
    Nbd,
}

impl Export {
    fn socket(self, server: &Server) -> PathBuf {
        match self {
            Self::VhostUser => server.vhost_user(),
            Self::Nbd => server.nbd(),
        }
    }

    fn attach(self, server: &Server) -> Attach {
        match self {
            Self::VhostUser => Attach::VhostUser(server.vhost_user()),
            Self::Nbd => Attach::Nbd(server.nbd()),
        }
    }
}

/// The guest and its server; both are ended when this is dropped.
#[derive(Debug)]
pub struct ServedGuest {
    /// The machine.
    pub vm: Vm,
    /// `None` only while the disk is put back.
    server: Option<Server>,
    disk: PathBuf,
    /// More of the disk's keys, such as `,tier=DIR`.
    keys: String,
    export: Export,
    /// The monitor that vmstrata uses.
    monitor: PathBuf,
    /// QEMU's arguments, without that monitor.
    arguments: Vec<String>,
}

impl ServedGuest {
    /// Serves `disk` and powers a guest on.
    ///
    /// # Errors
    /// When a server or QEMU does not start.
    pub fn start(
        guest: &Guest,
        disk: (PathBuf, Export),
        task: Task,
        hardware: &Hardware,
        monitor: PathBuf,
    ) -> Result<Self> {
        Self::start_keyed(guest, (disk, String::new()), task, hardware, monitor)
    }

    /// The same on a disk with more keys, such as `,tier=DIR`.
    ///
    /// # Errors
    /// As [`ServedGuest::start`].
    pub fn start_keyed(
        guest: &Guest,
        ((disk, export), keys): ((PathBuf, Export), String),
        task: Task,
        hardware: &Hardware,
        monitor: PathBuf,
    ) -> Result<Self> {
        let server = serve_keyed(&disk, &keys)?;
        let arguments = Vm::arguments(guest, &export.attach(&server), task, hardware);
        let arguments: Option<Vec<_>> = arguments.into_iter().map(|word| word.into_string().ok()).collect();
        let arguments = arguments.context("arguments that are text")?;
        let mut command = Command::new("qemu-system-x86_64");
        command.args(&arguments).args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        let vm = Vm::start(command)?;
        Ok(Self { vm, server: Some(server), disk, keys, export, monitor, arguments })
    }

    /// Who serves the disk.
    ///
    /// # Panics
    /// After a restore that failed before there was a new one.
    pub fn server(&self) -> &Server {
        self.server.as_ref().expect("a server")
    }

    /// The file of the disk.
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// The monitor that vmstrata uses.
    pub fn monitor(&self) -> &Path {
        &self.monitor
    }

    /// `vmstrata vm WORDS --vault REPOSITORY...`; repositories are made if they are not there.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn vm_command(&self, words: &[&str], repositories: &[PathBuf]) -> Result<Command> {
        repositories.iter().try_for_each(fs::create_dir_all)?;
        let mut command = Command::new(server::vmstrata());
        command.arg("vm").args(words).env("VMSTRATA_CONTROL", self.server().control());
        repositories.iter().for_each(|repository| _ = command.arg("--vault").arg(repository));
        Ok(command)
    }

    /// The same with the monitor.
    ///
    /// # Errors
    /// As [`ServedGuest::vm_command`].
    pub fn vm_monitored(&self, words: &[&str], repositories: &[PathBuf]) -> Result<Command> {
        let mut command = self.vm_command(words, repositories)?;
        command.arg("--qmp").arg(&self.monitor);
        Ok(command)
    }

    /// Kills the guest, puts its disk back to the snapshot of the same name, and starts it from `GUEST@NAME`.
    ///
    /// # Errors
    /// When the disk cannot be put back, or a program does not start.
    pub fn restore(&mut self, snapshot: &str, repositories: &[PathBuf], flags: &[&str]) -> Result<()> {
        let (_, name) = snapshot.split_once('@').context("GUEST@NAME")?;
        self.restore_on(name, snapshot, repositories, flags)
    }

    /// As [`ServedGuest::restore`], with the disk put back to the snapshot `name`.
    ///
    /// # Errors
    /// As [`ServedGuest::restore`].
    pub fn restore_on(
        &mut self,
        name: &str,
        snapshot: &str,
        repositories: &[PathBuf],
        flags: &[&str],
    ) -> Result<()> {
        self.end()?;
        let mut revert = Command::new(server::vmstrata());
        revert.args(["snapshot", "revert"]).arg(&self.disk).arg(name);
        if self.keys.contains("tier=") {
            must(revert.arg("--yes").env("VMSTRATA_CONTROL", self.server().control()))?;
        } else {
            let kept = self.disk.with_file_name("after.qcow2");
            // There is none before the first time.
            let _ = fs::remove_file(&kept);
            self.serve_again(None, || must(revert.arg("--keep").arg(kept)).map(drop))?;
        }
        let mut restore = self.vm_monitored(&["restore", snapshot], repositories)?;
        // The disk may have the same bytes at another snapshot: the caller knows.
        restore.args((snapshot.split_once('@').map(|(_, own)| own) != Some(name)).then_some("--force"));
        restore.args(flags).args(["--", "qemu-system-x86_64"]).args(&self.arguments);
        self.vm = Vm::start(restore)?;
        Ok(())
    }

    /// Ends the server, has something done without it, and starts another, with other keys of the disk if any are given.
    ///
    /// # Errors
    /// When a server does not end or start, and what is done says.
    pub fn serve_again(
        &mut self,
        keys: Option<String>,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let socket = self.export.socket(self.server()).display().to_string();
        self.server.take().context("a server")?.stop()?;
        meanwhile()?;
        self.keys = keys.unwrap_or_else(|| self.keys.clone());
        let server = self.server.insert(serve_keyed(&self.disk, &self.keys)?);
        let moved = self.export.socket(server).display().to_string();
        self.arguments.iter_mut().for_each(|word| *word = word.replace(&socket, &moved));
        Ok(())
    }

    /// Kills the server under the guest, and starts it again.
    ///
    /// # Errors
    /// As [`kill_and_serve`].
    pub fn kill_server(&mut self) -> Result<()> {
        kill_and_serve(self.server.as_mut().context("a server")?, &mut self.vm).map(drop)
    }

    /// Kills the guest; one that was restored is the child of the command that did it.
    ///
    /// # Errors
    /// When nothing can be started in its place.
    pub fn end(&mut self) -> Result<()> {
        let pid = self.vm.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let _ = Command::new("kill").args(["-KILL", child]).status();
        }
        self.vm = Vm::start(Command::new("true"))?;
        Ok(())
    }
}

impl Drop for ServedGuest {
    fn drop(&mut self) {
        // What cannot be killed is gone.
        let _ = self.end();
    }
}

/// Serves a disk through both exports, for writing.
///
/// # Errors
/// When the server does not come that far.
pub fn serve(disk: &Path) -> Result<Server> {
    serve_keyed(disk, "")
}

fn serve_keyed(disk: &Path, keys: &str) -> Result<Server> {
    let disk = Disk { path: disk.to_owned(), writable: true, backing: None };
    let mut server = Server::start_keyed(&disk, keys)?;
    server.wait_for_vhost_user()?;
    server.wait_for_nbd()?;
    Ok(server)
}

/// Kills a server, and starts it again, until it has answered a request of its guest, or the guest is done: then it returns true.
///
/// QEMU before 8.2 never comes back to a server that is killed while it connects.
///
/// # Errors
/// When the server does not come that far, or the guest complains of its disk.
pub fn kill_and_serve(server: &mut Server, vm: &mut Vm) -> Result<bool> {
    server.crash()?;
    server.restart()?;
    server.wait_for_vhost_user()?;
    let begun = Instant::now();
    while requests(server)? == 0 {
        if vm.saw("guest: done", LOOK)? {
            return Ok(true);
        }
        ensure!(begun.elapsed() < SERVED_MAX, "the guest asks for nothing: {}", vm.console());
    }
    Ok(false)
}

/// Requests that a server has taken by vhost-user.
fn requests(server: &Server) -> Result<u64> {
    let mut status = Command::new(server::vmstrata());
    let said = must(status.args(["status", "--json", "--control"]).arg(server.control()))?;
    let status: serde_json::Value = serde_json::from_slice(&said.stdout)?;
    let exports = status["exports"].as_array().context("no exports")?;
    Ok(exports.iter().filter_map(|export| export["counters"]["requests"].as_u64()).sum())
}

/// Runs a command that has to succeed.
///
/// # Errors
/// When it does not; with what it says.
pub fn must(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}
