//! How a tiered disk is published, and what is told of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::cache::CacheUse;
use crate::head::{EpochNumber, Generation, OwnerId};
use crate::look::KEEP;

/// When a disk is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierOptions {
    /// How old a write is at most when it is cut off.
    pub window: Duration,
    /// Bytes that the guest writes at most until then.
    pub epoch_bytes: u64,
    /// For how long a published state can be opened after a newer one is there, at least [`KEEP`].
    pub epochs: Duration,
}

impl TierOptions {
    /// The shortest window and the longest.
    pub const WINDOWS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(600)];
    /// The shortest and the longest time for which states are kept.
    pub const EPOCHS: [Duration; 2] = [KEEP, Duration::from_secs(24 * 3600)];
}

impl Default for TierOptions {
    fn default() -> Self {
        Self { window: Duration::from_secs(30), epoch_bytes: 1 << 30, epochs: KEEP }
    }
}

/// What the engine is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierState {
    /// It publishes.
    Publishing,
    /// It could not, and tries again.
    Stalled {
        /// In nanoseconds since 1970.
        since_ns: u64,
        /// Why.
        why: String,
    },
    /// Another copy of the disk publishes.
    Fenced {
        /// Who, and since when.
        why: String,
    },
}

/// What of a disk is published, and what is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierStatus {
    /// The repository's directory.
    pub repository: PathBuf,
    /// The directory of this host's copy.
    pub local: PathBuf,
    /// Whose copy this is.
    pub owner: OwnerId,
    /// The generation that it publishes.
    pub generation: Generation,
    /// The newest epoch that is published.
    pub epoch: EpochNumber,
    /// When the disk had that state, in nanoseconds since 1970.
    pub epoch_time_ns: u64,
    /// Layers of that epoch.
    pub layers: usize,
    /// Bytes on this host that are not published.
    pub unpublished_bytes: u64,
    /// When the oldest write came in that is not published, at the earliest.
    pub unpublished_since_ns: Option<u64>,
    /// What the engine is doing.
    pub state: TierState,
    /// The directory of the cache of what is read from the repository, if there is one, and how full it is.
    pub cache: Option<(PathBuf, CacheUse)>,
    /// Since when the repository has not answered reads of what the cache lacks.
    pub silent_since: Option<Instant>,
    /// What a user may want to change in how the repository's file system is mounted.
    pub mount_warnings: Vec<String>,
}
