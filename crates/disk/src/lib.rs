//! The engine: a chain of image files that reads and writes like one disk, at a cost that does not grow with its
//! history.
//!
//! ```text
//!   exports (vmstrata-export)
//!      │ Request                         ▲ Completion
//!      ▼                                 │
//!   queue ── lookup ──► disk ──► active ─┴─ frozen map ──► metadata cache
//!      │                  │        │             │
//!      │ ring             │        │ changes,    │ scan
//!      │                  ▼        ▼ journal     ▼
//!      └──────────► read, write, zero ──► alloc ──► layers ──► vmstrata-store
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`queue`](IoQueue), `absent`, `request`, `workers`, `observer`, `throttle` | requests of an I/O thread, who carries them out, sees and limits them |
//! | [`disk`](Disk), `read`, `write`, `zero`, [`extents`](Extent) | where bytes are, and how they move |
//! | `map`, `levels`, `entry`, `cache` | the frozen chain as one table, in one budget |
//! | `active`, `alloc`, `changes`, `journal`, `epoch`, `blocks` | the layer that is written, and the order of its writes |
//! | `head`, `chain`, `loading`, `layer`, `opener`, [`resources`](Resources) | files: found, checked, shared, bounded |
//! | `refs` | who else needs a file |
//! | [`logged`](open_logged) | images that a flush log is brought into |
//! | [`frozen`](FrozenLayer) | tables of frozen layers, for those who compare and copy states |
//! | [`mod@merge`], `merging` | dropping layers from a chain |
//! | [`snapshot`], `snapshots` | taking, finding and going back to states of a disk, as files |
//! | [`mod@create`], [`check()`] | new images, and whether a file is sound, with the journal of a killed process |
//!
//! Invariants: a read returns the newest completed write; what a flush acknowledged survives a power failure, and
//! what completed survives a killed process; at every instant the files are a chain that stock tools read correctly
//! and find free of corruption. Assumed of the host's storage: a flush that succeeds is true, a sector of 512 bytes is
//! written whole or not at all, and bytes written before a flush began are on it when the flush ends.

#![forbid(unsafe_code)]

mod absent;
mod access;
mod active;
mod alloc;
mod atomic_file;
mod blocks;
mod cache;
mod chain;
mod changes;
mod check;
mod compressed;
pub mod create;
mod described;
mod disk;
mod entry;
mod epoch;
mod error;
mod extents;
pub mod file_name;
mod files;
mod flusher;
mod fold;
mod frozen;
mod head;
pub mod index;
mod journal;
mod json_name;
mod layer;
mod layers;
mod levels;
mod loading;
mod logged;
mod maintenance;
mod map;
pub mod merge;
mod merging;
mod names;
mod observer;
mod opener;
mod probe;
mod queue;
mod read;
#[cfg(test)]
mod recovery_model;
mod refs;
mod request;
mod resources;
mod session;
pub mod snapshot;
mod snapshots;
pub mod stats;
mod threads;
mod throttle;
mod times;
mod window;
mod workers;
mod write;
mod zero;

pub use access::{copy as copy_access, let_owner_write};
pub use active::Mismatch;
pub use atomic_file::AtomicFile;
pub use chain::{DetectZeroes, OpenOptions, Unflushed};
pub use check::{CheckOptions, check};
pub use create::{CreateOptions, create, create_on};
pub use described::DescribedDisk;
pub use disk::{
    AttachedWriter, Disk, FlatHome, HasWriter, Indexing, NewHome, ResizeFault, Resized, Shrink, Taken,
    Together, Watch, make_overlay, remove_second_name, snapshot_together,
};
pub use error::{Error, ErrorKind, IoContext, Result};
pub use extents::{Extent, ExtentKind};
pub use frozen::{FrozenChain, FrozenLayer};
pub use journal::Slot;
pub use layer::Format;
pub use layers::LayerInfo;
pub use logged::open_logged;
pub use names::{REPOSITORY, SIDECAR, is_published, unfinished_copy};
pub use observer::{Durability, IoObserver, WhenDurable};
pub use opener::{LocalFiles, Opened, Opener, Role, directory_of};
pub use probe::{
    BackingPlace, ImageHead, LayerHead, OwnCluster, ProbedFile, check_locks, own_clusters, probe_backing,
    probe_chain, probe_file, probe_layer, published_below,
};
pub use queue::{IoQueue, WATCHED_MAX};
pub use request::{Completion, Op, Request};
pub use resources::{ResourceOptions, ResourceUse, Resources};
pub use throttle::{Limit, LimitError, Limits, Pace};
