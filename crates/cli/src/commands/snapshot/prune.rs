//! `vmstrata snapshot prune`: deletes the snapshots that no rule keeps.

use anyhow::Result;
use serde::Serialize;
use vmstrata_disk::snapshot::{Snapshot, SnapshotInfo, list};

use super::{run_delete, text};
use crate::args::{SnapshotDeleteArgs, SnapshotPruneArgs};
use crate::output::{counted, print, print_json};

/// The label of snapshots of disks that were taken with one of a guest's memory, which needs them: `GUEST@NAME`.
pub const MEMORY_LABEL: &str = "memory";

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
    let (with_memory, looked_at): (Vec<_>, Vec<&SnapshotInfo>) = snapshots
        .iter()
        .filter_map(|snapshot| prunable(snapshot, args))
        .partition(|info| has_memory(info, args));
    let taken: Vec<u64> = looked_at.iter().map(|info| info.taken_ns).collect();
    let kept = args.keep.decide(&taken);
    let named = |wanted: bool| {
        let those = looked_at.iter().zip(&kept).filter(move |(_, kept)| **kept == wanted);
        those.map(|(info, _)| info.name.as_str()).collect::<Vec<_>>()
    };
    let with_memory = with_memory.iter().map(|info| info.name.as_str()).collect();
    let plan = Plan { disk: text(&args.disk), keep: named(true), delete: named(false), with_memory };
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

/// What is known of a snapshot that rules may speak of: named, of this disk itself, with the labels asked for.
fn prunable<'a>(snapshot: &'a Snapshot, args: &SnapshotPruneArgs) -> Option<&'a SnapshotInfo> {
    let info = snapshot.info.as_ref()?;
    (snapshot.origin.is_none() && args.label.iter().all(|label| info.labels.contains(label))).then_some(info)
}

/// Whether a guest's memory at that instant is worth nothing without it, and the labels asked for do not speak of that.
fn has_memory(info: &SnapshotInfo, args: &SnapshotPruneArgs) -> bool {
    let is_it = |(key, _): &(String, String)| key == MEMORY_LABEL;
    info.labels.iter().any(is_it) && !args.label.iter().any(is_it)
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
