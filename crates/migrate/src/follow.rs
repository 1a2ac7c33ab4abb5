//! A move that follows its guest's I/O (IOFollow 3): what it reads next, and what it keeps in memory.
//!
//! ```text
//!   guest's requests ─► Scheduler   which chunk is read next: an order over what is Left
//!                  ├──► BlockCache  what was read answers the guest's reads
//! ```
//!
//! These parts do no I/O and read no clock: times and positions are arguments. So one code serves disks in use and a model in virtual time.
//! Times are a [`std::time::Duration`] since any one instant.

mod cache;
mod left;
mod scheduler;

pub use cache::{BlockCache, Flight, Piece, Place};
pub use left::Left;
pub use scheduler::{Next, Order, Scheduler};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
}
