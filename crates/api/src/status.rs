//! The server as a whole.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DiskStatus, ExportStatus, TierCache};

/// The server, its disks and its exports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServerStatus {
    /// The program's version.
    #[schema(example = "0.1.0")]
    pub version: String,
    /// The server's process.
    pub pid: u32,
    /// Seconds since it began to serve.
    pub uptime_seconds: u64,
    /// Why the host does not let it use io_uring, if it does not: threads carry requests out then, which is slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_uring_refused: Option<String>,
    /// What its disks share.
    pub resources: ResourceStatus,
    /// What it keeps on this host of the layers of tiered disks that are in repositories.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tier_caches: Vec<TierCache>,
    /// The log that makes the disks' flushes durable, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_log: Option<FlushLogStatus>,
    /// The disks, in the order in which they were added.
    pub disks: Vec<DiskStatus>,
    /// The exports, in the order in which they were added.
    pub exports: Vec<ExportStatus>,
}

/// How full the structures are that all disks of a server share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResourceStatus {
    /// Bytes of metadata pages in memory.
    pub metadata_cache_bytes: u64,
    /// The most there may be.
    pub metadata_cache_max_bytes: u64,
    /// Pages put into memory so far: each was missed by a request, or read when its disk was opened.
    pub metadata_cache_fills: u64,
    /// Files of frozen layers open now.
    pub open_files: u64,
    /// The most there may be.
    pub open_files_max: u64,
}

/// The log that makes the flushes of all disks durable by one write and one sync.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlushLogStatus {
    /// Its file or device.
    #[schema(example = "/var/lib/vmstrata/flush.log")]
    pub path: String,
    /// Bytes for flushed writes.
    pub bytes: u64,
    /// Bytes that flushed writes take until they are synced to their images.
    pub used_bytes: u64,
    /// Images that use it.
    pub files: u64,
    /// Flushes that it made durable since the server began.
    pub flushes: u64,
    /// Its syncs for them.
    pub syncs: u64,
    /// Flushes that wait for its next sync.
    pub waiting: u64,
    /// Why nothing more is written to it, if that is so: its disks take no more writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}
