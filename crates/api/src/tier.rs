//! Tiered disks: what of them is published.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// The directory of the repository.
    pub repository: String,
    /// The directory of this host's copy.
    pub local: String,
    /// This host's copy, as heads name it.
    pub owner: String,
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
    /// What is kept of the layers of this and other disks that are in repositories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<TierCache>,
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

/// Whether a tiered disk is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TierState {
    /// It is, epoch by epoch.
    Publishing,
    /// It could not be, which is tried again: the repository does not answer, as a rule. The guest goes on.
    Stalled,
    /// Another host took the disk over: this one takes no more writes, and publishes nothing.
    Fenced,
}
