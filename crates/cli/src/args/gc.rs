//! `vmstrata gc` on the command line.

use std::path::PathBuf;

use clap::Args;

use super::snapshot::SnapshotCommonArgs;

/// `vmstrata gc`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct GcArgs {
    /// A disk, which may be in use or gone; or a directory: all disks in it that left something
    pub path: PathBuf,
    /// Remove what can go; without it that is only listed
    #[arg(long, short)]
    pub yes: bool,
    /// Take disks that were cloned from what is left, and are not where they were, for deleted; else they may have been moved, and
    /// the files they stand on stay
    #[arg(long)]
    pub forget_missing: bool,
    /// Common options.
    #[command(flatten)]
    pub common: SnapshotCommonArgs,
}

const HELP: &str = "\
Examples:
  vmstrata gc web.qcow2                    what would go, and what stays and why; changes nothing
  vmstrata gc web.qcow2 --yes
  vmstrata gc /vms --json | jq '.[\"freed-bytes\"]'

Going back, and `merge`, `flatten` and `snapshot delete` with --keep-files, leave files of snapshots behind that the disk does not
stand on any more, and note them beside it. What goes is a file that is noted, has not changed since, and that nothing needs: no image
in its directory, below --allow-backing or known by its back-reference stands on it, no hold is on it, no process has it open. A
file that is only called as a snapshot of the disk would be is listed, and stays: it may be a disk of its own.
Exit codes: 0 done (also when there was nothing to do), 1 not, 64 wrong usage.";
