//! `vmstrata recover`: brings what a flush log has into the images, without a server.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use serde::Serialize;
use vmstrata_server::flush_log::{self, Held};
use vmstrata_types::path_to_text;

use crate::args::RecoverArgs;
use crate::audit;
use crate::output::{Table, answer};
use crate::units::short_size;

/// What was done, or would be.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    log: String,
    dry_run: bool,
    images: Vec<OfImage>,
}

/// What the log had of an image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct OfImage {
    /// By the name that it had when it was opened.
    image: String,
    bytes: u64,
    #[serde(rename = "state")]
    becomes: Becomes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Becomes {
    Written,
    Synced,
    Lost,
}

/// Runs the command.
///
/// # Errors
/// A log or an image that cannot be used.
pub fn run(args: &RecoverArgs) -> Result<ExitCode> {
    let discarded = args.discard.iter().map(std::path::absolute).collect::<Result<Vec<_>, _>>()?;
    ensure!(
        args.dry_run || args.yes || discarded.is_empty(),
        "flushed writes would be lost: look with --dry-run, then say --yes"
    );
    let held = flush_log::held(&args.log)?;
    let unknown = discarded.iter().find(|image| !held.iter().any(|held| held.subject.path == **image));
    if let Some(image) = unknown {
        anyhow::bail!("{} has nothing of {}", args.log.display(), image.display());
    }
    let images = held.iter().map(|held| OfImage::new(held, &discarded)).collect();
    let report = Report { log: path_to_text(&args.log), dry_run: args.dry_run, images };
    if !args.dry_run {
        let images = held.iter().map(|held| &held.subject.path);
        audit::change(audit::of("recover", images), |what| {
            what.bytes = Some(report.images.iter().map(|image| image.bytes).sum());
            Ok(flush_log::recover(&args.log, &discarded)?)
        })?;
    }
    answer(args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl OfImage {
    fn new(held: &Held, discarded: &[PathBuf]) -> Self {
        let becomes = match held.is_replayed {
            _ if discarded.contains(&held.subject.path) => Becomes::Lost,
            true => Becomes::Written,
            false => Becomes::Synced,
        };
        Self { image: path_to_text(&held.subject.path), bytes: held.bytes, becomes }
    }
}

impl Report {
    fn text(&self) -> String {
        if self.images.is_empty() {
            return format!("{}: nothing to recover\n", self.log);
        }
        let mut table = Table::new(["FLUSHED", "IMAGE", "STATE"]);
        for image in &self.images {
            let state = match (image.becomes, self.dry_run) {
                (Becomes::Written, true) => "would be written into the image",
                (Becomes::Written, false) => "written into the image",
                (Becomes::Synced, true) => "is in the page cache, and would be synced",
                (Becomes::Synced, false) => "synced",
                (Becomes::Lost, true) => "WOULD BE LOST",
                (Becomes::Lost, false) => "lost",
            };
            table.row([short_size(image.bytes), image.image.clone(), state.to_owned()]);
        }
        table.to_string()
    }
}
