//! A second process that lets a guest go on when the one that holds it is killed.
//!
//! The guard waits for a word on its input. A holder that is done says it; one that is killed does not, and its end of
//! the pipe closes: then the guard connects to QEMU's monitor, which the dead holder has left free, and resumes the guest.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use vmstrata_memory::{capture, qmp::Qmp};

use crate::args::ResumeGuardArgs;

/// What a holder that is done says.
const DONE: u8 = b'd';

/// A guard that watches this process.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Starts a guard for the guest behind `monitor`. It is in a process group of its own, so what is sent to this one does
    /// not reach it.
    ///
    /// # Errors
    /// When no process can be started.
    pub(super) fn start(monitor: &Path) -> Result<Self> {
        let program = std::env::current_exe().context("this program's own file")?;
        let mut command = Command::new(program);
        command.args(["vm", "resume-guard"]).arg(monitor).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
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
    if std::io::stdin().read(&mut word).unwrap_or(0) == 1 && word[0] == DONE {
        return Ok(ExitCode::SUCCESS);
    }
    let mut qmp = Qmp::connect(&args.qmp, super::PATIENCE)?;
    capture::resume(&mut qmp, true)?;
    Ok(ExitCode::SUCCESS)
}
