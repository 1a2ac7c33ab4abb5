//! The disk under test, as users' commands reach it.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bench::server::vmstrata;

/// For how long a question is asked again while files come and go.
const PATIENCE: Duration = Duration::from_secs(20);

/// See the module documentation.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    pub(super) path: PathBuf,
    pub(super) control: PathBuf,
}

impl Disk {
    /// `vmstrata snapshot ...` of this disk, through its server.
    pub(super) fn ask(&self, args: &[&str]) -> Command {
        let mut command = Command::new(vmstrata());
        command.args(["snapshot", args[0], "--control"]).arg(&self.control).arg(&self.path).args(&args[1..]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Takes a snapshot.
    ///
    /// # Errors
    /// When the command fails.
    pub(super) fn take(&self, name: &str) -> Result<()> {
        let taken = self.ask(&["create", "--name", name]).stderr(Stdio::piped()).output()?;
        let said = String::from_utf8_lossy(&taken.stderr);
        ensure!(taken.status.success(), "snapshot {name}: {said}");
        Ok(())
    }

    /// The snapshots that the files say there are, newest first.
    ///
    /// # Errors
    /// When they cannot be read for a long time.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let of = |row: &Value| row["name"].as_str().map(str::to_owned);
        Ok(self.list()?.iter().filter_map(of).collect())
    }

    /// All files of the chain, newest first.
    ///
    /// # Errors
    /// When stock tools cannot read them.
    pub(super) fn layers(&self) -> Result<Vec<PathBuf>> {
        let mut info = Command::new("qemu-img");
        info.args(["info", "-U", "--backing-chain", "--output=json"]).arg(&self.path);
        let info = info.output().context("qemu-img does not run")?;
        ensure!(info.status.success(), "qemu-img info: {}", String::from_utf8_lossy(&info.stderr));
        let chain: Vec<Value> = serde_json::from_slice(&info.stdout)?;
        let file = |layer: &Value| layer["filename"].as_str().map(PathBuf::from).context("a file's name");
        chain.iter().map(file).collect()
    }

    /// Asked again while a layer goes under the eyes of who looks.
    fn list(&self) -> Result<Vec<Value>> {
        let start = Instant::now();
        loop {
            let mut list = Command::new(vmstrata());
            let listed = list.args(["snapshot", "list", "--json"]).arg(&self.path).output()?;
            if listed.status.success() {
                let listed: Value = serde_json::from_slice(&listed.stdout)?;
                return Ok(listed["snapshots"].as_array().context("snapshots")?.clone());
            }
            let said = String::from_utf8_lossy(&listed.stderr);
            ensure!(start.elapsed() < PATIENCE, "snapshot list: {said}");
            sleep(Duration::from_millis(100));
        }
    }
}
