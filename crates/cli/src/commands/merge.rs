//! `vmstrata snapshot delete`, `vmstrata merge` and `vmstrata flatten`: drops layers from chains of files.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use vmstrata_disk::OpenOptions;
use vmstrata_disk::merge::{
    Direction, LayerRef, Meant, Merge, MergeOptions, MergeRange, Merged, Removal, ranges_of,
};
use vmstrata_server::Bucket;

use super::backup::watched;
use super::snapshot::live::Live;
use super::snapshot::{open_options, resources};
use crate::args::{FlattenArgs, JournalArgs, MergeArgs, SnapshotCommonArgs, SnapshotDeleteArgs};
use crate::output::{counted, print, print_json};
use crate::units::short_size;

/// How often is looked whether to go on, while waiting for the speed limit.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Most files listed one by one that stay for one reason; `--json` lists all.
const LISTED_MAX: usize = 6;
/// What there is to say of a merge that ended before all was done.
pub const STOPPED: &str = "every state that was to stay is as it was; begin it again to complete it";

/// What was done, for scripts.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    disk: String,
    copied_bytes: u64,
    /// Of these, bytes that were copied down into a deleted layer, which then took the place of the one above.
    copied_down_bytes: u64,
    removed: Vec<String>,
    kept: Vec<KeptFile>,
}

#[derive(Debug, Serialize)]
struct KeptFile {
    file: String,
    reason: String,
}

impl Report {
    fn add(&mut self, merged: &Merged) {
        self.copied_bytes += merged.copied_bytes;
        self.copied_down_bytes += if merged.is_down { merged.copied_bytes } else { 0 };
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
        for kept in self.kept.chunk_by(|one, next| one.reason == next.reason) {
            match kept {
                [first, .., last] if kept.len() > LISTED_MAX => {
                    let (count, why) = (kept.len(), &first.reason);
                    text += &format!("{count} files stay, {} to {}: {why}\n", first.file, last.file);
                }
                _ => kept.iter().for_each(|kept| text += &format!("{} stays: {}\n", kept.file, kept.reason)),
            }
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
    let open = open_options(&args.common, &args.journal);
    let (forget_missing, direction) = (args.how.forget_missing, args.into.into());
    let options = MergeOptions { open, removal, forget_missing, direction, ..MergeOptions::default() };
    let report = merge(&args.disk, &ranges, &options, args.how.limit, &args.journal)?;
    report.tell(&format!("{} deleted", args.names.join(", ")), &args.common)
}

/// Deletes snapshots of a disk that nobody serves, and says nothing of it.
///
/// # Errors
/// As [`delete`].
pub fn delete_quietly(disk: &Path, names: &[String]) -> Result<()> {
    let open = OpenOptions { read_only: true, ..OpenOptions::default() };
    let options = MergeOptions { open: open.clone(), ..MergeOptions::default() };
    let resources = resources(&JournalArgs::default());
    for range in ranges_of(disk, names, &open)? {
        Merge::new(disk, range, &options, &resources)?.run()?;
    }
    Ok(())
}

/// Runs `vmstrata merge`.
///
/// # Errors
/// What could not be done; the disk reads as it did.
pub fn run(args: &MergeArgs) -> Result<ExitCode> {
    if let Some(live) = Live::find(std::slice::from_ref(&args.disk), &args.server)? {
        live.merge(args)?;
        return Ok(ExitCode::SUCCESS);
    }
    let ([one, other], open) = (args.layers.ends(), open_options(&args.common, &args.journal));
    let ranges = Meant::between(&args.disk, &one, &other, &open)?.ranges(&args.disk, &open)?;
    let options = MergeOptions {
        open,
        removal: args.remove.into(),
        forget_missing: args.how.forget_missing,
        beyond_own: true,
        direction: args.into.into(),
    };
    let report = merge(&args.disk, &ranges, &options, args.how.limit, &args.journal)?;
    report.tell(&format!("{} dropped", args.layers.in_words()), &args.common)?;
    Ok(ExitCode::SUCCESS)
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
    let open = open_options(&args.common, &args.journal);
    let meant = match &args.onto {
        Some(base) => Meant::above(&args.disk, &LayerRef::File(base.clone()), &open)?,
        None => Meant::below(&args.disk, &open)?,
    };
    let ranges = meant.ranges(&args.disk, &open)?;
    let (removal, forget_missing) = (args.remove.into(), args.how.forget_missing);
    let direction = Direction::Up;
    let options = MergeOptions { open, removal, forget_missing, direction, ..MergeOptions::default() };
    let report = merge(&args.disk, &ranges, &options, args.how.limit, &args.journal)?;
    report.tell(&args.done(), &args.common)?;
    Ok(ExitCode::SUCCESS)
}

fn merge(
    disk: &Path,
    ranges: &[MergeRange],
    options: &MergeOptions,
    limit: Option<u64>,
    journal: &JournalArgs,
) -> Result<Report> {
    let resources = resources(journal);
    let mut report = Report { disk: disk.display().to_string(), ..Report::default() };
    let mut bucket = Bucket::new(limit, Instant::now());
    watched("merging", false, |goes_on| {
        let mut done = 0;
        for &range in ranges {
            let mut merge = Merge::new(disk, range, options, &resources)?;
            let total = merge.total() * ranges.len() as u64;
            while let Some(action) = merge.select() {
                while goes_on(done, total) && !bucket.wait(Instant::now()).is_zero() {
                    std::thread::sleep(bucket.wait(Instant::now()).min(LOOK_EVERY));
                }
                ensure!(goes_on(done, total), "{}: ended before all was done: {STOPPED}", disk.display());
                bucket.take(merge.apply(action)?, Instant::now());
                done += 1;
            }
            report.add(merge.merged());
        }
        Ok(())
    })?;
    Ok(report)
}
