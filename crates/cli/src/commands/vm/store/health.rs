//! `vmstrata vm verify` and `vmstrata vm repair`.

use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use vmstrata_memory::vault::{Health, Listed, OneDevice};

use super::super::kept::{Keeping, Look};
use super::{ids, open};
use crate::args::{ControlArgs, VmRepairArgs, VmVerifyArgs};
use crate::audit::{self, What};
use crate::output::{Progress, answer, counted};

const EXIT_LOST: u8 = 2;
const EXIT_FEWER: u8 = 3;

/// What a snapshot has left, as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row<'a> {
    id: String,
    snapshot: Option<&'a str>,
    whole: bool,
    complete: bool,
    /// Whether its disks' states are kept.
    state: Option<&'static str>,
    lost_critical_pages: u64,
    lost_clean_pages: u64,
    lost_metadata_pages: u64,
    problems: &'a [String],
    /// Other snapshots that use the objects with those problems.
    also_concerned: &'a [String],
}

impl<'a> Row<'a> {
    fn new(health: &'a Health, keeping: Option<&Keeping>) -> Self {
        Self {
            id: health.id.to_string(),
            snapshot: health.title.as_deref(),
            whole: health.is_whole(),
            complete: health.is_complete(),
            state: keeping.map(Keeping::name),
            lost_critical_pages: health.lost_critical,
            lost_clean_pages: health.lost_clean,
            lost_metadata_pages: health.lost_metadata,
            problems: &health.problems,
            also_concerned: &health.others,
        }
    }
}

/// What was repaired, as data.
#[derive(Debug, Serialize)]
struct Report<'a> {
    made: &'a [String],
    /// Snapshots that use what was made again.
    mended: &'a [String],
    snapshots: Vec<Row<'a>>,
}

/// Runs `vmstrata vm verify`.
///
/// # Errors
/// When the vault cannot be read.
pub fn run_verify(args: &VmVerifyArgs) -> Result<ExitCode> {
    let vault = open(&args.vault)?;
    let progress = Progress::of(args.quiet, "snapshots");
    let health = vault.verify(&ids(&vault, &args.snapshots)?, |done, all| {
        progress.update("verifying", done, all);
    })?;
    drop(progress);
    let keeping = keeping(&vault.list()?, &health, &args.server)?;
    let rows: Vec<Row<'_>> =
        health.iter().zip(&keeping).map(|(health, keeping)| Row::new(health, keeping.as_ref())).collect();
    answer(args.json, &rows, || {
        health
            .iter()
            .zip(&keeping)
            .map(|(health, keeping)| text(health, keeping.as_ref()))
            .collect::<String>()
    })?;
    let is_kept = |keeping: &Option<Keeping>| keeping.as_ref().is_none_or(|it| *it == Keeping::Complete);
    Ok(if keeping.iter().all(is_kept) { exit_code(&health) } else { EXIT_LOST.into() })
}

/// `[snapshot]`: whether the states of its disks are kept; `None` where it is not known which they are.
fn keeping(listed: &[Listed], health: &[Health], server: &ControlArgs) -> Result<Vec<Option<Keeping>>> {
    let look = Look::at_all(listed, server)?;
    let info = |health: &Health| {
        listed.iter().find(|listed| listed.id == health.id).and_then(|listed| listed.info.as_ref().ok())
    };
    Ok(health.iter().map(|health| info(health).map(|info| look.of(&info.disks))).collect())
}

/// Runs `vmstrata vm repair`.
///
/// # Errors
/// When the vault cannot be read, or a copy cannot be written.
pub fn run_repair(args: &VmRepairArgs) -> Result<ExitCode> {
    let vault = open(&args.vault)?;
    let one_device = if args.one_device { OneDevice::Allow } else { OneDevice::Refuse };
    let ids = ids(&vault, &args.snapshots)?;
    let titles = args.snapshots.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let what = What { object: Some(titles).filter(|titles| !titles.is_empty()), ..What::of("vm_repair", []) };
    let repaired = audit::change(what, |_| Ok(vault.repair(&ids, one_device)?))?;
    let snapshots = repaired.health.iter().map(|health| Row::new(health, None)).collect();
    answer(args.json, &Report { made: &repaired.made, mended: &repaired.mended, snapshots }, || {
        let made: String = repaired.made.iter().map(|copy| format!("{copy}: made again\n")).collect();
        let mended = match &repaired.mended[..] {
            [] => String::new(),
            mended => format!("used by {}\n", mended.join(", ")),
        };
        made + &mended + &repaired.health.iter().map(|health| text(health, None)).collect::<String>()
    })?;
    Ok(exit_code(&repaired.health))
}

fn exit_code(health: &[Health]) -> ExitCode {
    if !health.iter().all(Health::is_whole) {
        return EXIT_LOST.into();
    }
    if health.iter().all(Health::is_complete) { ExitCode::SUCCESS } else { EXIT_FEWER.into() }
}

/// A line for a snapshot, and one for each thing that is wrong.
fn text(health: &Health, keeping: Option<&Keeping>) -> String {
    let id = health.id.to_string();
    let title = health.title.as_ref().unwrap_or(&id);
    let lost = |pages: u64, kind: &str| {
        if pages == 0 { String::new() } else { format!(", {} lost", counted(pages, kind)) }
    };
    let verdict = match (health.is_whole(), health.is_complete()) {
        (false, _) => "cannot be restored",
        (true, true) => "whole",
        (true, false) => "can be restored, and lacks copies",
    };
    let critical = lost(health.lost_critical, "critical page");
    let clean = lost(health.lost_clean, "clean page");
    let metadata = lost(health.lost_metadata, "metadata page");
    let mut lines = format!("{title}: {verdict}{critical}{clean}{metadata}\n");
    for problem in &health.problems {
        lines += &format!("  {problem}\n");
    }
    if let Some((state, why)) = keeping.and_then(|keeping| Some((keeping.name(), keeping.why()?))) {
        lines += &format!("  its disks are {state}, and it cannot be restored: {why}\n");
    }
    if !health.others.is_empty() {
        lines += &format!("  also concerned: {}\n", health.others.join(", "));
    }
    lines
}
