//! What can go wrong in a store of snapshots.

use std::io;

use thiserror::Error;

use super::name::{ObjectId, SnapshotId};
use crate::address::Frame;

/// Shorthand for results of the store.
pub type Result<T, E = VaultError> = std::result::Result<T, E>;

/// Why the store could not do something.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VaultError {
    /// A repository did not do what was asked.
    #[error(transparent)]
    Repository(#[from] vmstrata_repo::Error),
    /// Fewer repositories than copies.
    #[error("{wanted} copies need {wanted} repositories: {found} can be reached")]
    TooFewRepositories {
        /// Copies asked for.
        wanted: u8,
        /// What there is room for.
        found: usize,
    },
    /// Copies that one failing device would take together.
    #[error(
        "{wanted} copies on {devices} of them would share a device and be lost with it: name repositories on {wanted} devices, or allow one device"
    )]
    SharedDevice {
        /// Copies asked for.
        wanted: u8,
        /// Devices there are.
        devices: usize,
    },
    /// A name that cannot be one.
    #[error(
        "'{0}' is no name: 1 to 100 bytes, letters, digits, '.', '_' and '-', not beginning with '.' or '-'"
    )]
    Name(String),
    /// A value outside its limits.
    #[error("{what} is {value}, allowed is {least} to {most}")]
    Limit {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: i64,
        /// The smallest one.
        least: i64,
        /// The largest one.
        most: i64,
    },
    /// The guest has a snapshot of that name.
    #[error("{guest} has a snapshot {name} already")]
    Exists {
        /// The guest.
        guest: String,
        /// The name.
        name: String,
    },
    /// Nothing of that name.
    #[error("no snapshot {0}")]
    NotFound(String),
    /// Nothing of that name among those that can be read, and some cannot.
    #[error("no snapshot {which} that can be read: what is known of {} is lost, which it may be", list(lost))]
    Unreadable {
        /// What was meant.
        which: String,
        /// Those that cannot be read.
        lost: Vec<SnapshotId>,
    },
    /// Several of that name.
    #[error("'{0}' could be several snapshots: give its id")]
    Ambiguous(String),
    /// A page that the machine does not have, or that was given before.
    #[error("{frame}: {reason}")]
    Page {
        /// The page.
        frame: Frame,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Pages that nobody gave.
    #[error("{missing} pages were not given, the first one {first}")]
    Incomplete {
        /// Number of pages.
        missing: u64,
        /// The first of them.
        first: Frame,
    },
    /// A thread that compresses and writes has ended.
    #[error("a thread of the snapshot's writer ended early")]
    Worker,
    /// The host has no more threads for this process.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
    /// An object that is not what it should be.
    #[error("{place}: {reason}")]
    Damaged {
        /// The repository and the object.
        place: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// No copy of a snapshot's metadata, or of a part of it, can be read.
    #[error("snapshot {snapshot}: its metadata is lost; tried {}", tried.join("; "))]
    MetadataLost {
        /// The snapshot.
        id: SnapshotId,
        /// Guest and name; the id where nothing is known of it.
        snapshot: String,
        /// Each copy, with what was wrong.
        tried: Vec<String>,
    },
    /// No copy of a page that the guest needs can be read.
    #[error("snapshot {snapshot}: {frame} is lost, and the guest needs it; tried {}", tried.join("; "))]
    PageLost {
        /// Guest and name.
        snapshot: String,
        /// The page.
        frame: Frame,
        /// Each copy, with what was wrong.
        tried: Vec<String>,
    },
    /// Nothing may be collected while it is not known what is needed.
    #[error("{} cannot be read, so what it needs is not known: repair or delete it first", list(.0))]
    NeedsUnknown(Vec<ObjectId>),
    /// Repositories that cannot be reached, where others might lie that need what would be deleted.
    #[error("nothing is deleted while repositories cannot be reached: {}", .0.join("; "))]
    Unreachable(Vec<String>),
    /// The taker of the pages did not take them.
    #[error("restoring {frame}")]
    Sink {
        /// The page.
        frame: Frame,
        /// The cause.
        source: io::Error,
    },
}

fn list(names: &[impl ToString]) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
