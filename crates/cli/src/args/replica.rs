//! `vmstrata replica` on the command line.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ControlArgs, TierDiskArgs};

/// `vmstrata replica`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct ReplicaArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ReplicaCommand,
}

/// The commands of `vmstrata replica`.
#[derive(Debug, Subcommand)]
pub enum ReplicaCommand {
    /// Show what this host keeps of the layers that disks read from repositories
    #[command(
        after_help = "Examples:\n  vmstrata replica list\n  vmstrata replica list desk7\n  vmstrata replica list --json | jq '.replicas[].layers[].kept_bytes'"
    )]
    List(ReplicaListArgs),
    /// Bring all of a disk's layers to this host, beside what guests read
    #[command(
        after_help = "Examples:\n  vmstrata replica fill desk7\n  vmstrata replica fill desk7 --limit 50M --hours 22:00-06:00\n  vmstrata replica fill desk7 --from /builds/patched.qcow2\n\nWhat is here is not fetched again, so a command that is \
interrupted goes on when it is run again. It is refused where the cache is too small (--tier-cache): reads of other layers need 256 MiB of it.\n\nWith --from, \
a chunk is made from the image if that holds the same bytes of the disk: its digest decides. The server opens the image read-only, and no other process writes it meanwhile."
    )]
    Fill(ReplicaFillArgs),
    /// Keep what comes of a disk's layers on this host, whatever else is read
    #[command(
        after_help = "Examples:\n  vmstrata replica pin desk7\n  vmstrata replica pin desk7 && vmstrata replica fill desk7\n\nIt holds beyond the end of the server, and for all disks with these layers."
    )]
    Pin(TierDiskArgs),
    /// Let what is kept of a disk's layers go when others need the room
    #[command(after_help = "Examples:\n  vmstrata replica unpin desk7")]
    Unpin(TierDiskArgs),
    /// Compare what is kept of a disk's layers with what was published, and fetch again what is not right
    #[command(
        after_help = "Examples:\n  vmstrata replica scrub desk7\n  vmstrata replica scrub desk7 --limit 50M\n\nIt is read from the device, not from memory. The log names what was wrong."
    )]
    Scrub(ReplicaScrubArgs),
    /// Give up what is kept of a disk's layers: guests read it from the repository again
    #[command(
        after_help = "Examples:\n  vmstrata replica drop desk7\n  vmstrata replica drop desk7 --yes\n\nWithout --yes it says how much that is. Pinned layers are refused."
    )]
    Drop(ReplicaDropArgs),
}

const HELP: &str = "\
Examples:
  vmstrata serve --disk path=/mnt/nas/vms/desk7.qcow2,replica=/var/lib/vmstrata,backing=/mnt/nas --vhost-user desk7=/run/desk7.sock
  vmstrata replica fill desk7 --limit 50M
  vmstrata replica pin desk7
  vmstrata replica list

A disk has layers in a repository if it is a tiered one, or a clone of a tiered disk's snapshot with its key replica=DIR. The host keeps one copy of a layer, \
in 256 KiB chunks, for all disks with the same directory.

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

/// `vmstrata replica list`
#[derive(Debug, Args)]
pub struct ReplicaListArgs {
    /// Only this disk, by its name at the server
    pub disk: Option<String>,
    /// The server.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `vmstrata replica fill`
#[derive(Debug, Args)]
pub struct ReplicaFillArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: TierDiskArgs,
    /// Bytes that are fetched in a second at most, as in 50M
    #[arg(long, value_name = "SIZE", value_parser = super::job::limit)]
    pub limit: Option<u64>,
    /// Fetch only in these hours of the day, by the clock of the server's host, as in 22:00-06:00
    #[arg(long, value_name = "FROM-TO")]
    pub hours: Option<String>,
    /// Take what this image on the host has of the layers' content from there, and fetch the rest
    #[arg(long, value_name = "IMAGE")]
    pub from: Option<PathBuf>,
    /// What that image holds: qcow2 unless its name ends in .raw or .img
    #[arg(long, value_name = "FORMAT", value_parser = crate::disk_spec::format_parser(), requires = "from")]
    pub format: Option<vmstrata_disk::Format>,
}

/// `vmstrata replica scrub`
#[derive(Debug, Args)]
pub struct ReplicaScrubArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: TierDiskArgs,
    /// Bytes that are read in a second at most, as in 50M
    #[arg(long, value_name = "SIZE", value_parser = super::job::limit)]
    pub limit: Option<u64>,
}

/// `vmstrata replica drop`
#[derive(Debug, Args)]
pub struct ReplicaDropArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: TierDiskArgs,
    /// Do it: while the repository does not answer, guests wait for what was dropped
    #[arg(long)]
    pub yes: bool,
}
