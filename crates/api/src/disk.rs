//! Disks: what is asked for, and what is served.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DiskLimits, DurableAt, OnOutage, TierStatus, is_default};

/// A disk to open: what `--disk` says on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The active layer's file, absolute or seen from where the server was started. It is shown absolute. Here and in all
    /// other paths, one that is not UTF-8 is a `file:` URI.
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub path: String,
    /// What sockets and clients call the disk; the file's name without its last suffix if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 255, pattern = r"^[^=\x00-\x1f\x7f-\x9f]+$")]
    pub name: Option<String>,
    /// Refuse writes; the file is then locked for reading only.
    #[serde(alias = "read-only", default, skip_serializing_if = "is_default")]
    pub read_only: bool,
    /// Write the disk although it is a backing file of other images, which then read other data. Without this, such a disk is
    /// served read-only.
    #[serde(default, skip_serializing_if = "is_default")]
    pub force: bool,
    /// How the active layer's data passes the host's page cache.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cache: CacheMode,
    /// What becomes of the guest's writes of whole clusters of zeros.
    #[serde(alias = "detect-zeroes", default, skip_serializing_if = "is_default")]
    pub detect_zeroes: DetectZeroes,
    /// Whether overlays that the server makes for the disk have subclusters: its snapshots', and a clone itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub subclusters: Subclusters,
    /// What the disk's file is, which a snapshot of a raw disk makes qcow2; looked up in the file if omitted. With `clone`, that of the disk it is made of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Serve the disk as it was at this snapshot; read-only, unless as a clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 100, pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    pub at: Option<String>,
    /// Serve a clone of that snapshot: this file, made unless it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub clone: Option<String>,
    /// The socket of the agent in the disk's guest, which freezes its file systems for snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub agent: Option<String>,
    /// Which of its snapshots to keep, as in `daily=7,weekly=4`: the server deletes the others by itself, but for those taken
    /// with a guest's memory. Left out, all are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        pattern = "^(last|hourly|daily|weekly|monthly|yearly)=0*[1-9][0-9]{0,8}(,(last|hourly|daily|weekly|monthly|yearly)=0*[1-9][0-9]{0,8})*$"
    )]
    pub keep: Option<String>,
    /// The files and directories that backing files may be or lie in; an empty list allows none. If omitted: the disk's own
    /// directory, and those that the server allows for all disks. Snapshots need the disk's own directory in the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<Vec<String>>,
    /// How much its guests may do in a second.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: DiskLimits,
    /// What the guest has it for. With another role than `disk`, `path` is a raw file of this host that is made unless it is there, goes when
    /// the disk is removed, and is never shipped.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: DiskRole,
    /// With such a `role`: how many bytes the file is made with, a multiple of 4096.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 4096)]
    pub size_bytes: Option<u64>,
    /// Keep what guests write in this directory of the host, and publish it in a repository beside `path`, epoch by epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub tier: Option<String>,
    /// With `tier`: the disk is cut at one instant, published and taken over together with the other disks that have the same group, and lie in
    /// the same directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 200, pattern = "^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
    pub group: Option<String>,
    /// With `tier`: publish in this repository instead, `hdfs://NAMENODE[:PORT]/DIR[?block=SIZE]` or `s3://BUCKET[/PREFIX][?endpoint=URL]`. `path` is then the image that becomes
    /// the first layer, which need not be there once the disk is published. With `replica`: that of the snapshot which the disk is a clone of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(hdfs://[^/]+/|s3://[^/?]+)")]
    pub repository: Option<String>,
    /// With `tier`: how many seconds old a write is at most when it is published, while the repository answers; 30 if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 600)]
    pub window: Option<u64>,
    /// With `tier`: for how long a published state can be opened after a newer one is published, from `10m`, which is so if omitted, to
    /// `24h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[1-9][0-9]{0,4}[smh]$")]
    pub epochs: Option<String>,
    /// Cache the layers that the disk reads from repositories in this directory of the host. For clones of a tiered disk's snapshot. Disks with
    /// the same directory share the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub replica: Option<String>,
    /// With `tier` or `replica`: what becomes of reads that need the repository while that does not answer. They `wait`, which is so if omitted, or
    /// fail after so many seconds; `error` alone means 30.
    #[serde(alias = "on-missing", default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(wait|error(:[1-9][0-9]{0,3})?)$")]
    pub on_missing: Option<String>,
    /// With `tier`: what becomes of guests while the repository does not answer.
    #[serde(alias = "on-outage", default, skip_serializing_if = "is_default")]
    pub on_outage: OnOutage,
    /// With `tier`: how many bytes this host keeps at most that are not published, while the repository does not answer. The guest's writes wait then. As many
    /// as the file system has left if omitted.
    #[serde(alias = "outage-bytes", default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1_048_576)]
    pub outage_bytes: Option<u64>,
    /// With `tier`: where what a guest has flushed is durable.
    #[serde(default, skip_serializing_if = "is_default")]
    pub durability: DurableAt,
    /// With `tier`: while another host publishes the disk, show it to guests and have all requests wait until this host takes it over.
    #[serde(default, skip_serializing_if = "is_default")]
    pub standby: bool,
}

/// What a guest has a disk for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskRole {
    /// To keep its data.
    #[default]
    Disk,
    /// For swap: what is on it is of no use once the guest is off.
    Swap,
    /// For what need not outlive this host, as a file system's journal.
    Local,
}

impl DiskRole {
    /// As `role=` says it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Swap => "swap",
            Self::Local => "local",
        }
    }
}

/// How data passes the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CacheMode {
    /// Through it.
    #[default]
    Host,
    /// Around it.
    Direct,
}

/// What becomes of writes of whole clusters of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DetectZeroes {
    /// They are written as all others.
    #[default]
    Off,
    /// The clusters are marked as zeros, and keep their space.
    On,
    /// The clusters are marked as zeros, and their space is given back to the host.
    Unmap,
}

/// Whether new overlays have subclusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Subclusters {
    /// Yes, where the layer below is raw or qcow2 of version 3.
    #[default]
    On,
    /// No: crosvm, cloud-hypervisor's own qcow2 and QEMU before 5.2 cannot read them.
    Off,
}

/// How a file keeps a disk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// qcow2, versions 2 and 3.
    Qcow2,
    /// The bytes of the disk, nothing else.
    Raw,
}

/// Where a disk is between being asked for and being gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    /// Its files are being opened.
    Opening,
    /// It is served.
    Serving,
    /// Its exports are drained and its image is closed clean.
    Closing,
    /// It could not be opened when the server started, which goes on without it and tries again until it is removed.
    Waiting,
}

/// A file of the server's host: the same numbers for every name that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileNumber {
    /// The device number of its file system; for a block device its own.
    pub device: u64,
    /// Its inode number; 0 for a block device.
    pub inode: u64,
}

/// A disk of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// What sockets and clients call it.
    pub name: String,
    /// The active layer's file, absolute.
    pub path: String,
    /// Which file takes the disk's writes, by whatever name; absent unless the disk is served for writing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileNumber>,
    /// Where it is between being asked for and being gone.
    pub state: DiskState,
    /// Whether it was added while the server, or one before it, ran.
    #[serde(default, skip_serializing_if = "is_default")]
    pub added: bool,
    /// Why it is not open; absent unless it waits to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_error: Option<String>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What becomes of the guest's writes of whole clusters of zeros.
    #[serde(default, skip_serializing_if = "is_default")]
    pub detect_zeroes: DetectZeroes,
    /// Whether overlays that the server makes for the disk have subclusters.
    #[serde(default, skip_serializing_if = "is_default")]
    pub subclusters: Subclusters,
    /// How much its guests may do in a second.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: DiskLimits,
    /// What its guest has it for.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: DiskRole,
    /// Virtual size; absent unless the disk is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Layers of the chain, the active one included; absent unless the disk is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u64>,
    /// Why it takes no more writes although it is served: its storage failed, or another program changed one of its layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Whether its last snapshot, which is on stable storage, still gets its index.
    #[serde(default, skip_serializing_if = "is_default")]
    pub finalizing: bool,
    /// How often a snapshot was taken and did not get its index: the log says why.
    #[serde(default, skip_serializing_if = "is_default")]
    pub finalize_failures: u64,
    /// What of it is published; absent unless it is a tiered disk that is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<TierStatus>,
    /// Its move; absent unless it moves, or its source files are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moving: Option<MoveStatus>,
    /// Lookups of where a run of a read or write lies that the metadata in memory answered, since the disk was opened.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata_hits: u64,
    /// Those that it did not: tables had to be read first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata_misses: u64,
}

/// A disk that moves to another directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoveStatus {
    /// How far it is.
    pub phase: MovePhase,
    /// Its old path.
    pub from: String,
    /// Its new path.
    pub to: String,
    /// Bytes of files that are left to be copied, about.
    pub left_bytes: u64,
    /// When the source files go, in ns since 1970; absent until all is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until_ns: Option<u64>,
    /// Whether it moves to a flat copy: a raw image without history. Its source files stay.
    #[serde(default, skip_serializing_if = "is_default")]
    pub is_flat: bool,
    /// Bytes a second that its guests may write, so that the move comes to its end; absent if they are not slowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowed_to: Option<u64>,
    /// What could not be read, and is zeros in the copy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRange>,
}

/// Bytes of a file that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnreadableRange {
    /// The layer's old path; of a flat copy, the disk's.
    pub file: String,
    /// Where in it.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MovePhase {
    /// Guests write to the old path; layers are copied.
    Copying,
    /// Guests write to the new path; what they had written last is copied. The disk needs both directories.
    Rest,
    /// All is copied, and the source files are kept for a while.
    Moved,
}

/// All disks, in the order in which they were added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskList {
    /// The disks.
    pub disks: Vec<DiskStatus>,
}

/// A disk with its chain and its exports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskDetail {
    /// What the list of disks says of it.
    #[serde(flatten)]
    pub disk: DiskStatus,
    /// The layers of its chain, base first.
    pub chain: Vec<LayerStatus>,
    /// The exports that lead to it.
    pub exports: Vec<crate::ExportStatus>,
    /// What was done to it; absent unless it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stats: Option<crate::DiskStats>,
}

/// A layer of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerStatus {
    /// Its place, counted from the base (0).
    pub index: u16,
    /// Its file.
    pub path: String,
    /// How it keeps its bytes.
    pub format: Format,
    /// Virtual size.
    pub size_bytes: u64,
    /// Size of its clusters, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_size_bytes: Option<u64>,
    /// Length of its file when it was opened.
    pub file_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_field_does_not_open_a_disk_for_writing() {
        let error = serde_json::from_str::<DiskSpec>(r#"{"path":"a","readonly":true}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `readonly`"), "{error}");
    }

    #[test]
    fn what_is_not_said_is_not_written() {
        let spec: DiskSpec = serde_json::from_str(r#"{"path":"a.qcow2"}"#).unwrap();
        assert_eq!((spec.read_only, spec.cache, spec.format), (false, CacheMode::Host, None));
        assert_eq!(serde_json::to_string(&spec).unwrap(), r#"{"path":"a.qcow2"}"#);
    }
}
