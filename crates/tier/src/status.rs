//! How a tiered disk is published, and what there is to say of that.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::CacheUse;
use crate::head::{EpochNumber, Generation, Head, HeadNumber, OwnerId};
use crate::look::KEEP;
use crate::mount;
use crate::pending::PendingSnapshot;
use crate::place::Place;
use crate::wire::Wire;

/// When a disk is cut, and what guests notice of it.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// How old a write is at most when it is published, while the repository answers.
    pub window: Duration,
    /// Bytes that the guest writes at most until the disk is cut.
    pub epoch_bytes: u64,
    /// For how long a published state can be opened after a newer one is there, at least [`KEEP`].
    pub epochs: Duration,
    /// What becomes of the guest when the window cannot be kept.
    pub on_outage: OnOutage,
    /// Bytes on this host that are not published, at most, while the repository does not answer: writes wait then. `None` for as many as
    /// the file system has left, so that some stays free however many disks there are.
    pub outage_bytes: Option<NonZeroU64>,
    /// When a flush completes.
    pub durability: DurableAt,
    /// What the disks of this host share.
    pub wire: Arc<Wire>,
}

impl TierOptions {
    /// The shortest window and the longest.
    pub const WINDOWS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(600)];
    /// The shortest and the longest time for which states are kept.
    pub const EPOCHS: [Duration; 2] = [KEEP, Duration::from_secs(24 * 3600)];
    /// The longest time for which epochs are held on the host.
    pub const HOLD_MAX: Duration = Duration::from_secs(3600);
}

impl Default for TierOptions {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(30),
            epoch_bytes: 1 << 30,
            epochs: KEEP,
            on_outage: OnOutage::Continue,
            outage_bytes: None,
            durability: DurableAt::Host,
            wire: Arc::default(),
        }
    }
}

/// What becomes of a guest while its repository does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnOutage {
    /// It goes on.
    #[default]
    Continue,
    /// What it flushes waits once there is a write that is older than the window and not published.
    Stall,
}

/// Where a write is durable once the flush after it has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DurableAt {
    /// On this host, and in the repository within the window.
    #[default]
    Host,
    /// In the repository.
    Repository,
}

/// What the engine is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierState {
    /// The image is read that becomes the first epoch.
    Attaching,
    /// Another host publishes; this one waits to take the disk over, with all requests.
    Standby,
    /// It publishes.
    Publishing,
    /// It publishes nothing, and requests wait: another host may take the disk over.
    HandedOver,
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
    /// The group, if the disk is published with others: all of them are meant.
    pub group: Option<String>,
    /// The repository's directory.
    pub repository: PathBuf,
    /// The directory of this host's copy.
    pub local: PathBuf,
    /// Whose copy this is.
    pub owner: OwnerId,
    /// Whose copy published the newest head that this host knows.
    pub published_by: OwnerId,
    /// That head.
    pub head: HeadNumber,
    /// Its generation.
    pub generation: Generation,
    /// The newest epoch that is published.
    pub epoch: EpochNumber,
    /// When the disk had that state, in nanoseconds since 1970.
    pub epoch_time_ns: u64,
    /// Layers of that epoch.
    pub layers: usize,
    /// What the engine is doing.
    pub state: TierState,
    /// The directory of the cache of what is read from the repository, if there is one, and how full it is.
    pub cache: Option<(PathBuf, CacheUse)>,
    /// Since when the repository has not answered reads of what the cache lacks.
    pub silent_since: Option<Instant>,
    /// What a user may want to change in how the repository's file system is mounted.
    pub mount_warnings: Vec<String>,
    /// What of the guest's disk need not be published, as far as this host has looked.
    pub advice: Vec<String>,
    /// What is on this host alone, and what the guest notices of it.
    pub window: WindowStatus,
    /// Snapshots that are not published yet, oldest first.
    pub pending: Vec<PendingSnapshot>,
}

/// What of a disk is not published, and what its guest notices of that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowStatus {
    /// How old a write is at most when it is published, while the repository answers.
    pub window: Duration,
    /// What becomes of the guest when that cannot be kept.
    pub on_outage: OnOutage,
    /// When a flush completes.
    pub durability: DurableAt,
    /// Bytes on this host that are not published.
    pub unpublished_bytes: u64,
    /// When the oldest write came in that is not published, at the earliest, in nanoseconds since 1970.
    pub unpublished_since_ns: Option<u64>,
    /// Until when epochs are held on this host, in nanoseconds since 1970.
    pub held_until_ns: Option<u64>,
    /// Bytes that guests wrote, a second of shipping, of the last epochs; `None` until that is known.
    pub ships_bytes_a_second: Option<u64>,
    /// To how many bytes a second the guest's writes are slowed.
    pub slowed_to_bytes_a_second: Option<u64>,
    /// Whether the guest's writes wait: there are as many bytes on this host as it may have.
    pub writes_wait: bool,
    /// Flushes that wait to be published.
    pub flushes_wait: usize,
}

impl TierStatus {
    /// Of disks of which that is the newest head, published by this host.
    pub(crate) fn of(place: &Place, head: &Head) -> Self {
        Self {
            group: place.group_name().map(str::to_owned),
            repository: place.repository_name(),
            local: place.local.clone(),
            owner: head.owner,
            published_by: head.owner,
            head: head.number,
            generation: head.generation,
            epoch: head.epoch.number,
            epoch_time_ns: head.epoch.time_ns,
            layers: head.epoch.objects().count(),
            state: TierState::Publishing,
            window: WindowStatus::default(),
            cache: None,
            silent_since: None,
            mount_warnings: match place.elsewhere {
                Some(_) => Vec::new(),
                None => mount::warnings(&place.repository),
            },
            advice: Vec::new(),
            pending: Vec::new(),
        }
    }
}
