//! `vmstrata base` on the command line.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::rebase::UnservedArgs;

/// `vmstrata base`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct BaseArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: BaseCommand,
}

/// The commands of `vmstrata base`.
#[derive(Debug, Subcommand)]
pub enum BaseCommand {
    /// Publish a version of a base: what its image holds, or what another image holds now
    #[command(
        after_help = "Examples:\n  vmstrata base publish /mnt/nas/vms/golden.qcow2 --version v1 --tier /var/lib/vmstrata\n  vmstrata base publish /mnt/nas/vms/golden.qcow2 --version v2 --tier /var/lib/vmstrata --from /builds/debian.raw\n\nThe first version makes the image a tiered disk, as `tier attach` does: nothing is copied. A later one has, as a layer on those before, only the blocks in which \
--from differs from the base. Disks that stand on earlier versions are not touched. No server has the base meanwhile; of a base that is served, take a snapshot instead."
    )]
    Publish(BasePublishArgs),
    /// List the versions of a base, and how many disks stand on each
    #[command(
        after_help = "Examples:\n  vmstrata base list /mnt/nas/vms/golden.qcow2\n  vmstrata base list /mnt/nas/vms/golden.qcow2 --json | jq '.versions[] | select(.disks == []) | .version'"
    )]
    List(BaseListArgs),
    /// Retire a version: no new disk can be cloned from it, and those that stand on it keep it
    #[command(
        after_help = "Examples:\n  vmstrata base retire /mnt/nas/vms/golden.qcow2 --version v1\n  vmstrata base retire /mnt/nas/vms/golden.qcow2 --version v1 --yes\n\nWithout --yes it says which disks stand on it. Layers that nothing needs any more are deleted when the base is published next."
    )]
    Retire(BaseRetireArgs),
}

const HELP: &str = "\
Examples:
  vmstrata base publish /mnt/nas/vms/golden.qcow2 --version v1 --tier /var/lib/vmstrata
  vmstrata snapshot clone /mnt/nas/vms/golden.qcow2@v1 -o /mnt/nas/vms/desk7.qcow2
  vmstrata base publish /mnt/nas/vms/golden.qcow2 --version v2 --tier /var/lib/vmstrata --from /builds/debian.raw
  vmstrata rebase /mnt/nas/vms/desk7.qcow2 --onto /mnt/nas/vms/golden.qcow2@v2
  vmstrata base retire /mnt/nas/vms/golden.qcow2 --version v1 --yes

A version is a snapshot of a tiered disk, by that name: `snapshot list`, `diff` and `backup` take it, too.

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

/// `vmstrata base publish`
#[derive(Debug, Args)]
pub struct BasePublishArgs {
    /// The base: its path
    pub base: PathBuf,
    /// The name of the version
    #[arg(long, value_name = "NAME")]
    pub version: String,
    /// The directory on this host for its copies of disks, as in the disk's key tier=DIR: the same for all versions
    #[arg(long, value_name = "DIR")]
    pub tier: PathBuf,
    /// The image that has the new content
    #[arg(long, value_name = "IMAGE")]
    pub from: Option<PathBuf>,
    /// What that image holds: qcow2 unless its name ends in .raw or .img
    #[arg(long, value_name = "FORMAT", value_parser = crate::disk_spec::format_parser(), requires = "from")]
    pub format: Option<vmstrata_disk::Format>,
    /// How it is reached.
    #[command(flatten)]
    pub access: UnservedArgs,
}

/// `vmstrata base list`
#[derive(Debug, Args)]
pub struct BaseListArgs {
    /// The base: its path
    pub base: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata base retire`
#[derive(Debug, Args)]
pub struct BaseRetireArgs {
    /// The base: its path
    pub base: PathBuf,
    /// The name of the version
    #[arg(long, value_name = "NAME")]
    pub version: String,
    /// Do it
    #[arg(long)]
    pub yes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
