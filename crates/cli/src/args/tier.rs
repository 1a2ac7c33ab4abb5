//! `vmstrata tier` on the command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use vmstrata_api::{DiskSpec, HostRate};
use vmstrata_server::spec::{HostRateError, parse_host_rate};

use super::{ControlArgs, JournalArgs};
use crate::disk_spec::parse_api_disk;
use crate::units::parse_time;

/// `vmstrata tier`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct TierArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TierCommand,
}

/// The commands of `vmstrata tier`.
#[derive(Debug, Subcommand)]
pub enum TierCommand {
    /// Make a disk a tiered one: what its guest writes stays on this host at first, and is published beside its image
    #[command(
        after_help = "Examples:\n  vmstrata tier attach web --tier /var/lib/vmstrata\n  vmstrata tier attach web --tier /var/lib/vmstrata --with window=10,epochs=2h --limit 50M\n  vmstrata tier attach /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata\n\n\
A disk that is served goes on being used. Its writes go to this host at once; its image is read, once, and is then the first layer in the repository. Until then the \
path leads to the disk as it was when the command began. A command that is interrupted is run again to go on. Serve the disk with its key \
tier=DIR from then on, also in your configuration: without it, it is refused."
    )]
    Attach(TierAttachArgs),
    /// Show what of a disk is published, and what is not
    #[command(
        after_help = "Examples:\n  vmstrata tier status web\n  vmstrata tier status /mnt/nas/vms/web.qcow2\n  vmstrata tier status web --json | jq .unpublished_seconds\n\nOf a disk that no server of this host serves, its repository is read."
    )]
    Status(TierDiskArgs),
    /// Publish all that a guest has written until now, and wait until that is done
    #[command(
        after_help = "Examples:\n  vmstrata tier sync web\n  vmstrata tier sync web && vmstrata disk remove web"
    )]
    Sync(TierDiskArgs),
    /// Keep what a disk's guests write on this host for a while, and publish nothing, or publish it again
    #[command(
        after_help = "Examples:\n  vmstrata tier hold web --for 10m\n  vmstrata tier hold web --release\n\nFor work on the NAS, at most an hour. So much would be lost with this host: status shows it. `tier sync` publishes all the \
same. The end of the server ends it, as does a budget that is used up (the disk's key outage-bytes)."
    )]
    Hold(TierHoldArgs),
    /// Show how fast all tiered disks of a server together ship what they publish, or change it until the server ends
    #[command(
        after_help = "Examples:\n  vmstrata tier rate\n  vmstrata tier rate 40M\n  vmstrata tier rate none"
    )]
    Rate(TierRateArgs),
    /// Take a disk over, with those of its group, whose host is off: what that host published is served by this one from then on
    #[command(
        after_help = "Examples:\n  vmstrata tier takeover /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata\n  vmstrata tier takeover /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata --yes\n  vmstrata tier takeover web --yes\n\nMake sure that the other host is off, or at least that its guest is. If it is not, it can publish nothing more, refuses writes \
at its next try, and keeps what it had not published. A copy that this host has from before is put aside, and named.\n\
Where the NAS has lost its newest epochs, the disk goes back to the newest that is whole: without --yes this says which are lost.\n\
Then serve the disk: vmstrata serve --disk path=/mnt/nas/vms/web.qcow2,tier=/var/lib/vmstrata\n\
A disk that the server has with its key standby is named as the server does, without --tier: its guest goes on at once."
    )]
    Takeover(TakeoverArgs),
    /// Show what keeps states of a disk in its repository, or release what a lost host or a killed command has left there
    #[command(
        after_help = "Examples:\n  vmstrata tier pins /mnt/nas/vms/web.qcow2\n  vmstrata tier pins /mnt/nas/vms/web.qcow2 --release 18fae2b06f0e9d41c1f6f8a97b1c22aa --yes\n\n\
A host's copy of the disk needs the layers that its pin keeps. Release that pin only if the host or its directory is lost. The layers are deleted ten minutes later."
    )]
    Pins(PinsArgs),
    /// List the copies of a disk that were put aside on this host when another one took the disk over, or delete one
    #[command(
        after_help = "Examples:\n  vmstrata tier branches /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata\n  vmstrata tier branches /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata --drop web-1f0c66ab.branch-0c1d2e3f --yes\n\nA branch has \
what this host wrote and did not publish. The image in it has that state of the disk while its backing files exist."
    )]
    Branches(BranchesArgs),
    /// Make a tiered disk an ordinary image again, at its path
    #[command(
        after_help = "Examples:\n  vmstrata tier detach /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata --yes\n  vmstrata tier detach /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata --flatten --yes\n\nThe disk is not served, and all of it is \
published. Its newest layers become files in the directory web.qcow2.layers, on which the image at the path stands; nothing is copied. With \
--flatten the image has all of the content. Deleted are the repository with its earlier states, and this host's copy. A \
command that was interrupted is run again to go on."
    )]
    Detach(DetachArgs),
}

const HELP: &str = "\
Examples:
  vmstrata serve --disk path=/mnt/nas/vms/web.qcow2,tier=/var/lib/vmstrata --vhost-user web=/run/web.sock
  vmstrata tier attach web --tier /var/lib/vmstrata
  vmstrata tier status web
  vmstrata tier sync web
  vmstrata tier hold web --for 10m
  vmstrata tier rate 40M
  vmstrata tier takeover /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata --yes
  vmstrata tier branches /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata
  vmstrata tier detach /mnt/nas/vms/web.qcow2 --tier /var/lib/vmstrata --yes
  vmstrata tier takeover hdfs://namenode:8020/vms/web --tier /var/lib/vmstrata --yes

A disk whose repository is in HDFS or S3 (the disk's key repository) is named by that address, one of a group by hdfs://namenode:8020/vms/guest#data.qcow2
or s3://vms/guest#data.qcow2. S3 is reached as the variables AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY say.

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

/// A disk with layers in a repository.
#[derive(Debug, Args)]
pub struct TierDiskArgs {
    /// The disk: its path, or its name at the server
    pub disk: PathBuf,
    /// The server that may be serving it.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata tier attach`
#[derive(Debug, Args)]
pub struct TierAttachArgs {
    /// The disk: its path, or its name at the server
    pub disk: PathBuf,
    /// The directory on this host for its copies of disks, as in the disk's key tier=DIR
    #[arg(long, value_name = "DIR")]
    pub tier: PathBuf,
    /// Other keys of the disk that go with tier, as in `serve --disk`: window=10,on-outage=stall
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = parse_tier_keys)]
    pub with: Option<Box<DiskSpec>>,
    /// Bytes of the image that are read in a second at most, as in 50M
    #[arg(long, value_name = "SIZE", value_parser = super::job::limit)]
    pub limit: Option<u64>,
    /// The server that may be serving it.
    #[command(flatten)]
    pub server: ControlArgs,
    /// The journals of a server that was killed.
    #[command(flatten)]
    pub journal: JournalArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The disk's path and tier are said elsewhere.
fn parse_tier_keys(text: &str) -> anyhow::Result<Box<DiskSpec>> {
    let spec = parse_api_disk(format!("path=disk,tier=dir,{text}"))?;
    let DiskSpec { window, epochs, on_missing, on_outage, outage_bytes, durability, path, tier, .. } =
        spec.clone();
    let known = DiskSpec {
        window,
        epochs,
        on_missing,
        on_outage,
        outage_bytes,
        durability,
        path,
        tier,
        ..DiskSpec::default()
    };
    anyhow::ensure!(spec == known, "only keys that go with tier, and neither group nor repository");
    vmstrata_server::spec::DiskSpec::try_from(spec.clone())?;
    Ok(Box::new(spec))
}

/// `vmstrata tier pins`
#[derive(Debug, Args)]
pub struct PinsArgs {
    /// The disk's path
    pub disk: PathBuf,
    /// Release the pin with this id
    #[arg(long, value_name = "ID")]
    pub release: Option<String>,
    /// Do it: nothing reads what it keeps
    #[arg(long, requires = "release")]
    pub yes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata tier branches`
#[derive(Debug, Args)]
pub struct BranchesArgs {
    /// The disk's path
    pub disk: PathBuf,
    /// The directory on this host for its copies of disks, as in the disk's key tier=DIR
    #[arg(long, value_name = "DIR")]
    pub tier: PathBuf,
    /// Delete this one, with all that it alone has
    #[arg(long, value_name = "BRANCH")]
    pub drop: Option<OsString>,
    /// Do it
    #[arg(long, requires = "drop")]
    pub yes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata tier detach`
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The disk's path
    pub disk: PathBuf,
    /// The directory on this host for its copies of disks, as in the disk's key tier=DIR
    #[arg(long, value_name = "DIR")]
    pub tier: PathBuf,
    /// Copy all content into the image
    #[arg(long)]
    pub flatten: bool,
    /// Do it: earlier states of the disk are deleted
    #[arg(long)]
    pub yes: bool,
    /// The journals of a server that was killed.
    #[command(flatten)]
    pub journal: JournalArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata tier hold`
#[derive(Debug, Args)]
pub struct TierHoldArgs {
    /// Which disk.
    #[command(flatten)]
    pub disk: TierDiskArgs,
    /// For how long from now, as in 10m
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time, required_unless_present = "release")]
    pub period: Option<Duration>,
    /// Publish again
    #[arg(long, conflicts_with = "period")]
    pub release: bool,
}

/// `vmstrata tier rate`
#[derive(Debug, Args)]
pub struct TierRateArgs {
    /// Bytes a second, as in 40M, or none for any number
    #[arg(value_name = "SIZE", value_parser = parse_rate)]
    pub rate: Option<HostRate>,
    /// Which server.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) fn parse_rate(text: &str) -> Result<HostRate, HostRateError> {
    if text == "none" {
        return Ok(HostRate::default());
    }
    Ok(HostRate { bytes_a_second: Some(parse_host_rate(text)?.get()) })
}

/// `vmstrata tier takeover`
#[derive(Debug, Args)]
pub struct TakeoverArgs {
    /// The disk: its path; without --tier its name at the server, which stands by for it
    pub disk: PathBuf,
    /// The directory on this host for its copies of disks, as in the disk's key tier=DIR
    #[arg(long, value_name = "DIR")]
    pub tier: Option<PathBuf>,
    /// Do it: the other host is off
    #[arg(long)]
    pub yes: bool,
    /// The server that may stand by for it.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
