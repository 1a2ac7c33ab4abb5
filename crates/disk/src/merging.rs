//! Merging: dropping frozen layers from a chain, whose other states stay what they are.
//!
//! ```text
//!   before   base ◄── 1 ◄── 2 ◄── 3 ◄── disk          drop 1 and 2
//!   copy     base ◄── 1 ◄── 2 ◄── 3'◄── disk          3' = 3, and what only 1 and 2 had
//!   relink   base ◄────────────── 3'◄── disk          one sector of 3' written
//!   remove                                            the files of 1 and 2, if no one needs them
//! ```
//!
//! **Stream.** What the dropped layers hold is copied into the layer above them, the *target*, as far as it has nothing
//! of its own there; then the target's header names what lies below the dropped layers. What the target and all above it
//! read never changes, so other disks on them are unharmed, and at every instant the files are a chain that stock tools
//! read right.
//!
//! **Commit.** Where that copies less, and nothing else uses the dropped layers: their *base*, the lowest, gets what the target
//! and those between have, and then takes the target's place ([`commit`]). [`direction`] chooses.
//!
//! Place in the data flow: what the job beside the engine ([`crate::merge::Merge`]) is made of. Copying
//! is copy-on-write as the engine does it for guests: allocate, write, publish, and commit in the order of
//! [`crate::changes`].
//!
//! Invariants:
//! - A cluster is copied exactly when the target would read otherwise without the dropped layers: both maps are asked
//!   ([`stream`]). That covers zeros, sizes, cluster sizes and raw bases without a rule for any of them.
//! - Whatever ends the job early leaves a sound chain and, after a crash, leaked clusters at most. Started again it
//!   passes over what is there.
//! - Whether the header has room for the new name, and the file system for what will be copied, is known before anything is.
//! - A file is removed only if it was a snapshot of this disk and no image needs it ([`crate::refs`], [`remove`]). What a killed process
//!   did not come to remove goes later ([`cleanup`]).
//! - A frozen target is written only while no other process uses it, or a disk that stands on it: a process that opens one later
//!   finds its index void and its file locked.
//!
//! Lock order: as in [`crate::active`].

pub(crate) mod cleanup;
pub(crate) mod commit;
pub(crate) mod copier;
mod deleting;
pub(crate) mod direction;
mod fault;
mod forecast;
pub(crate) mod holes;
pub(crate) mod orphans;
pub(crate) mod plan;
pub(crate) mod relink;
pub(crate) mod remove;
pub(crate) mod room;
mod selection;
pub(crate) mod stream;
pub(crate) mod target;

pub use crate::refs::Kept;
pub use direction::Direction;
pub use fault::MergeFault;
pub use forecast::{Forecast, Going};
pub use orphans::{CollectOptions, Orphan, collect, disks_with_orphans, noted_in, orphans};
pub use plan::{MergeRange, all_of, ranges_of};
pub use remove::Removal;
pub use room::available_bytes;
pub use selection::{LayerRef, Selection};

pub(crate) use copier::{Copier, Way, let_go};

use std::path::PathBuf;

use crate::chain::OpenOptions;

/// How to merge.
#[derive(Clone, Debug, Default)]
pub struct MergeOptions {
    /// How the disk is to be looked at. Files in its directories are looked at for others that need what is dropped.
    pub open: OpenOptions,
    /// What becomes of the files of dropped layers.
    pub removal: Removal,
    /// Take disks that told that they stand on a layer, and are not where they were, for deleted. Else they may have been moved,
    /// and keep it.
    pub forget_missing: bool,
    /// Allow layers below the end of the disk's own history to be copied into, as long as no snapshot is dropped there: for
    /// chains that other tools made, by somebody who knows that no other disk counts them as its history.
    pub beyond_own: bool,
    /// Which way.
    pub direction: Direction,
}

/// What merging has done.
#[derive(Clone, Debug, Default)]
pub struct Merged {
    /// Bytes copied into the target.
    pub copied_bytes: u64,
    /// Whether they were copied into the base of the dropped layers.
    pub is_commit: bool,
    /// Files removed, newest layer first.
    pub removed: Vec<PathBuf>,
    /// Bytes of the host's storage that are free by that, less what the copying took.
    pub freed_bytes: u64,
    /// Files of dropped layers that are still there, and why.
    pub kept: Vec<(PathBuf, Kept)>,
}
