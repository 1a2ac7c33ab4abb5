//! `vmstrata gc`: lists and removes the files that disks let go of and left behind.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use serde::Serialize;
use vmstrata_disk::merge::{CollectOptions, Kept, Orphan, collect, disks_with_orphans, orphans};
use vmstrata_types::path_to_text;

use crate::args::{GcArgs, SnapshotCommonArgs};
use crate::audit;
use crate::output::{Table, answer, counted};
use crate::units::short_size;

/// What was done, or would be.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    dry_run: bool,
    disks: Vec<OfDisk>,
    /// Bytes of the files that went, or would go.
    freed_bytes: u64,
}

#[derive(Debug, Serialize)]
struct OfDisk {
    disk: String,
    files: Vec<LeftOver>,
}

/// A file that a disk left behind.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeftOver {
    file: String,
    /// The snapshot that it was, by its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    actual_size: u64,
    /// Whether nothing stands against its removal.
    removable: bool,
    /// An image that stands on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    needed_by: Option<String>,
    /// Why it stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl LeftOver {
    /// As the engine found it.
    pub fn new(orphan: &Orphan) -> Self {
        let needed_by = match &orphan.kept {
            Some(Kept::Needed { by } | Kept::Missing { by }) => Some(path_to_text(by)),
            _ => None,
        };
        Self {
            file: path_to_text(&orphan.path),
            snapshot: orphan.name.clone(),
            actual_size: orphan.allocated_bytes,
            removable: orphan.kept.is_none(),
            needed_by,
            reason: orphan.kept.as_ref().map(ToString::to_string),
        }
    }

    /// Its line in a table; `goes` says what becomes of it if nothing stands against its removal.
    pub fn row(&self, goes: &str) -> [String; 4] {
        let then = self.reason.as_ref().map_or_else(|| goes.to_owned(), |why| format!("stays: {why}"));
        let name = self.snapshot.clone().unwrap_or_else(|| "-".to_owned());
        [name, short_size(self.actual_size), self.file.clone(), then]
    }
}

/// The columns of [`LeftOver::row`].
pub const COLUMNS: [&str; 4] = ["LEFT OVER", "SIZE ON DISK", "FILE", "STATE"];

/// What a disk left behind.
///
/// # Errors
/// A chain or a directory that cannot be read.
pub fn left_over(disk: &Path, common: &SnapshotCommonArgs) -> Result<Vec<LeftOver>> {
    let options = CollectOptions { open: common.open(), ..CollectOptions::default() };
    Ok(orphans(disk, &options)?.iter().map(LeftOver::new).collect())
}

/// Runs the command.
///
/// # Errors
/// A path that is not there; a chain or a directory that cannot be read.
pub fn run(args: &GcArgs) -> Result<ExitCode> {
    let options = CollectOptions { open: args.common.open(), forget_missing: args.forget_missing };
    // A disk that is gone may have left files.
    if let Err(error) = args.path.symlink_metadata()
        && orphans(&args.path, &options)?.is_empty()
    {
        bail!("cannot open {}: {error}", args.path.display());
    }
    let disks: Vec<PathBuf> =
        if args.path.is_dir() { disks_with_orphans(&args.path)? } else { vec![args.path.clone()] };
    let mut report = Report { dry_run: !args.yes, disks: Vec::new(), freed_bytes: 0 };
    if args.yes {
        audit::change(audit::of("gc", &disks), |what| {
            for disk in &disks {
                report.add(disk, &collect(disk, &options)?);
                what.bytes = Some(report.freed_bytes);
            }
            Ok(())
        })?;
    } else {
        disks.iter().try_for_each(|disk| orphans(disk, &options).map(|found| report.add(disk, &found)))?;
    }
    answer(args.common.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn add(&mut self, disk: &Path, found: &[Orphan]) {
        let gone = found.iter().filter(|orphan| orphan.kept.is_none());
        self.freed_bytes += gone.map(|orphan| orphan.allocated_bytes).sum::<u64>();
        let files = found.iter().map(LeftOver::new).collect();
        self.disks.push(OfDisk { disk: path_to_text(disk), files });
    }

    fn text(&self) -> String {
        let (goes, done) = if self.dry_run { ("can go", "would go") } else { ("removed", "removed") };
        let mut text = String::new();
        let files = || self.disks.iter().flat_map(|disk| &disk.files);
        if files().next().is_some() {
            let mut table = Table::new(COLUMNS);
            files().for_each(|file| table.row(file.row(goes)));
            text += &table.to_string();
        }
        let count = files().filter(|file| file.removable).count() as u64;
        text += &format!("{} {done}, {} freed", counted(count, "file"), short_size(self.freed_bytes));
        text + if self.dry_run && count > 0 { ": --yes removes them\n" } else { "\n" }
    }
}
