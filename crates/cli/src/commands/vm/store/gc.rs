//! `vmstrata vm gc`.

use anyhow::{Result, bail};
use serde::Serialize;
use vmstrata_memory::vault::{Compact, Deleted};

use super::open;
use crate::args::VmGcArgs;
use crate::audit::{self, What};
use crate::output::{Progress, answer, counted};
use crate::units::short_size;

/// What was done, or would be.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    dry_run: bool,
    /// Copies of objects that no snapshot uses, and unfinished ones.
    removed: u64,
    /// Objects that were written anew without the pages that no snapshot uses.
    compacted: u64,
    /// Bytes, as `du` counts them; about, with `dry-run`.
    freed: u64,
}

/// Runs the command.
///
/// # Errors
/// When others use the vault, and what could not be done.
pub fn run(args: &VmGcArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let which = if args.all { Compact::All } else { Compact::Worthwhile };
    let report = if args.dry_run {
        let would = vault.collectable(which)?;
        let (removed, compacted) = (would.objects as u64, would.compact.len() as u64);
        Report { dry_run: true, removed, compacted, freed: would.bytes }
    } else {
        let progress = Progress::of_bytes(args.quiet);
        let done = audit::change(What::of("vm_gc", []), |what| {
            let done = vault.gc(which, &mut |done, all| progress.update("compacting", done, all))?;
            let Deleted::Collected(done) = done else {
                bail!("the vault is in use: a snapshot is written or read; nothing was freed, retry later");
            };
            what.bytes = Some(done.bytes);
            Ok(done)
        })?;
        drop(progress);
        let removed = (done.objects + done.unfinished) as u64;
        Report { dry_run: false, removed, compacted: done.compacted as u64, freed: done.bytes }
    };
    answer(args.json, &report, || report.text())
}

impl Report {
    fn text(&self) -> String {
        let (removed, compacted) = (counted(self.removed, "file"), counted(self.compacted, "object"));
        let freed = short_size(self.freed);
        if self.dry_run {
            format!("{removed} to remove, {compacted} to compact, about {freed} to free\n")
        } else {
            format!("{removed} removed, {compacted} compacted, {freed} freed\n")
        }
    }
}
