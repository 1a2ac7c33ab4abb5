//! The control API, version 1: what `vmstrata serve` and those who control it say to each other.
//!
//! ```text
//!   vmstrata status, disk, export ─┐   JSON over HTTP/1.1    ┌─► server: handlers ──► disks, exports
//!   dashboards, orchestrators  ──┼──── on a unix socket ───┤
//!   curl                       ──┘                         └─► GET /v1/openapi.json: this crate as OpenAPI
//! ```
//!
//! Types only: no I/O, no knowledge of the engine. Their doc comments are the descriptions of the OpenAPI document,
//! which is committed as `docs/openapi.json`; a test compares the two.
//!
//! Rules for changes of version 1:
//! - names are `snake_case`, sizes are bytes and end in `_bytes`, times end in their unit;
//! - what a server answers may gain fields, and enums of answers may gain values: clients pass over what they do not
//!   know. What a client sends is checked strictly: a field that the server does not know is an error, because a
//!   misspelt `read_only` must not open a disk for writing;
//! - anything else needs a `/v2`, beside this one.

#![forbid(unsafe_code)]

mod change;
mod disk;
mod event;
mod export;
mod job;
mod limits;
mod problem;
mod size;
mod snapshot;
mod stats;
mod status;
mod tier;

pub use change::{Change, ChangedBy, Outcome};
pub use disk::{
    CacheMode, DetectZeroes, DiskDetail, DiskList, DiskRole, DiskSpec, DiskState, DiskStatus, FileNumber,
    Format, LayerStatus, MovePhase, MoveStatus, Subclusters, UnreadableRange,
};
pub use event::Event;
pub use export::{
    ClientRights, ExportCounters, ExportList, ExportSpec, ExportStatus, FuseSpec, NbdSpec, VhostUserSpec,
};
pub use job::{
    JobChange, JobList, JobSpec, JobState, JobStatus, LayerRef, MergeDirection, MoveOrder, RemoveFiles,
    Removed,
};
pub use limits::{DiskLimits, HostRate, Limit};
pub use problem::{PROBLEM_TYPE, Problem};
pub use size::{SizeChange, SizeSpec};
pub use snapshot::{Quiesce, RevertSpec, SnapshotLayer, SnapshotReverted, SnapshotSpec, SnapshotTaken};
pub use stats::{DepthStats, DiskStats, KindStats, Latency, LatencyBucket, NamedStats, StatsList};
pub use status::{FlushLogStatus, ResourceStatus, ServerStatus};
pub use tier::{
    DurableAt, OnOutage, PendingSnapshot, Replica, ReplicaDropped, ReplicaLayer, ReplicaList, ReplicaPin,
    TakeOver, TierCache, TierHold, TierState, TierStatus,
};

/// Where a server listens unless told otherwise, below its runtime directory.
pub const CONTROL_SOCKET: &str = "control.sock";

/// `text` as one segment of a URL's path.
///
/// `.` and `..` stay what they are: no name of the API may be one of them.
pub fn encode_segment(text: &str) -> String {
    vmstrata_types::percent_encode(text.as_bytes())
}

/// Whether a field has its default value and need not be written.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
