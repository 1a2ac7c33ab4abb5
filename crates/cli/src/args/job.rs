//! The command line of `vmstrata job`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use vmstrata_api::{HostRate, MergeDirection};

use super::tier::parse_rate;
use super::{ControlArgs, LayersArgs, MergeHowArgs, RemoveArgs};
use crate::units::parse_size;

/// `vmstrata job`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct JobArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: JobCommand,
    /// Which server.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// What can be done with the jobs of a running server.
#[derive(Debug, Subcommand)]
pub enum JobCommand {
    /// Show the jobs under way, and the last ones that ended
    #[command(after_help = "Examples:\n  vmstrata job list\n  vmstrata job list --json")]
    List,
    /// Build the indices that a served disk's chain lacks
    #[command(after_help = "Examples:\n  vmstrata job index-build web --limit 20M")]
    IndexBuild {
        /// The disk's name, or its path
        disk: String,
        /// Bytes a second that the job may write, such as 10M
        #[arg(long, value_name = "SIZE", value_parser = limit)]
        limit: Option<u64>,
    },
    /// Drop snapshots from a served disk, in the background
    #[command(
        after_help = "Examples:\n  vmstrata job snapshot-delete web monday\n  vmstrata job snapshot-delete web monday..friday --keep-files"
    )]
    SnapshotDelete {
        /// The disk's name, or its path
        disk: String,
        /// The snapshots' names; A..B is A and B, and all between them
        snapshots: Vec<String>,
        /// Leave the snapshots' files where they are
        #[arg(long)]
        keep_files: bool,
        /// Which way what stays and what goes are brought together
        #[arg(long, value_name = "WAY", value_enum, default_value_t)]
        direction: MergeDirection,
        /// How.
        #[command(flatten)]
        how: MergeHowArgs,
    },
    /// Drop layers from the middle of a served disk's chain, in the background
    #[command(
        after_help = "Examples:\n  vmstrata job merge web --layers 1..498\n  vmstrata job merge web --from web-mon.qcow2 --to web-fri.qcow2 --remove all"
    )]
    Merge {
        /// The disk's name, or its path
        disk: String,
        /// Which layers go.
        #[command(flatten)]
        layers: LayersArgs,
        /// Let go of the disk's named snapshots among them
        #[arg(long, short)]
        yes: bool,
        /// What becomes of their files.
        #[command(flatten)]
        remove: RemoveArgs,
        /// Which way what stays and what goes are brought together; commit takes files that are removed
        #[arg(long, value_name = "WAY", value_enum, default_value_t)]
        direction: MergeDirection,
        /// How.
        #[command(flatten)]
        how: MergeHowArgs,
    },
    /// Let a served disk stand on nothing, or on its base alone, in the background
    #[command(
        after_help = "Examples:\n  vmstrata job flatten web\n  vmstrata job flatten web --yes --limit 20M\n  vmstrata job flatten web --onto /srv/golden.qcow2"
    )]
    Flatten {
        /// The disk's name, or its path
        disk: String,
        /// Drop only what is between FILE, one of its layers, and the disk
        #[arg(long, value_name = "FILE")]
        onto: Option<PathBuf>,
        /// Let go of the disk's named snapshots
        #[arg(long, short)]
        yes: bool,
        /// What becomes of the files that it stood on.
        #[command(flatten)]
        remove: RemoveArgs,
        /// How.
        #[command(flatten)]
        how: MergeHowArgs,
    },
    /// Stop a job after the step that is under way, until it is resumed
    #[command(after_help = "Examples:\n  vmstrata job pause 3")]
    Pause {
        /// The job's number
        id: u64,
    },
    /// Let a paused job go on
    #[command(after_help = "Examples:\n  vmstrata job resume 3")]
    Resume {
        /// The job's number
        id: u64,
    },
    /// End a job after the step that is under way; what is done stays done, and a snapshot that is half deleted (into the lowest
    /// layer) can only be deleted again
    #[command(after_help = "Examples:\n  vmstrata job cancel 3")]
    Cancel {
        /// The job's number
        id: u64,
    },
    /// Change how fast a job may go
    #[command(
        after_help = "Examples:\n  vmstrata job limit 3 5M\n  vmstrata job limit 3                         as fast as it can"
    )]
    Limit {
        /// The job's number
        id: u64,
        /// Bytes a second that the job may write, such as 10M; no limit if omitted
        #[arg(value_name = "SIZE", value_parser = limit)]
        limit: Option<u64>,
    },
    /// Show how fast all moves of disks together write, or change it from now on and until the server ends
    #[command(
        after_help = "Examples:\n  vmstrata job move-rate\n  vmstrata job move-rate 50M                     also for moves that run\n  vmstrata job move-rate none\n\nMoves that run at the same time share the rate evenly. A move's own limit holds beside it."
    )]
    MoveRate {
        /// Bytes a second, as in 50M, or none for any number
        #[arg(value_name = "SIZE", value_parser = parse_rate)]
        rate: Option<HostRate>,
    },
}

const HELP: &str = "\
Examples:
  vmstrata job index-build web --limit 20M
  vmstrata job snapshot-delete web monday..friday
  vmstrata job flatten web --yes --limit 20M
  vmstrata job list
  vmstrata job limit 3 5M
  vmstrata job move-rate 50M
  vmstrata job cancel 3

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

pub(super) fn limit(text: &str) -> anyhow::Result<u64> {
    let limit = parse_size(text)?;
    anyhow::ensure!(limit > 0, "a limit of 0 would stop the job: pause it instead");
    Ok(limit)
}
