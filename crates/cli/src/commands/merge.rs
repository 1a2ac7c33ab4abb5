//! `vmstrata snapshot delete`, `vmstrata merge` and `vmstrata flatten`: drops layers from chains of files.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;
use vmstrata_api::{MergeDirection, RemoveFiles, Removed};
use vmstrata_disk::OpenOptions;
use vmstrata_disk::merge::{
    Forecast, Going, LayerRef, Merge, MergeOptions, MergeRange, Merged, Selection, ranges_of,
};
use vmstrata_job::Bucket;
use vmstrata_server::merge_options;
use vmstrata_types::path_to_text;

use super::backup::until_stopped;
use super::snapshot::live::Live;
use super::snapshot::resources;
use crate::args::{FlattenArgs, JournalArgs, LoseArgs, MergeArgs, SnapshotCommonArgs, SnapshotDeleteArgs};
use crate::attach::absolute;
use crate::audit::{self, What};
use crate::output::{Progress, Table, answer, counted};
use crate::units::short_size;

/// Most files listed one by one that stay for one reason; `--json` lists all.
const LISTED_MAX: usize = 6;
/// What there is to say of a merge that ended before all was done.
pub const STOPPED: &str = "no state that stays was changed; run the command again to complete it";

/// What was done, for scripts.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    disk: String,
    copied_bytes: u64,
    /// Of these, bytes that were committed into a deleted layer, which then took the place of the one above.
    committed_bytes: u64,
    removed: Vec<String>,
    /// Bytes of the host's storage that are free by that, less what the copying took.
    freed_bytes: u64,
    kept: Vec<KeptFile>,
}

#[derive(Debug, Serialize)]
struct KeptFile {
    file: String,
    reason: String,
}

/// What was done, in one line: the same whether a server did it or not.
pub fn line(disk: &str, done: &str, copied_bytes: u64, removed: Removed) -> String {
    let (copied, freed) = (short_size(copied_bytes), short_size(removed.freed_bytes));
    format!("{disk}: {done}: {copied} copied, {} removed, {freed} freed\n", counted(removed.files, "file"))
}

impl Report {
    fn add(&mut self, merged: &Merged) {
        self.copied_bytes += merged.copied_bytes;
        self.committed_bytes += if merged.is_commit { merged.copied_bytes } else { 0 };
        self.removed.extend(merged.removed.iter().map(|file| path_to_text(file)));
        self.freed_bytes += merged.freed_bytes;
        let kept = |(file, why): &(std::path::PathBuf, vmstrata_disk::merge::Kept)| KeptFile {
            file: path_to_text(file),
            reason: why.to_string(),
        };
        self.kept.extend(merged.kept.iter().map(kept));
    }

    fn text(&self, done: &str) -> String {
        let removed = Removed { files: self.removed.len() as u64, freed_bytes: self.freed_bytes };
        let mut text = line(&self.disk, done, self.copied_bytes, removed);
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
        answer(common.json, self, || self.text(done))
    }
}

/// Deletes snapshots of a disk that no server serves.
///
/// # Errors
/// What could not be done; the chain is sound.
pub fn delete(args: &SnapshotDeleteArgs) -> Result<()> {
    let ranges = ranges_of(&args.disk, &args.names, &args.access.common.open())?;
    let options = delete_options(args);
    let what = audit::of("snapshot_delete", [&args.disk]).object(args.names.join(", "));
    let report = merge(what, &args.disk, &ranges, &options, args.how.limit, &args.access.journal)?;
    report.tell(&format!("{} deleted", args.names.join(", ")), &args.access.common)
}

/// Says what deleting snapshots would do.
///
/// # Errors
/// What would refuse it.
pub fn foresee_delete(args: &SnapshotDeleteArgs, is_served: bool) -> Result<()> {
    let ranges = ranges_of(&args.disk, &args.names, &args.access.common.open())?;
    let forecast = Forecast::of(&args.disk, &ranges, &delete_options(args), is_served)?;
    tell_forecast(&args.disk, &forecast, &args.access.common)
}

fn delete_options(args: &SnapshotDeleteArgs) -> MergeOptions {
    let remove = if args.keep_files { RemoveFiles::None } else { RemoveFiles::Snapshots };
    merge_options(args.access.open(), remove, args.direction, args.how.forget_missing)
}

/// Deletes snapshots of a disk that no server serves, and says nothing of it.
///
/// # Errors
/// As [`delete`].
pub fn delete_quietly(disk: &Path, names: &[String]) -> Result<()> {
    let open = OpenOptions { read_only: true, ..OpenOptions::default() };
    audit::change(audit::of("snapshot_delete", [disk]).object(names.join(", ")), |what| {
        what.bytes = Some(drop_states(disk, names, &open)?);
        Ok(())
    })
}

/// Merges snapshots out of the chain of a disk that is not in use. Returns the bytes freed.
///
/// # Errors
/// As [`delete`].
pub fn drop_states(disk: &Path, names: &[String], open: &OpenOptions) -> Result<u64> {
    let options = MergeOptions { open: open.clone(), ..MergeOptions::default() };
    let (resources, mut freed) = (resources(&JournalArgs::default())?, 0);
    for range in ranges_of(disk, names, open)? {
        freed += Merge::new(disk, range, &options, &resources)?.run()?.freed_bytes;
    }
    Ok(freed)
}

/// Runs `vmstrata merge`.
///
/// # Errors
/// What could not be done; the disk reads as it did.
pub fn run(args: &MergeArgs) -> Result<ExitCode> {
    let live = Live::find(std::slice::from_ref(&args.disk), &args.access.server)?;
    if let Some(live) = live.as_ref().filter(|_| !args.lose.dry_run) {
        live.merge(args)?;
        return Ok(ExitCode::SUCCESS);
    }
    let ([one, other], open) = (args.layers.ends(), args.access.open());
    let ranges = Selection::between(&args.disk, &one, &other, &open)?.ranges(&args.disk, &open)?;
    let options = merge_options(open, args.remove.which(), args.direction, args.how.forget_missing);
    let options = MergeOptions { beyond_own: true, ..options };
    if agreed(&args.disk, &ranges, &options, args.lose, live.is_some(), &args.access.common)? {
        let what = audit::of("merge", [&args.disk]).object(args.layers.in_words());
        let report = merge(what, &args.disk, &ranges, &options, args.how.limit, &args.access.journal)?;
        report.tell(&format!("{} dropped", args.layers.in_words()), &args.access.common)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `vmstrata flatten`.
///
/// # Errors
/// What could not be done; the disk reads as it did.
pub fn flatten(args: &FlattenArgs) -> Result<ExitCode> {
    let live = Live::find(std::slice::from_ref(&args.disk), &args.access.server)?;
    if let Some(live) = live.as_ref().filter(|_| !args.lose.dry_run) {
        live.flatten(args)?;
        return Ok(ExitCode::SUCCESS);
    }
    let open = args.access.open();
    let selection = match &args.onto {
        Some(base) => Selection::above(&args.disk, &LayerRef::File(base.clone()), &open)?,
        None => Selection::below(&args.disk, &open)?,
    };
    let ranges = selection.ranges(&args.disk, &open)?;
    let remove = args.remove.which();
    let options = merge_options(open, remove, MergeDirection::Stream, args.how.forget_missing);
    if agreed(&args.disk, &ranges, &options, args.lose, live.is_some(), &args.access.common)? {
        let what = audit::of("flatten", [&args.disk]);
        let what = What { object: args.onto.as_deref().map(absolute), ..what };
        let report = merge(what, &args.disk, &ranges, &options, args.how.limit, &args.access.journal)?;
        report.tell(&args.done(), &args.access.common)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether layers are to be dropped: with `--dry-run` it is only said what would go.
///
/// # Errors
/// Named snapshots that would be lost without `--yes`.
fn agreed(
    disk: &Path,
    ranges: &[MergeRange],
    options: &MergeOptions,
    lose: LoseArgs,
    is_served: bool,
    common: &SnapshotCommonArgs,
) -> Result<bool> {
    if lose.yes && !lose.dry_run {
        return Ok(true);
    }
    let forecast = Forecast::of(disk, ranges, options, is_served)?;
    if lose.dry_run {
        tell_forecast(disk, &forecast, common)?;
        return Ok(false);
    }
    let lost = forecast.lost();
    ensure!(
        lost.is_empty(),
        "{}: it would lose {} ({}), and remove files of {}: --yes lets them go, --dry-run shows all that goes",
        disk.display(),
        counted(lost.len() as u64, "snapshot"),
        lost.join(", "),
        short_size(forecast.freed_bytes())
    );
    Ok(true)
}

/// What would go, for scripts.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Plan {
    disk: String,
    /// The disk's snapshots that are lost.
    snapshots: Vec<String>,
    /// Newest first.
    layers: Vec<PlannedLayer>,
    /// Bytes of the files that are removed.
    freed_bytes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct PlannedLayer {
    layer: usize,
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    actual_size: u64,
    /// Whether its file goes.
    removed: bool,
    /// Why it stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

fn tell_forecast(disk: &Path, forecast: &Forecast, common: &SnapshotCommonArgs) -> Result<()> {
    let layer = |layer: &Going| PlannedLayer {
        layer: layer.number,
        file: path_to_text(&layer.path),
        snapshot: layer.snapshot.clone(),
        actual_size: layer.allocated_bytes,
        removed: layer.kept.is_none(),
        reason: layer.kept.as_ref().map(ToString::to_string),
    };
    let (disk, snapshots) = (path_to_text(disk), forecast.lost());
    let layers = forecast.layers.iter().map(layer).collect();
    let plan = Plan { disk, snapshots, layers, freed_bytes: forecast.freed_bytes() };
    answer(common.json, &plan, || plan.text())
}

impl Plan {
    fn text(&self) -> String {
        let (layers, lost) = (self.layers.len() as u64, self.snapshots.len() as u64);
        let mut text = format!(
            "{}: {} to drop, {} lost with them; files of {} to remove, after copying what is still needed of them\n",
            self.disk,
            counted(layers, "layer"),
            counted(lost, "snapshot"),
            short_size(self.freed_bytes)
        );
        let mut table = Table::new([">LAYER", "SNAPSHOT", ">SIZE ON DISK", "FILE", "THEN"]);
        for layer in &self.layers {
            let then = layer.reason.as_ref().map_or("removed".to_owned(), |why| format!("stays: {why}"));
            let (name, size) = (layer.snapshot.as_deref().unwrap_or("-"), short_size(layer.actual_size));
            table.row([layer.layer.to_string(), name.to_owned(), size, layer.file.clone(), then]);
        }
        text += &table.to_string();
        text
    }
}

fn merge(
    what: What,
    disk: &Path,
    ranges: &[MergeRange],
    options: &MergeOptions,
    limit: Option<u64>,
    journal: &JournalArgs,
) -> Result<Report> {
    let resources = resources(journal)?;
    let mut report = Report { disk: path_to_text(disk), ..Report::default() };
    let mut bucket = Bucket::new(limit, Instant::now());
    let go = |what: &mut What| {
        let progress = Progress::of(false, "steps");
        until_stopped(|stop| {
            let (mut done, mut written) = (0, 0);
            let goes_on = |done, total, written| {
                progress.update_written("merging", done, total, written);
                !stop.load(Ordering::Relaxed)
            };
            for &range in ranges {
                let mut merge = Merge::new(disk, range, options, &resources)?;
                let total = merge.total() * ranges.len() as u64;
                while let Some(action) = merge.select() {
                    bucket.wait_while(|| goes_on(done, total, written));
                    ensure!(
                        goes_on(done, total, written),
                        "{}: ended before all was done: {STOPPED}",
                        disk.display()
                    );
                    merge.copy_at_most(bucket.step_bytes());
                    let bytes = merge.apply(action)?;
                    bucket.take(bytes, Instant::now());
                    written += bytes;
                    done += u64::from(!merge.is_within_action());
                }
                report.add(merge.merged());
                what.bytes = Some(report.freed_bytes);
            }
            Ok(())
        })
    };
    audit::change(what, go)?;
    Ok(report)
}
