//! A disk in use moves to another directory, with its history.
//!
//! ```text
//!   copy    /a: base ◄── mon ◄── web               /b: base ◄── mon               frozen layers, while the guest writes to /a/web
//!   freeze  /a: base ◄── mon ◄── move-1 ◄── web    /b: base ◄── mon ◄── move-1    what web held; again while that halves what is left
//!   switch  /a: base ◄── mon ◄── move-1 ◄── move-2 ◄──── /b: web                  from here on the guest writes to /b
//!   rest    /b: base ◄── mon ◄── move-1 ◄── move-2 ◄──── /b: web                  move-2 is copied, and web stands on the copy
//!   let go  /a: nothing that only the disk needed
//! ```
//!
//! The switch is a snapshot whose overlay lies elsewhere ([`Disk::move_to`]): writes are held for microseconds, and what the guest writes
//! goes to the target from then on. So a move converges however fast a guest writes: each block is sent once, and no write is
//! mirrored. From the switch until the rest is copied, the disk needs both directories.
//!
//! At every instant exactly one path is the disk: the old one until it is removed, which is the switch; then the new one. What was
//! copied is known from a journal beside the new path ([`journal`]); whoever goes on with a move that was killed reads it.

#![forbid(unsafe_code)]

mod chain;
mod copy;
mod device;
mod error;
mod flat;
pub mod follow;
mod journal;
mod moving;
mod requests;
mod schedule;

pub use chain::{Plan, PlannedLayer};
pub use copy::{Unreadable, allocated};
pub use device::order_for;
pub use error::{Error, Result};
pub use flat::{BackOptions, FlatMove, FlatOptions, is_flat, is_way_back};
pub use journal::{Moved, came_from, moved_to, source_directory};
pub use moving::{Move, MoveOptions, Moving, Phase, Report};
pub use requests::{Requests, Timed};
pub use schedule::Schedule;

#[cfg(doc)]
use vmstrata_disk::Disk;
