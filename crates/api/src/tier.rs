//! Tiered disks: what of them is published.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::is_default;

/// What of a tiered disk is in its repository, and what this host alone has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TierStatus {
    /// Whether it is published.
    pub state: TierState,
    /// Why it is not, or who else publishes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// For how many seconds it could not be published; absent unless `stalled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled_seconds: Option<u64>,
    /// The group of the disk, all of whose disks this says; absent if it is published alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The directory of the repository.
    pub repository: String,
    /// The directory of this host's copy.
    pub local: String,
    /// This host's copy, as heads name it.
    pub owner: String,
    /// The copy that published the newest head that this host knows: another one while this host stands by.
    pub published_by: String,
    /// That head.
    pub head: String,
    /// Counts the copies and processes that published the disk, one after the other.
    pub generation: u64,
    /// The newest epoch that is published.
    pub epoch: u64,
    /// For how many seconds that has been the disk's newest state in the repository.
    pub epoch_age_seconds: u64,
    /// Layers of that epoch.
    pub epoch_layers: u64,
    /// Bytes on this host that the repository lacks.
    pub unpublished_bytes: u64,
    /// The age of the oldest write that the repository lacks, at most: what would be lost with this host. Absent if it has all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unpublished_seconds: Option<u64>,
    /// For how many seconds the repository has not answered reads of what the cache lacks: they wait. Absent while it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_wait_seconds: Option<u64>,
    /// What to change in how the repository's file system is mounted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mount_warnings: Vec<String>,
    /// What of the guest's disk need not be published: swap, and journals.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<String>,
    /// How many seconds old a write is at most when it is published, while the repository answers.
    pub window_seconds: u64,
    /// What becomes of the guest while it does not.
    pub on_outage: OnOutage,
    /// Where what the guest has flushed is durable.
    pub durability: DurableAt,
    /// For how many seconds more epochs are held on this host; absent unless they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_seconds: Option<u64>,
    /// Bytes that guests wrote, a second of shipping, of the last epochs; absent until that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ships_bytes_a_second: Option<u64>,
    /// To how many bytes a second the guest's writes are slowed, so that they are published within the window; absent unless they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowed_to_bytes_a_second: Option<u64>,
    /// Whether the guest's writes wait: this host has as many bytes that are not published as it may have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub writes_wait: bool,
    /// Flushes of the guest that wait to be published.
    #[serde(default, skip_serializing_if = "is_default")]
    pub flushes_wait: u64,
    /// Snapshots that were cut off and are not published yet, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_snapshots: Vec<PendingSnapshot>,
    /// What is kept of the layers of this and other disks that are in repositories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<TierCache>,
}

/// A snapshot of a tiered disk that is there once its epoch is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PendingSnapshot {
    /// What it will be called.
    pub name: String,
    /// When it was taken, in ns since 1970, by the clock of whoever took it.
    pub taken_ns: u64,
    /// The epoch that it is.
    pub epoch: u64,
}

/// What a directory of this host keeps of layers that are in repositories. Disks with the same `tier` share it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TierCache {
    /// The directory.
    pub directory: String,
    /// Bytes of layers in it.
    pub bytes: u64,
    /// The most there should be.
    pub max_bytes: u64,
    /// Chunks of 256 KiB that came from repositories since the server began.
    pub fetched_chunks: u64,
}

/// The host's copies of layers in repositories, by disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaList {
    /// The disks with such layers.
    pub replicas: Vec<Replica>,
}

/// The host's copies of a disk's layers in repositories.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Replica {
    /// The disk.
    pub disk: String,
    /// Its layers in repositories, base first.
    pub layers: Vec<ReplicaLayer>,
}

/// A layer in a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaLayer {
    /// The layer.
    pub id: String,
    /// Where it comes from.
    pub repository: String,
    /// The directory of this host that keeps what comes.
    pub cache: String,
    /// Bytes of the layer.
    pub bytes: u64,
    /// Those on this host. After a restart they are proved before they are used.
    pub kept_bytes: u64,
    /// Whether they stay whatever else is read.
    pub pinned: bool,
}

/// Whether what comes of a disk's layers stays on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicaPin {
    /// Whether it does.
    pub pinned: bool,
}

/// What was given up of a disk's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaDropped {
    /// Bytes that are free once no read needs them.
    pub bytes: u64,
}

/// What becomes of guests of a tiered disk while its repository does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnOutage {
    /// They go on.
    #[default]
    Continue,
    /// Their flushes wait once there is a write that is older than the window and not published.
    Stall,
}

/// Where a write of a tiered disk is durable once the flush after it has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DurableAt {
    /// On this host, and in the repository within the window.
    #[default]
    Host,
    /// In the repository.
    Repository,
}

/// For how long epochs of a tiered disk are to be held on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TierHold {
    /// Seconds from now; 0 to publish them again.
    #[schema(maximum = 3600)]
    pub seconds: u64,
}

/// How a disk in standby is taken over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeOver {
    /// The head that the disk's host offers; refused once that host has taken the disk back. If omitted, the newest head is taken: make sure
    /// first that the other host is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^head-[0-9]{12}$")]
    pub head: Option<String>,
}

/// Whether a tiered disk is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TierState {
    /// It was made a tiered disk while it was in use: it is written on this host, and its image is read before the first epoch is published.
    Attaching,
    /// Another host publishes it, and requests wait until this one takes it over.
    Standby,
    /// It is, epoch by epoch.
    Publishing,
    /// All of it is, and no more: requests wait until another host has taken it over, or this one takes it back.
    HandedOver,
    /// It could not be, which is tried again: the repository does not answer, as a rule. The guest goes on.
    Stalled,
    /// Another host took the disk over: this one takes no more writes, and publishes nothing.
    Fenced,
}
