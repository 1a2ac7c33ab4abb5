//! `vmstrata snapshot prune` on the command line.

use std::path::PathBuf;

use clap::Args;
use vmstrata_disk::snapshot::Keep;

use super::MergeHowArgs;
use super::snapshot::AccessArgs;

/// `vmstrata snapshot prune`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct SnapshotPruneArgs {
    /// The disk: served by a running server, or not in use
    pub disk: PathBuf,
    /// What to keep: last, hourly, daily, weekly, monthly, yearly, each with how many
    #[arg(long, value_name = "RULES")]
    pub keep: Keep,
    /// Look only at snapshots with this label (repeatable)
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = super::snapshot::parse_label)]
    pub label: Vec<(String, String)>,
    /// Say what would be deleted, and delete nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// How.
    #[command(flatten)]
    pub how: MergeHowArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const HELP: &str = "\
Examples:
  vmstrata snapshot prune web.qcow2 --keep daily=7,weekly=4,monthly=12
  vmstrata snapshot prune web.qcow2 --keep last=3 --label job=nightly --dry-run

A rule keeps the newest snapshot of each of the last so many periods that have one, in UTC; what one rule keeps is kept. \
Layers without a name, and what a clone was made from, are left alone; so are snapshots that were taken with a guest's memory \
(label memory=GUEST@NAME), unless --label asks for one: vmstrata vm prune --disks deletes both, vmstrata snapshot delete \
the disk's. packaging/systemd has a timer.
Exit codes: 0 done (also when there was nothing to do), 1 not, or not all, 64 wrong usage.";
