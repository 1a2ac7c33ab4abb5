//! `vmstrata snapshot delete` and `vmstrata flatten`: drops layers from chains of files.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use vmstrata_disk::OpenOptions;
use vmstrata_disk::merge::{Merge, MergeOptions, MergeRange, Merged, Removal, all_of, ranges_of};
use vmstrata_disk::snapshot::list;

use super::snapshot::live::Live;
use super::snapshot::resources;
use crate::args::{FlattenArgs, SnapshotCommonArgs, SnapshotDeleteArgs};
use crate::output::{counted, print, print_json};
use crate::units::short_size;

/// What was done, for scripts.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    disk: String,
    copied_bytes: u64,
    removed: Vec<String>,
    kept: Vec<KeptFile>,
}

#[derive(Debug, Serialize)]
struct KeptFile {
    file: String,
    reason: String,
}

impl Report {
    fn add(&mut self, merged: Merged) {
        self.copied_bytes += merged.copied_bytes;
        self.removed.extend(merged.removed.iter().map(|file| file.display().to_string()));
        let kept = |(file, why): &(std::path::PathBuf, vmstrata_disk::merge::Kept)| KeptFile {
            file: file.display().to_string(),
            reason: why.to_string(),
        };
        self.kept.extend(merged.kept.iter().map(kept));
    }

    fn text(&self, done: &str) -> String {
        let (copied, files) = (short_size(self.copied_bytes), counted(self.removed.len() as u64, "file"));
        let mut text = format!("{}: {done}: {copied} copied, {files} removed\n", self.disk);
        for kept in &self.kept {
            text += &format!("{} stays: {}\n", kept.file, kept.reason);
        }
        text
    }

    fn tell(&self, done: &str, common: &SnapshotCommonArgs) -> Result<()> {
        if common.json { Ok(print_json(self)?) } else { Ok(print(&self.text(done))?) }
    }
}

/// Deletes snapshots of a disk that nobody serves.
///
/// # Errors
/// What could not be done; the chain is sound.
pub fn delete(args: &SnapshotDeleteArgs) -> Result<()> {
    let ranges = ranges_of(&args.disk, &args.names, &args.common.open())?;
    let removal = if args.keep_files { Removal::Nothing } else { Removal::Snapshots };
    let report = merge(&args.disk, &ranges, removal, &args.common, args.runtime_dir.as_deref())?;
    report.tell(&format!("{} deleted", args.names.join(", ")), &args.common)
}

/// Deletes snapshots of a disk that nobody serves, and says nothing of it.
///
/// # Errors
/// As [`delete`].
pub fn delete_quietly(disk: &Path, names: &[String]) -> Result<()> {
    let open = OpenOptions { read_only: true, ..OpenOptions::default() };
    let options = MergeOptions { open: open.clone(), removal: Removal::Snapshots };
    let resources = resources(None);
    for range in ranges_of(disk, names, &open)? {
        Merge::new(disk, range, &options, &resources)?.run()?;
    }
    Ok(())
}

/// Runs `vmstrata flatten`.
///
/// # Errors
/// What could not be done; the disk reads as it did.
pub fn flatten(args: &FlattenArgs) -> Result<ExitCode> {
    if let Some(live) = Live::find(std::slice::from_ref(&args.disk), &args.server)? {
        live.flatten(args)?;
        return Ok(ExitCode::SUCCESS);
    }
    let below = list(&args.disk, &args.common.open())?.len();
    let range = all_of(below + 1);
    let runtime = args.runtime_dir.as_deref();
    let report = merge(&args.disk, range.as_slice(), args.remove.into(), &args.common, runtime)?;
    report.tell("flat", &args.common)?;
    Ok(ExitCode::SUCCESS)
}

fn merge(
    disk: &Path,
    ranges: &[MergeRange],
    removal: Removal,
    common: &SnapshotCommonArgs,
    runtime_dir: Option<&Path>,
) -> Result<Report> {
    let options = MergeOptions { open: common.open(), removal };
    let resources = resources(runtime_dir);
    let mut report = Report { disk: disk.display().to_string(), ..Report::default() };
    for &range in ranges {
        report.add(Merge::new(disk, range, &options, &resources)?.run()?);
    }
    Ok(report)
}
