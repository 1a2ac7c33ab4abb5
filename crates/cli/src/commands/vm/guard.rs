//! A second process that lets a guest go on when the one that holds it is killed.
//!
//! The snapshot that did not come to be has left one of the guest's disks: that is deleted, too.
//!
//! The guard waits for a word on its input. A holder that is done says it; one that is killed does not, and its end of
//! the pipe closes: then the guard connects to QEMU's monitor, which the dead holder has left free, and puts QEMU back to what
//! it was. Meanwhile it reads what QEMU writes of the guest, which waits for somebody to read it; the reading end of that pipe
//! is what the guard has as its standard output.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vmstrata_memory::capture::{Before, Channel};
use vmstrata_memory::qmp::{Qmp, QmpError};
use vmstrata_memory::vault::{VaultError, Which};

use super::disks::ServedDisks;
use crate::args::{ResumeGuardArgs, VmSnapshotArgs};
use crate::client::Client;
use crate::commands::OWN_PROGRAM;

/// How long is tried to put QEMU back to what it was.
const PUT_BACK_MAX: Duration = Duration::from_secs(3600);
/// How soon after a failure.
const AGAIN: Duration = Duration::from_millis(100);
/// What a holder that is done says.
const DONE: u8 = b'd';

/// A guard that watches this process.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Starts a guard for the guest behind `monitor`, which was as `before` says and is captured through `channel`, while
    /// the snapshot `name` of `taken_ns` is taken of it and `disks`. It is in a process group of its own, so what is sent to this one does
    /// not reach it.
    ///
    /// # Errors
    /// When no process can be started.
    pub(super) fn start(
        monitor: &Path,
        before: &Before,
        channel: &Channel,
        (args, name, taken_ns): (&VmSnapshotArgs, &str, u64),
        disks: &ServedDisks,
    ) -> Result<Self> {
        let mut command = Command::new(OWN_PROGRAM);
        command.args(["vm", "resume-guard"]).arg(monitor).process_group(0);
        command.args(["--snapshot", &format!("{}@{name}", args.guest), "--taken-ns", &taken_ns.to_string()]);
        for home in args.vault.vault.iter().flat_map(|homes| &homes.0) {
            command.arg("--vault").arg(home.to_string());
        }
        for disk in disks.names() {
            command.args(["--disk", disk]);
        }
        if let Some(control) = &args.server.control {
            command.arg("--control").arg(control);
        }
        if before.ran {
            command.arg("--run");
        }
        if let Some(name) = &before.capability {
            command.args(["--unset", name]);
        }
        command.stdin(Stdio::piped()).stdout(channel.second_reader()?).stderr(Stdio::null());
        Ok(Self(command.spawn().context("starting a process that lets the guest go on")?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut input) = self.0.stdin.take() {
            // A guard that is gone guards nothing any more.
            let _ = input.write_all(&[DONE]);
        }
        let _ = self.0.wait();
    }
}

/// Is a guard.
///
/// # Errors
/// When the guest must be resumed, and QEMU does not do it.
pub(super) fn run(args: &ResumeGuardArgs) -> Result<ExitCode> {
    let mut word = [0];
    if io::stdin().read(&mut word).unwrap_or(0) == 1 && word[0] == DONE {
        return Ok(ExitCode::SUCCESS);
    }
    let mut state = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    // Until QEMU is done, or this process is.
    std::thread::spawn(move || io::copy(&mut state, &mut io::sink()));
    put_back(&args.qmp, &Before { ran: args.run, capability: args.unset.clone() })?;
    if let Which::Named { name, .. } = &args.snapshot
        && !args.disks.is_empty()
        && matches!(super::store::open(&args.vault)?.find_id(&args.snapshot), Err(VaultError::NotFound(_)))
    {
        ServedDisks::asked(Client::new(&args.server)?, args.disks.clone(), name, args.taken_ns).undo_late();
    }
    Ok(ExitCode::SUCCESS)
}

/// Puts QEMU back to what it was. Tries again where its monitor does not answer, is another's, or breaks off: as long as this
/// process lives it reads what QEMU writes, which the guest waits for.
fn put_back(monitor: &Path, before: &Before) -> Result<(), QmpError> {
    let deadline = Instant::now() + PUT_BACK_MAX;
    loop {
        let done = Qmp::connect(monitor, super::PATIENCE).and_then(|mut qmp| before.put_back(&mut qmp));
        let is_gone = matches!(done, Err(QmpError::Connect { .. }));
        if done.is_ok() || is_gone || Instant::now() > deadline {
            return done;
        }
        std::thread::sleep(AGAIN);
    }
}
