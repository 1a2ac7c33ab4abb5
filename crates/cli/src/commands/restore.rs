//! `vmstrata restore`: a disk from its backups.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use serde::Serialize;
use vmstrata_backup::{RestoreOptions, restore};
use vmstrata_disk::{ResourceOptions, Resources};
use vmstrata_types::path_to_text;

use super::backup::{image_of, watched};
use super::states::explain;
use crate::args::RestoreArgs;
use crate::attach::absolute;
use crate::audit::{self, What};
use crate::output::{answer, counted};
use crate::units::short_size;

/// The result as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    file: String,
    backups: usize,
    /// The file of the state that the disk is in, as it was called when it was backed up.
    state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    stored_bytes: u64,
    disk_bytes: u64,
    seconds: f64,
}

/// Makes the disk.
///
/// # Errors
/// When a backup is damaged or missing, or the disk cannot be written.
pub fn run(args: &RestoreArgs) -> Result<ExitCode> {
    ensure!(
        args.output.as_os_str() != "-",
        "a disk is restored to a file or a device, not to a pipe: name one"
    );
    let exists = args.output.symlink_metadata().is_ok();
    ensure!(args.force || !exists, "{}: exists already; --force replaces it", args.output.display());
    let options = RestoreOptions {
        format: args.format.into(),
        replace: args.force,
        compression: args.compress.compression(),
        bytes_per_second: args.speed.limit,
        threads: args.speed.threads,
    };
    let resources = Resources::start(ResourceOptions::default())?;
    let files: Vec<_> = args.files.iter().map(|file| image_of(file)).collect();
    let last = args.files.last().map(|file| absolute(file));
    let what = What { object: last, ..audit::of("disk_restore", [&args.output]) };
    let done = audit::change(what, |what| {
        let done = watched("restoring", args.quiet, |watch| {
            restore(&files, &args.output, &options, &resources, watch).map_err(|error| explain(&error))
        })?;
        what.bytes = Some(done.stored_bytes);
        Ok(done)
    })?;
    let report = Report {
        file: path_to_text(&args.output),
        backups: args.files.len(),
        state: done.manifest.state.file.clone(),
        snapshot: done.manifest.state.snapshot.clone(),
        stored_bytes: done.stored_bytes,
        disk_bytes: done.manifest.disk_bytes,
        seconds: done.took.as_secs_f64(),
    };
    answer(args.json, &report, || {
        let state = report.snapshot.as_ref().unwrap_or(&report.state);
        let (size, backups) = (short_size(report.disk_bytes), counted(report.backups as u64, "backup"));
        format!("{}: restored {state} from {backups}, {size}\n", report.file)
    })?;
    Ok(ExitCode::SUCCESS)
}
