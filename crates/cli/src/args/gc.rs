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
    /// Treat clones that are missing from their recorded path as deleted. By default gc assumes that they were moved, and keeps
    /// their backing files
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

`snapshot revert`, and `merge`, `flatten` and `snapshot delete` with --keep-files, leave snapshot files behind that the disk no longer uses, and record \
them in a note beside the disk. gc removes a recorded file if it has not changed since, no image uses it as its backing file, no hold \
is on it, and no process has it open. It looks for images in the file's directory, below --allow-backing, and by back-reference. gc \
lists an unrecorded file whose name looks like a snapshot of the disk, and keeps it: it may be a disk of its own.
Exit codes: 0 done (also when there was nothing to do), 1 not, 64 wrong usage.";
