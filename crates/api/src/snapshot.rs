//! Snapshots of served disks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::is_default;

/// A snapshot to take of one disk, or of several at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotSpec {
    /// The disks, by what the server calls them; each once.
    #[schema(min_items = 1)]
    pub disks: Vec<String>,
    /// What to call it: up to 100 of `A-Z a-z 0-9 . _ -`.
    #[schema(max_length = 100, pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    pub name: String,
    /// When it is taken, in ns since 1970, as the caller's clock says; if omitted, as the server's does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_ns: Option<u64>,
    /// Free-form labels.
    #[serde(default, skip_serializing_if = "is_default")]
    pub labels: BTreeMap<String, String>,
    /// What snapshots of several disks at one instant have in common.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 64, pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    pub group: Option<String>,
    /// The socket of the agent in the guest of all these disks; that of each disk if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub agent: Option<String>,
    /// Whether the guest's file systems are frozen for it; if omitted, `always` with `agent`, `auto` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesce: Option<Quiesce>,
    /// Whether the paths of raw disks may become qcow2: a snapshot puts an overlay there. Refused otherwise.
    #[serde(default, skip_serializing_if = "is_default")]
    pub convert_raw: bool,
    /// Whether a snapshot of a tiered disk is answered once the disk is cut, without its repository. It is there once it is published, also
    /// by a server that goes on after this one, and waits among the disk's `pending_snapshots` until then. Changes nothing of other disks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub publish_later: bool,
}

/// Whether guests' file systems are frozen for a snapshot.
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quiesce {
    /// If every disk has an agent that does it; else the snapshot is what a power failure would leave, and says so.
    #[default]
    Auto,
    /// Or no snapshot is taken.
    Always,
    /// Not.
    Never,
}

/// A snapshot that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotTaken {
    /// What it is called.
    pub name: String,
    /// For how long writes were held; reads were not.
    pub pause_us: u64,
    /// Whether the guests' file systems were frozen, and need no recovery in it.
    #[serde(default)]
    pub quiesced: bool,
    /// Why they were not, though there is an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_quiesced_because: Option<String>,
    /// Each disk's layer, in the order asked for.
    pub disks: Vec<SnapshotLayer>,
}

/// The layer that holds a disk as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotLayer {
    /// The disk.
    pub disk: String,
    /// The layer's file; of a snapshot that is published later what commands call it then, `DISK@NAME`.
    pub layer: String,
    /// Whether the disk was a raw file: its path is qcow2 from now on, and what opens that file itself must say so.
    #[serde(default, skip_serializing_if = "is_default")]
    pub was_raw: bool,
}

/// A snapshot to go back to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevertSpec {
    /// Its name.
    pub snapshot: String,
    /// Keep what is active now as this file, a disk of its own: in the same directory, absolute or seen from where the server was
    /// started. It is let go if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, pattern = r"^[^\x00]+$")]
    pub keep: Option<String>,
    /// Go back although images stand on what is active now, which will then read other data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A disk that is what it was at a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotReverted {
    /// The disk.
    pub disk: String,
    /// The snapshot.
    pub snapshot: String,
    /// The file the disk stands on now.
    pub layer: String,
    /// Layers that the disk does not stand on any more, newest first. Their files are still there.
    pub dropped_layers: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_not_written() {
        let text = r#"{"disks":["web"],"name":"mon","taken_ns":5}"#;
        let spec: SnapshotSpec = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&spec).unwrap(), text);
        serde_json::from_str::<SnapshotSpec>(r#"{"disk":"web","name":"mon","taken_ns":5}"#).unwrap_err();
    }
}
