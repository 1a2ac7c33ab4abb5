//! `vmstrata rebase` on the command line.

use std::path::PathBuf;

use clap::Args;

use super::{BackingArgs, ControlArgs, JournalArgs};

/// How a disk is reached that no server may have meanwhile.
#[derive(Debug, Args)]
pub struct UnservedArgs {
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// The server that may be serving it.
    #[command(flatten)]
    pub server: ControlArgs,
    /// The journals of a server that was killed.
    #[command(flatten)]
    pub journal: JournalArgs,
    /// Show no progress
    #[arg(long)]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata rebase`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct RebaseArgs {
    /// The disk, a clone of a snapshot of a tiered disk: its path, or what a server calls it
    pub disk: PathBuf,
    /// The new backing state, BASE@VERSION; BASE is a path, or the address of its repository
    #[arg(long, value_name = "STATE")]
    pub onto: PathBuf,
    /// Say what the disk would store, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Make its file without subclusters
    #[arg(long)]
    pub no_subclusters: bool,
    /// Where this host keeps its copy of a tiered disk, which no server has meanwhile
    #[arg(long, value_name = "DIR", conflicts_with = "no_subclusters")]
    pub tier: Option<PathBuf>,
    /// How it is reached.
    #[command(flatten)]
    pub access: UnservedArgs,
}

const HELP: &str = "\
Examples:
  vmstrata rebase desk7 --onto /mnt/nas/vms/golden.qcow2@v2 --dry-run
  vmstrata rebase desk7 --onto /mnt/nas/vms/golden.qcow2@v2
  vmstrata rebase desk7 --onto s3://vms/golden@v2
  vmstrata rebase /mnt/nas/vms/desk7.qcow2 --onto /mnt/nas/vms/golden.qcow2@v2
  vmstrata rebase /mnt/nas/vms/desk7.qcow2 --onto /mnt/nas/vms/golden.qcow2@v2 --tier /var/lib/vmstrata

A guest that patched itself as the base was patched stores the patch once more. Afterwards it reads every byte as before, and its file has only what the \
new version has not at the same place. A disk that a server has is rebased by a job of that server, and its guest goes on; `vmstrata job` slows, pauses and \
cancels it. Otherwise no guest uses the disk: a new file is compared with it and takes its name in one step. A command that is interrupted leaves \
the disk as it was. Refused for disks with snapshots of their own. Of a tiered disk, which may have snapshots, what differs from the new version is \
published; what it wrote before is not shipped if `vmstrata tier hold` held it. A base in HDFS or S3 is for disks that are served and not tiered.

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";
