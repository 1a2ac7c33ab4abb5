//! Histories of disks: a model, the real thing beside it, and random steps that change both.
//!
//! ```text
//!   step ──► World ──► engine and files of `golden` and `vms`
//!              └─────► Model: a graph of images, a flat array for each
//!   verify ◄── both
//! ```
//!
//! A disk is a name that leads to an image. Who serves disks is this process; it is "killed" now and then ([`kill`]).

mod guest;
mod kill;
mod merges;
mod model;
mod offline;
mod states;
mod world;

pub(crate) use world::{Kind, World};

/// The clusters of a range that a discard clears: whole ones, of which the disk's last may be cut short.
fn discarded(at: u64, len: u64, cluster: u64, size: u64) -> Option<std::ops::Range<u64>> {
    let end = at + len;
    let whole = at.next_multiple_of(cluster)..if end == size { end } else { end / cluster * cluster };
    (!whole.is_empty()).then_some(whole)
}
