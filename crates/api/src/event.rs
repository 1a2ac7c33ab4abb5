//! What happens in a server, as it happens.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One message of `GET /v1/events`: its `event` field is also the type of the server-sent event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A disk is served from now on.
    DiskAdded {
        /// Its name.
        disk: String,
    },
    /// A disk was closed and is served no more.
    DiskRemoved {
        /// Its name.
        disk: String,
        /// Why its image could not be closed clean; absent when it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A disk takes no more writes: its storage failed, or another program changed a layer. It is served on, for reading.
    DiskFailed {
        /// Its name.
        disk: String,
        /// Why.
        error: String,
    },
    /// An export is open from now on.
    ExportAdded {
        /// Its number.
        id: u64,
    },
    /// An export was closed.
    ExportRemoved {
        /// Its number.
        id: u64,
    },
    /// A snapshot of a disk was taken.
    SnapshotTaken {
        /// The disk.
        disk: String,
        /// What the snapshot is called.
        snapshot: String,
    },
    /// A disk went back to what it was at a snapshot.
    SnapshotReverted {
        /// The disk.
        disk: String,
        /// What the snapshot is called.
        snapshot: String,
    },
    /// A disk has another size.
    DiskResized {
        /// The disk.
        disk: String,
        /// Its size.
        size_bytes: u64,
    },
    /// A change was made, or tried.
    Changed {
        /// The change, and who made it.
        change: crate::Change,
    },
    /// A job began, ended, or is at another step; some steps have no event.
    Job {
        /// The job as it is now.
        job: crate::JobStatus,
    },
    /// The reader was too slow, and this many events were dropped for it: ask for the whole state again.
    Missed {
        /// How many.
        count: u64,
    },
}

impl Event {
    /// The type of the server-sent event.
    pub fn name(&self) -> &'static str {
        match self {
            Self::DiskAdded { .. } => "disk_added",
            Self::DiskRemoved { .. } => "disk_removed",
            Self::DiskFailed { .. } => "disk_failed",
            Self::ExportAdded { .. } => "export_added",
            Self::ExportRemoved { .. } => "export_removed",
            Self::SnapshotTaken { .. } => "snapshot_taken",
            Self::SnapshotReverted { .. } => "snapshot_reverted",
            Self::DiskResized { .. } => "disk_resized",
            Self::Changed { .. } => "changed",
            Self::Job { .. } => "job",
            Self::Missed { .. } => "missed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_what_the_message_says() {
        for event in [
            Event::DiskAdded { disk: "a".to_owned() },
            Event::DiskRemoved { disk: "a".to_owned(), error: None },
            Event::DiskFailed { disk: "a".to_owned(), error: "b".to_owned() },
            Event::SnapshotReverted { disk: "a".to_owned(), snapshot: "b".to_owned() },
            Event::ExportAdded { id: 1 },
            Event::ExportRemoved { id: 1 },
            Event::DiskResized { disk: "a".to_owned(), size_bytes: 512 },
            Event::Missed { count: 1 },
        ] {
            let json = serde_json::to_value(&event).unwrap();
            assert_eq!(json["event"], event.name());
        }
    }
}
