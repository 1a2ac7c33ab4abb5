//! A second process that undoes what a killed one leaves.
//!
//! ```text
//!   holder ── what to undo, a list of `Undo` a line ──► guard's standard input
//!     │  each line before the step that it is for; an empty list: all is done
//!     └─ ends or is killed: the pipe closes ──► the guard carries out the last list, and ends
//! ```
//!
//! QEMU blocks until its migration stream is read. So a capture's guard has the reading end of that pipe as its standard output,
//! and reads on when the holder is gone.

mod undo;

use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::commands::OWN_PROGRAM;
pub(super) use undo::{Clone, MARK, Resume, Undo};

/// A guard that watches this process.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Starts a guard, with nothing to undo. It is in a process group of its own, so what is sent to this one does not reach
    /// it.
    ///
    /// # Errors
    /// When no process can be started.
    pub(super) fn start(stdout: Stdio, stderr: Stdio) -> Result<Self> {
        let mut command = Command::new(OWN_PROGRAM);
        command.args(["vm", "guard"]).process_group(0).stdin(Stdio::piped()).stdout(stdout).stderr(stderr);
        Ok(Self(command.spawn().context("starting the process that cleans up if this one is killed")?))
    }

    /// Sets what there is to undo from now on.
    ///
    /// # Errors
    /// A path that is not UTF-8.
    pub(super) fn set(&mut self, undo: &[Undo]) -> Result<()> {
        let mut line = serde_json::to_vec(undo)?;
        line.push(b'\n');
        // A guard that is gone guards nothing any more.
        let _ = self.0.stdin.as_mut().map(|input| input.write_all(&line));
        Ok(())
    }
}

impl Drop for Guard {
    /// Waits until the guard has undone what it was given last.
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Is a guard. Says what it cannot undo.
pub(super) fn run() -> ExitCode {
    let mut undo: Vec<Undo> = Vec::new();
    for line in io::stdin().lock().lines() {
        // A line that was cut off is for a step that was not made.
        if let Some(newer) = line.ok().and_then(|line| serde_json::from_str(&line).ok()) {
            undo = newer;
        }
    }
    let mut code = ExitCode::SUCCESS;
    // Newest first: later steps depend on earlier ones.
    for error in undo.iter().rev().filter_map(|undo| undo.carry_out().err()) {
        eprintln!("vmstrata: warning: {error:#}");
        code = ExitCode::FAILURE;
    }
    code
}
