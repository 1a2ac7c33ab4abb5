//! `vmstrata snapshot prune`: deletes the snapshots that no rule keeps.

use anyhow::Result;
use serde::Serialize;
use vmstrata_disk::snapshot::{Pruning, list, now_ns};
use vmstrata_types::path_to_text;

use super::run_delete;
use crate::args::{SnapshotDeleteArgs, SnapshotPruneArgs};
use crate::output::{answer, counted};

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
    /// Kept by no rule, but by holds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    held: Vec<&'a str>,
    /// Taken, they say, after now or after a newer one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    misdated: Vec<&'a str>,
}

/// Runs the command.
///
/// # Errors
/// What could not be deleted; every state of the disk that is left is as it was.
pub fn run(args: &SnapshotPruneArgs) -> Result<()> {
    let snapshots = list(&args.disk, &args.access.common.open())?;
    let Pruning { keep, delete, with_memory, held, misdated } =
        Pruning::of(&snapshots, &args.keep, &args.label, now_ns());
    let plan = Plan { disk: path_to_text(&args.disk), keep, delete, with_memory, held, misdated };
    if args.dry_run || plan.delete.is_empty() {
        return plan.tell(args);
    }
    for note in plan.notes() {
        eprintln!("vmstrata: {}: {note}", plan.disk);
    }
    let names = plan.delete.iter().map(|name| (*name).to_owned()).collect();
    run_delete(&SnapshotDeleteArgs {
        disk: args.disk.clone(),
        names,
        keep_files: false,
        dry_run: false,
        direction: vmstrata_api::MergeDirection::default(),
        how: args.how,
        access: args.access.clone(),
    })
}

impl Plan<'_> {
    fn tell(&self, args: &SnapshotPruneArgs) -> Result<()> {
        answer(args.access.common.json, self, || {
            let (count, kept) = (counted(self.delete.len() as u64, "snapshot"), self.keep.len());
            let mut said = format!("{}: {count} to delete, {kept} to keep by {}\n", self.disk, args.keep);
            said.extend(self.delete.iter().map(|name| format!("  {name}\n")));
            said.extend(self.notes().map(|note| format!("  ({note})\n")));
            said
        })
    }

    fn notes(&self) -> impl Iterator<Item = String> {
        self.left_alone().into_iter().chain(self.held()).chain(self.wrong_clock())
    }

    fn wrong_clock(&self) -> Option<String> {
        let names = self.misdated.join(", ");
        (!names.is_empty())
            .then(|| format!("the clock was wrong when {names} was taken, or is now: rules go by the order"))
    }

    fn held(&self) -> Option<String> {
        let names = self.held.join(", ");
        (!names.is_empty())
            .then(|| format!("no rule keeps {names}, but holds do: vmstrata snapshot release lets them go"))
    }

    fn left_alone(&self) -> Option<String> {
        let count = counted(self.with_memory.len() as u64, "snapshot");
        let way = "vmstrata vm prune --disks deletes both, vmstrata snapshot delete the disk's";
        (!self.with_memory.is_empty())
            .then(|| format!("{count} taken with a guest's memory left alone: {way}"))
    }
}
