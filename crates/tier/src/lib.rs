//! Tiered disks: a disk on this host whose states are in a repository, epoch by epoch.
//!
//! ```text
//!   frozen layer ──► dense: one packed qcow2 file ──► ship: written, synced, read back ──► publish: a head names it
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`tiered`](Tiered), `engine`, `shared`, [`status`](TierStatus) | when a disk is cut and published, and what is not |
//! | `copies` | the copy of a disk that a host writes |
//! | [`place`](Place), [`elsewhere`](Elsewhere), `mount` | where the parts of a tiered disk lie, and on what |
//! | `attach`, [`attaching`](Attaching), [`detach`](Detach) | an ordinary image as the first layer, also of a disk in use, and the way back; the disk's path |
//! | `hand_over`, [`standby`](Standby) | a disk goes from one host to another while both run |
//! | [`branch`](Branch) | copies that were put aside |
//! | [`window`](WindowStatus), `pacer`, `flushes` | how old the oldest write is that is not published, and what guests notice of it |
//! | [`wire`](Wire), `meter`, `metered` | what the disks of a host share on the way to repositories, and what is seen of these |
//! | [`dense`](ship_state) | a state of a disk as a qcow2 file that holds no more than it must |
//! | [`group`](group_of) | which disks are published together |
//! | [`head`](Head) | what a head says, and its bytes |
//! | [`publisher`](Publisher) | who publishes, and that nobody else does |
//! | [`look`](newest) | what a repository holds, and how old that knowledge may be |
//! | [`whole`](newest_whole) | what is left of a repository that lost something |
//! | [`pin`](Pin), `states` | what keeps a state for its readers, and under which names people find one |
//! | [`pending`](PendingSnapshot) | snapshots that were cut off and are not published yet |
//! | [`merge`](Merge), `merger` | which layers become one, and the thread that makes them so |
//! | `stand` | what the copy on this host stands on |
//! | [`base`](BaseState) | which state a clone is to stand on, and what keeps that for it |
//! | [`rebase`](rebase()), [`rebasing`](Rebasing), `rebases` | a disk gets another version of its base, out of use and in use |
//! | `retain` | what may be deleted |
//! | [`object`](ship) | how a layer gets into the repository |
//! | `digests` | what proves a part of a layer |
//! | `abreast` | work for a far repository, several items at a time |
//! | `advice` | what of a guest's disk need not be published |
//! | `cache`, `remote`, `cached_files` | which chunks of repositories' layers this host has, and how reads get them |
//! | `boot`, `ahead` | what guests read when they start, and that it comes ahead of them |
//! | [`replica`](Replica) | the layers of one disk in the cache: filled, proved again, pinned, given up |
//! | `companion` | what lies beside a layer: digests, and its tables packed |
//! | `compose` | chunks of layers, made from an image on this host |
//!
//! Invariants: two processes never publish one disk; a head names complete layers only; what a claim takes over is what was
//! published last; what the newest head, a pin, or a head of the last ten minutes names is there.

#![forbid(unsafe_code)]

mod abreast;
mod advice;
mod ahead;
mod attach;
mod attaching;
mod base;
mod boot;
mod branch;
mod cache;
mod cached_files;
mod companion;
mod compose;
mod copies;
mod cuts;
mod dense;
mod detach;
mod digests;
mod elsewhere;
mod engine;
mod error;
mod flushes;
mod group;
mod hand_over;
mod head;
mod lock;
mod look;
mod member;
mod merge;
mod merger;
mod meter;
mod metered;
mod mount;
mod object;
mod pacer;
mod pending;
mod pin;
mod place;
mod publisher;
mod rebase;
mod rebases;
mod rebasing;
mod remote;
mod replica;
mod retain;
mod sealed;
mod shared;
mod stand;
mod standby;
mod states;
mod status;
mod tiered;
mod waiter;
mod whole;
mod window;
mod wire;

pub use attaching::Attaching;
pub use base::{BaseState, clone_reader, release_clone};
pub use boot::BOOT;
pub use branch::Branch;
pub use cache::{CACHE_BYTES_MIN, Cache, CacheUse};
pub use cached_files::{CachedFiles, LayerDirectory, ReadThrough};
pub use copies::{attach_image, revert, take_over};
pub use dense::{MergeOrders, ship_merged, ship_state};
pub use detach::Detach;
pub use elsewhere::{DiskAddress, Elsewhere, RepositoryAddress, fetch};
pub use error::{Error, Result};
pub use group::{group_of, is_group_name, repository_of};
pub use head::{
    DISKS_MAX, DiskState, Epoch, EpochNumber, Generation, HEAD_BYTES_MAX, Head, HeadNumber, OBJECTS_MAX,
    Object, ObjectId, OwnerId, PinId, is_object_name,
};
pub use look::{KEEP, disks, newest, states};
pub use merge::{LAYERS_MAX, Merge};
pub use object::{Shipment, adopt, ship};
pub use pending::{CutState, PendingSnapshot};
pub use pin::{Pin, Purpose};
pub use place::{CACHE_NAME, Place, stand_in};
pub use publisher::{Claim, Publisher};
pub use rebase::{Draft, rebase};
pub use rebasing::Rebasing;
pub use remote::{CachedLayer, OnMissing, Remote};
pub use replica::{LayerReplica, Passed, Replica, Walk, read_through};
pub use standby::Standby;
pub use states::{age_of, find_snapshot, find_state, forget, open_state, snapshots, snapshots_of};
pub use status::{DurableAt, OnOutage, TierOptions, TierState, TierStatus, WindowStatus};
pub use tiered::{TakenState, Tiered};
pub use whole::{Whole, newest_whole};
pub use wire::Wire;
