//! Snapshots as files: a layer gets a name, and a new, empty overlay takes its place.
//!
//! ```text
//!            before        prepare()                        publish()
//!   web.qcow2 ─► A      web.qcow2 ──────► A               web.qcow2 ─► B ─► web.mon.qcow2
//!                       web.mon.qcow2 ──► A               web.mon.qcow2 ─► A
//!                       .web.qcow2.N-N.snapshot ─► B
//! ```
//!
//! Place in the data flow: beside the engine. A live disk does the same in smaller steps ([`crate::Together`]):
//! between them it opens [`Prepared::overlay`] for writing, and moves its guest over to it; [`crate::offline`] does it to files that no
//! server serves. [`list`] and [`resolve`] read what was left in the headers.
//!
//! Invariants:
//! - At every instant the disk's path leads to a sound chain: to the old file until the rename, to the overlay after it.
//! - Whoever prepares holds the writer's lock of the active file, so there is one preparation of a disk at a time and
//!   what an earlier one left belongs to no other.
//! - What a killed process left is known by the temporary overlay: it is made before the second name of the active file
//!   and removed after it. Nothing else is ever removed.
//! - A frozen file is not written for the sake of its name: name, time and labels are in the overlay's header
//!   ([`SnapshotInfo`]).

pub(crate) mod extend;
pub(crate) mod fault;
pub(crate) mod hold;
pub(crate) mod interrupted;
mod keep;
pub(crate) mod list;
pub(crate) mod lock;
pub(crate) mod overlay;
pub(crate) mod prepare;
mod prune;
mod state;
pub(crate) mod stood_on;

use std::time::{SystemTime, UNIX_EPOCH};

pub use vmstrata_qcow2::snapshot_info::is_snapshot_name;
pub use vmstrata_qcow2::{SnapshotInfo, SnapshotInfoError};

pub use crate::names::frozen_path;
pub use crate::refs::{Holder, HolderKind, holders};
pub use fault::SnapshotFault;
pub(crate) use fault::group_broken;
pub use hold::{DEFAULT_TAG, Held, hold, move_holds, release};
pub use keep::{Keep, KeepError};
pub(crate) use list::pick;
pub use list::{Snapshot, State, find, list, recorded_in, resolve, split_state, state_of};
pub(crate) use lock::{lock_if_free, name_from};
pub use prepare::{PrepareOptions, Prepared, Step, prepare};
pub(crate) use prepare::{check_ready, prepare_live};
pub use prune::{MEMORY_LABEL, MOVE_LABEL, Pruning, REBASE_LABEL};

/// Now, as snapshots have it: nanoseconds since 1970, as far as the clock is right.
pub fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
