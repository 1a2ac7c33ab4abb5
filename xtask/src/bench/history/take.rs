//! Taking one snapshot of a running disk, by the commands that users have.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::super::qmp::Qmp;
use super::super::server::vmstrata;

/// A snapshot that was taken.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Taken {
    /// From starting the command to its end.
    pub(super) command: Duration,
    /// For how long the server says that it held writes.
    pub(super) pause: Option<Duration>,
}

/// Takes snapshots of one disk.
pub(in super::super) trait Take {
    /// Takes the next one.
    ///
    /// # Errors
    /// When the command fails.
    fn take(&mut self, name: &str) -> Result<Taken>;
}

/// `vmstrata snapshot create`.
pub(in super::super) struct Vmstrata {
    pub(in super::super) disk: PathBuf,
    pub(in super::super) control: PathBuf,
}

impl Take for Vmstrata {
    fn take(&mut self, name: &str) -> Result<Taken> {
        let mut create = Command::new(vmstrata());
        create.args(["snapshot", "create", "--json", "--name", name]);
        create.arg("--control").arg(&self.control).arg(&self.disk);
        let (out, command) = timed(&mut create)?;
        let answer: serde_json::Value = serde_json::from_slice(&out)?;
        let pause_us = answer["pause_us"].as_u64().context("no server took the snapshot")?;
        Ok(Taken { command, pause: Some(Duration::from_micros(pause_us)) })
    }
}

/// `qemu-img create -b`, then `blockdev-snapshot-sync`.
pub(super) struct Qemu {
    pub(super) qmp: Qmp,
    pub(super) dir: PathBuf,
    /// The active layer: what QEMU calls it, and its file.
    pub(super) active: (String, PathBuf),
    pub(super) size: u64,
}

impl Take for Qemu {
    fn take(&mut self, name: &str) -> Result<Taken> {
        let overlay = self.dir.join(format!("qemu.{name}.qcow2"));
        let start = Instant::now();
        // -u: without it the disk's own lock would be in the way.
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b"]);
        create.arg(self.active.1.file_name().context("a file")?).arg(&overlay).arg(self.size.to_string());
        timed(&mut create)?;
        let node = format!("node-{name}");
        let arguments = json!({
            "node-name": self.active.0, "snapshot-file": overlay, "snapshot-node-name": node,
            "format": "qcow2", "mode": "existing",
        });
        self.qmp.execute("blockdev-snapshot-sync", &arguments)?;
        self.active = (node, overlay);
        Ok(Taken { command: start.elapsed(), pause: None })
    }
}

/// What a command prints, and how long it takes, start and end of the process included.
///
/// # Errors
/// When it does not start or fails, with its words.
pub(in super::super) fn timed(command: &mut Command) -> Result<(Vec<u8>, Duration)> {
    let start = Instant::now();
    let program = Path::new(command.get_program()).to_owned();
    let output = command.output().with_context(|| format!("cannot start {}", program.display()))?;
    let elapsed = start.elapsed();
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} ended with {}: {said}", program.display(), output.status);
    Ok((output.stdout, elapsed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_fails_says_why() {
        let (out, elapsed) = timed(Command::new("sh").args(["-c", "sleep 0.02; echo x"])).unwrap();
        assert_eq!(out, b"x\n");
        assert!(elapsed >= Duration::from_millis(20));
        let error = timed(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
    }
}
