//! Changes of disks, exports and snapshots, by a server or by a command without one, and who made them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A change that was made, or tried: a line of an audit file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// When it ended, as RFC 3339 has it, in UTC.
    #[schema(example = "2026-11-21T23:59:59Z")]
    pub time: String,
    /// What was changed. By a server: `disk_add`, `disk_remove`, `disk_resize`, `disk_limit`, `tier_sync`, `tier_hold`, `tier_follow`, `tier_hand_over`, `tier_take_back`, `tier_take_over`, `tier_rate`, `move_rate`, `replica_pin`, `replica_drop`, `export_add`, `export_remove`, `snapshot_create`,
    /// `snapshot_revert`, `job_start`, `job_change`, `shutdown`; when a job has ended, the kind of the job. By a command without a
    /// server: those of these that it can make, and `disk_create`, `disk_repair`, `disk_backup`, `disk_restore`, `disk_convert`, `snapshot_clone`,
    /// `snapshot_hold`, `snapshot_release`, `index_drop`, `tier_takeover`, `tier_branch_drop`, `tier_detach`, `gc`, `vm_snapshot`, `vm_restore`, `vm_delete`, `vm_gc`,
    /// `vm_repair`, `vm_migrate`.
    #[schema(example = "snapshot_create")]
    pub change: String,
    /// The disks, by what the server calls them, or by their paths where no server was asked; none for what is about no disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
    /// What of them: snapshots, an export, a job, a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// Who made it.
    pub by: ChangedBy,
    /// Bytes: a disk's size, what was stored, what a deletion or a merge has freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// How long it took.
    pub duration_ms: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Who made a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ChangedBy {
    /// A client of the control socket.
    Client {
        /// Its user.
        uid: u32,
        /// Its process, which may have ended since.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<i32>,
    },
    /// A command that no server carried out.
    Local {
        /// Its user.
        uid: u32,
        /// That user's name, where the host knows it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// The server, by the rules of what snapshots to keep.
    Retention,
    /// The server by itself: it makes indices anew.
    Server,
}

impl std::fmt::Display for ChangedBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Client { uid, pid: Some(pid) } => write!(f, "uid {uid}, pid {pid}"),
            Self::Client { uid, pid: None } => write!(f, "uid {uid}"),
            Self::Local { uid, name: Some(name) } => write!(f, "{name}, uid {uid}"),
            Self::Local { uid, name: None } => write!(f, "uid {uid}"),
            Self::Retention => f.write_str("retention"),
            Self::Server => f.write_str("server"),
        }
    }
}

/// How a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is made.
    Done,
    /// It was ended before that, because someone asked for it.
    Cancelled,
    /// It was refused, or failed.
    Failed,
}

impl std::fmt::Display for Outcome {
    /// The word of the JSON.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_the_same_word_in_a_log_line_and_in_json() {
        for outcome in [Outcome::Done, Outcome::Cancelled, Outcome::Failed] {
            assert_eq!(serde_json::to_value(outcome).unwrap(), outcome.to_string());
        }
    }
}
