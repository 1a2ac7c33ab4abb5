//! `vmstrata snapshot delete` on the command line, and how layers are dropped.

use std::path::PathBuf;

use clap::Args;
use vmstrata_api::{JobSpec, MergeDirection, RemoveFiles};

use super::snapshot::AccessArgs;

/// What becomes of the files of dropped layers, as it is asked for.
#[derive(Clone, Copy, Debug, Args)]
pub struct RemoveArgs {
    /// What becomes of the files of the layers that go
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = RemoveFiles::Snapshots)]
    remove: RemoveFiles,
    /// Leave all of them where they are: --remove none
    #[arg(long, conflicts_with = "remove")]
    keep_files: bool,
}

impl RemoveArgs {
    /// Which go.
    pub fn which(self) -> RemoveFiles {
        if self.keep_files { RemoveFiles::None } else { self.remove }
    }
}

/// Whether a command may lose named snapshots.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct LoseArgs {
    /// Let go of the disk's named snapshots among the layers: without it the command is refused where there are some
    #[arg(long, short)]
    pub yes: bool,
    /// Say what would go, and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// How layers are dropped.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct MergeHowArgs {
    /// Bytes a second that may be copied, such as 10M [default: 64M for a served disk, no limit for one that is not in use]
    #[arg(long, value_name = "SIZE", value_parser = super::job::limit)]
    pub limit: Option<u64>,
    /// Take disks that were cloned from what is dropped, and are not where they were, for deleted; else they may have been
    /// moved, and the files they stand on stay
    #[arg(long)]
    pub forget_missing: bool,
}

impl MergeHowArgs {
    /// The job that deletes snapshots of a served disk.
    pub fn delete(
        self,
        disk: &str,
        snapshots: &[String],
        keep_files: bool,
        direction: MergeDirection,
    ) -> JobSpec {
        JobSpec::SnapshotDelete {
            disk: disk.to_owned(),
            snapshots: snapshots.to_vec(),
            keep_files,
            direction,
            forget_missing: self.forget_missing,
            bytes_per_second: self.limit,
        }
    }
}

/// `vmstrata snapshot delete`
#[derive(Debug, Args)]
#[command(after_help = DELETE_HELP)]
pub struct SnapshotDeleteArgs {
    /// The disk: served by a running server, or not in use; or DISK@NAME
    pub disk: PathBuf,
    /// The snapshots to delete; A..B is A and B, and all between them
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Leave the snapshots' files where they are
    #[arg(long)]
    pub keep_files: bool,
    /// Say what would go, and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Which way what stays and what goes are brought together
    #[arg(long, value_name = "WAY", value_enum, default_value_t)]
    pub direction: MergeDirection,
    /// How.
    #[command(flatten)]
    pub how: MergeHowArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const DELETE_HELP: &str = "\
Examples:
  vmstrata snapshot delete web.qcow2 mon
  vmstrata snapshot delete web.qcow2 mon wed..sat
  vmstrata snapshot delete web.qcow2 mon --json | jq -r '.kept[]?.reason'     why files stayed

With --json: of a disk that is not in use what was dropped and what was kept; of a served one the job, as `vmstrata job list` has it.

The disk and its other snapshots stay what they are: what they need of the deleted ones is copied into the layer above, or, where \
that is less to copy and no other disk needs the deleted ones, what is above into the lowest of them, which takes its place. \
A file that another disk needs stays. vmstrata finds disks beside the snapshots and in the --allow-backing directories, and those \
elsewhere that it made or opened for writing. Interrupted, begin it again: what was copied is not copied twice.
Exit codes: 0 deleted, 1 not, or not all (every other state of the disk is as it was; `snapshot list` shows a snapshot that is \
half deleted, which can only be deleted again), 64 wrong usage.";
