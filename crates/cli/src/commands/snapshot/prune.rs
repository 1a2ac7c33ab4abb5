//! `vmstrata snapshot prune`: deletes the snapshots that no rule keeps.

use anyhow::Result;
use serde::Serialize;
use vmstrata_disk::snapshot::{Pruning, list};

use super::{run_delete, text};
use crate::args::{SnapshotDeleteArgs, SnapshotPruneArgs};
use crate::output::{counted, print, print_json};

/// What would be done, for scripts.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Plan<'a> {
    disk: String,
    keep: Vec<&'a str>,
    delete: Vec<&'a str>,
    /// Left alone for the sake of snapshots of memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    with_memory: Vec<&'a str>,
}

/// Runs the command.
///
/// # Errors
/// What could not be deleted; every state of the disk that is left is as it was.
pub fn run(args: &SnapshotPruneArgs) -> Result<()> {
    let snapshots = list(&args.disk, &args.common.open())?;
    let Pruning { keep, delete, with_memory } = Pruning::of(&snapshots, &args.keep, &args.label);
    let plan = Plan { disk: text(&args.disk), keep, delete, with_memory };
    if args.dry_run || plan.delete.is_empty() {
        return plan.tell(args);
    }
    if let Some(left) = plan.left_alone() {
        eprintln!("vmstrata: {}: {left}", plan.disk);
    }
    let names = plan.delete.iter().map(|name| (*name).to_owned()).collect();
    run_delete(&SnapshotDeleteArgs {
        disk: args.disk.clone(),
        names,
        keep_files: false,
        how: args.how,
        runtime_dir: args.runtime_dir.clone(),
        server: args.server.clone(),
        common: args.common.clone(),
    })
}

impl Plan<'_> {
    fn tell(&self, args: &SnapshotPruneArgs) -> Result<()> {
        if args.common.json {
            return Ok(print_json(self)?);
        }
        let count = counted(self.delete.len() as u64, "snapshot");
        let mut said =
            format!("{}: {count} to delete, {} to keep by {}\n", self.disk, self.keep.len(), args.keep);
        for name in &self.delete {
            said += &format!("  {name}\n");
        }
        said += &self.left_alone().map(|left| format!("  ({left})\n")).unwrap_or_default();
        Ok(print(&said)?)
    }

    fn left_alone(&self) -> Option<String> {
        let count = counted(self.with_memory.len() as u64, "snapshot");
        let way = "vmstrata vm prune --disks deletes both, vmstrata snapshot delete the disk's";
        (!self.with_memory.is_empty())
            .then(|| format!("{count} taken with a guest's memory left alone: {way}"))
    }
}
