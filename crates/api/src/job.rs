//! Long work, done in steps beside the guests.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DurableAt, Format, OnOutage, is_default};

/// Work to begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum JobSpec {
    /// Give every frozen layer of a disk's chain an index that lacks one, so that the disk opens at once next time.
    IndexBuild {
        /// The disk.
        disk: String,
        /// Bytes a second that the job may write; no limit if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Drop snapshots from a disk that goes on being used: what only they hold is pulled up into the layer above them, or what that
    /// one holds written down into the lowest of them, which then takes its place.
    SnapshotDelete {
        /// The disk.
        disk: String,
        /// The snapshots' names; `A..B` is A and B, and all between them.
        snapshots: Vec<String>,
        /// Leave the snapshots' files where they are.
        #[serde(default, skip_serializing_if = "is_default")]
        keep_files: bool,
        /// Which way what stays and what goes are brought together.
        #[serde(default, skip_serializing_if = "is_default")]
        direction: MergeDirection,
        /// Take disks that were cloned from one of them, and are not where they were, for deleted. Else they may have been moved,
        /// and the file they stand on stays.
        #[serde(default, skip_serializing_if = "is_default")]
        forget_missing: bool,
        /// Bytes a second that the job may write; 64 MiB if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Drop a range of layers, with or without names, from a disk that goes on being used, as snapshots are deleted.
    Merge {
        /// The disk.
        disk: String,
        /// One end of the range, which goes too. The layers are chosen when the job begins.
        first: LayerRef,
        /// The other end, which goes too.
        last: LayerRef,
        /// Go on although named snapshots of the disk are among the layers, whose states are lost. Without it such a job is refused,
        /// with their names.
        #[serde(default, skip_serializing_if = "is_default")]
        drop_snapshots: bool,
        /// What becomes of their files.
        #[serde(default, skip_serializing_if = "is_default")]
        remove: RemoveFiles,
        /// As for deleting snapshots; commit takes files that are to be removed.
        #[serde(default, skip_serializing_if = "is_default")]
        direction: MergeDirection,
        /// As for deleting snapshots.
        #[serde(default, skip_serializing_if = "is_default")]
        forget_missing: bool,
        /// Bytes a second that the job may write; 64 MiB if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Let a disk that goes on being used stand on nothing, or on one of its layers: what it needs of those that go is pulled up
    /// into its file.
    Flatten {
        /// The disk.
        disk: String,
        /// The layer that stays, with all that it stands on; none if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        onto: Option<LayerRef>,
        /// Go on although named snapshots of the disk are among the layers, whose states are lost. Without it such a job is refused,
        /// with their names.
        #[serde(default, skip_serializing_if = "is_default")]
        drop_snapshots: bool,
        /// What becomes of the files that it stood on.
        #[serde(default, skip_serializing_if = "is_default")]
        remove: RemoveFiles,
        /// As for deleting snapshots.
        #[serde(default, skip_serializing_if = "is_default")]
        forget_missing: bool,
        /// Bytes a second that the job may write; 64 MiB if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Make a disk that goes on being used a tiered one: its writes go to this host at once, its image is read, and from then on it is published.
    /// The other members are as of a disk that is added.
    TierAttach {
        /// The disk.
        disk: String,
        /// The directory of the host.
        #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
        tier: String,
        /// See there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1, maximum = 600)]
        window: Option<u64>,
        /// See there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(pattern = "^[1-9][0-9]{0,4}[smh]$")]
        epochs: Option<String>,
        /// See there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(pattern = "^(wait|error(:[1-9][0-9]{0,3})?)$")]
        on_missing: Option<String>,
        /// See there.
        #[serde(default, skip_serializing_if = "is_default")]
        on_outage: OnOutage,
        /// See there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1_048_576)]
        outage_bytes: Option<u64>,
        /// See there.
        #[serde(default, skip_serializing_if = "is_default")]
        durability: DurableAt,
        /// Bytes a second that the job may read; no limit if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Bring all that a disk's layers in repositories hold to this host.
    ReplicaFill {
        /// The disk.
        disk: String,
        /// Bytes a second that the job may fetch; no limit if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
        /// The hours of the day, by the clock of the server's host, in which it may fetch, as in `22:00-06:00`; all if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(pattern = "^([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9]$")]
        hours: Option<String>,
        /// An image on the server's host: what it has of the layers' content is taken from there, and the rest fetched. It is read only. Its
        /// backing files may lie in its own directory, or where the disk's may.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(min_length = 1, pattern = r"^/[^\x00]*$")]
        from: Option<String>,
        /// What that image is; its first bytes say it if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        format: Option<Format>,
    },
    /// Compare what this host keeps of a disk's layers in repositories with what they were, and fetch again what is not right.
    ReplicaScrub {
        /// The disk.
        disk: String,
        /// Bytes a second that the job may read; no limit if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Move a disk that goes on being used to another directory, with its history, or to a flat copy. Asked for again, it goes on where
    /// it was.
    Move {
        /// The disk.
        disk: String,
        /// The directory: an absolute path on the server's host. Or where the flat copy is: a block device, a new file whose name ends in
        /// `.raw` or `.img`, or an export of an NBD server. Or, of a flat copy, the path that the disk had: it goes back to its history.
        #[schema(min_length = 1, pattern = r"^(/|nbd(\+unix)?://)[^\x00]*$")]
        to: String,
        /// For how many seconds the source files are kept; 600 if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(maximum = 31_622_400)]
        keep_seconds: Option<u64>,
        /// What is on a device or an export is lost. Without it these are refused.
        #[serde(default, skip_serializing_if = "crate::is_default")]
        overwrite: bool,
        /// What of the disk cannot be read becomes zeros in the copy, and the disk's status lists it. Without it that is an error.
        #[serde(default, skip_serializing_if = "crate::is_default")]
        skip_unreadable: bool,
        /// In how many seconds it is to be over: it writes no faster than it must for that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1, maximum = 31_622_400)]
        deadline_seconds: Option<u64>,
        /// The guest's latency may be so many percent of what it is without the move, on average and for 99 of 100 requests: so few bytes are
        /// read at a time, and the move stops for moments to see what the guest has without it. No such limit if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 110, maximum = 10_000)]
        latency_percent: Option<u32>,
        /// In which order a layer is copied; if omitted, `predicted` from a device that rotates, else `sequential`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        order: Option<MoveOrder>,
        /// Bytes a second that the job may write; no limit if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
    /// Move a clone of a tiered disk's snapshot to another snapshot of that disk, while its guest goes on. The guest reads every byte as before.
    /// The clone stores only what differs from the new snapshot.
    Rebase {
        /// The disk.
        disk: String,
        /// The snapshot, `BASE@VERSION`: the base is an absolute path on the server's host, or the address of its repository.
        #[schema(pattern = r"^(/|[a-z0-9]+://)[^\x00]*@[^\x00]+$")]
        onto: String,
        /// Count the bytes that the disk would store, and change nothing.
        #[serde(default, skip_serializing_if = "is_default")]
        dry_run: bool,
        /// Bytes a second that the job may write; 64 MiB if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
}

impl JobSpec {
    /// The disk that it is about.
    pub fn disk(&self) -> &str {
        match self {
            Self::IndexBuild { disk, .. }
            | Self::SnapshotDelete { disk, .. }
            | Self::Merge { disk, .. }
            | Self::Flatten { disk, .. }
            | Self::TierAttach { disk, .. }
            | Self::ReplicaFill { disk, .. }
            | Self::ReplicaScrub { disk, .. }
            | Self::Move { disk, .. }
            | Self::Rebase { disk, .. } => disk,
        }
    }

    /// The kind's name, as it is written.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::IndexBuild { .. } => "index_build",
            Self::SnapshotDelete { .. } => "snapshot_delete",
            Self::Merge { .. } => "merge",
            Self::Flatten { .. } => "flatten",
            Self::TierAttach { .. } => "tier_attach",
            Self::ReplicaFill { .. } => "replica_fill",
            Self::ReplicaScrub { .. } => "replica_scrub",
            Self::Move { .. } => "move",
            Self::Rebase { .. } => "rebase",
        }
    }

    /// How fast it may write, if that is said.
    pub fn bytes_per_second(&self) -> Option<u64> {
        match self {
            Self::IndexBuild { bytes_per_second, .. }
            | Self::SnapshotDelete { bytes_per_second, .. }
            | Self::Merge { bytes_per_second, .. }
            | Self::Flatten { bytes_per_second, .. }
            | Self::TierAttach { bytes_per_second, .. }
            | Self::ReplicaFill { bytes_per_second, .. }
            | Self::ReplicaScrub { bytes_per_second, .. }
            | Self::Move { bytes_per_second, .. }
            | Self::Rebase { bytes_per_second, .. } => *bytes_per_second,
        }
    }
}

/// A layer of a disk's chain, below the one that takes the writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerRef {
    /// Its number of now, counted from the base, which is 0. Numbers change when layers below are dropped.
    Number(u32),
    /// Its file: any path that leads there on the server's host, an absolute one.
    File(String),
}

/// In which order a move copies.
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MoveOrder {
    /// From the beginning to the end.
    Sequential,
    /// What lies nearest to the guest's last request.
    Nearest,
    /// What the guest uses most.
    HotFirst,
    /// What the guest writes least.
    ColdFirst,
    /// What follows the guest's last request, then what lies far from all that it uses.
    Predicted,
}

/// Which way layers are merged.
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeDirection {
    /// The way that copies less, as far as it is open.
    #[default]
    Auto,
    /// Into the layer above the dropped ones, as QEMU's block-stream.
    Stream,
    /// Into the base of the dropped ones, which then takes the place of the layer above, as QEMU's block-commit; refused where
    /// others need it.
    Commit,
}

/// What becomes of the files of dropped layers.
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RemoveFiles {
    /// All stay.
    None,
    /// Remove the files of this disk's own snapshots unless another disk needs them. Keep a base, and the layers a clone came with.
    #[default]
    Snapshots,
    /// Remove the files in the disk's own directory, unless another image needs one or a process has it open.
    All,
    /// Remove them in other directories, too. A disk elsewhere that vmstrata neither made nor opened is not seen unless it is in use.
    Everywhere,
}

/// What can be done to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
pub enum JobChange {
    /// Stop after the step that is under way, until resumed.
    Pause {},
    /// Go on.
    Resume {},
    /// End after the step that is under way. What is done stays done.
    Cancel {},
    /// Change how fast it may go.
    Limit {
        /// Bytes a second; null for no limit.
        #[schema(minimum = 1)]
        bytes_per_second: Option<u64>,
    },
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Under way.
    Running,
    /// Waits to be resumed.
    Paused,
    /// Ends after the step that is under way.
    Cancelling,
    /// Ended: all is done.
    Done,
    /// Ended before all was done, because someone asked for it.
    Cancelled,
    /// Ended before all was done, because of an error.
    Failed,
}

impl JobState {
    /// Whether nothing more will happen.
    pub fn is_ended(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobStatus {
    /// Its number, never used again while the server runs.
    pub id: u64,
    /// What it does, as in the request that began it.
    #[schema(example = "index_build")]
    pub kind: String,
    /// The disk it is about.
    pub disk: String,
    /// Where it is.
    pub state: JobState,
    /// Steps done.
    pub done: u64,
    /// Steps there are.
    pub total: u64,
    /// What a step is.
    #[schema(example = "layers")]
    pub unit: String,
    /// Bytes written so far; of `tier_attach`, read; of `replica_fill`, fetched.
    pub bytes: u64,
    /// Of `replica_fill`, bytes that an image on the host had; absent for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_bytes: Option<u64>,
    /// Of `rebase`, bytes that the version does not have at the same place, so that the disk stores them; absent for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differing_bytes: Option<u64>,
    /// What it has removed so far; absent for a kind that removes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed: Option<Removed>,
    /// Bytes a second that it may write; absent when there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Seconds since it began, until it ended.
    pub seconds: u64,
    /// Seconds until it ends, about; absent before the first step and at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
    /// Steps that were passed over because of an error.
    pub failures: u64,
    /// Why it failed, or the first of the errors that were passed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Files that a job has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Removed {
    /// How many.
    pub files: u64,
    /// Bytes of the host's storage that are free by that, less what was copied out of them.
    pub freed_bytes: u64,
}

/// Jobs under way, and the last ones that ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// The jobs, in the order in which they began.
    pub jobs: Vec<JobStatus>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_said_or_taken_away_and_never_forgotten() {
        let change = |text| serde_json::from_str::<JobChange>(text);
        let limit = change(r#"{"action":"limit","bytes_per_second":5}"#).unwrap();
        assert_eq!(limit, JobChange::Limit { bytes_per_second: Some(5) });
        let none = change(r#"{"action":"limit","bytes_per_second":null}"#).unwrap();
        assert_eq!(none, JobChange::Limit { bytes_per_second: None });
        assert!(change(r#"{"action":"limit","bytes_per_sec":5}"#).is_err());
        assert!(change(r#"{"action":"stop"}"#).is_err());
        assert!(change(r#"{"action":"cancel","id":7}"#).is_err(), "a field that it does not have");
    }
}
