//! A move that follows its guest's I/O (IOFollow 3): what it reads next, what it keeps in memory, when it lets the guest go first, and how
//! much it has in flight.
//!
//! ```text
//!   guest's requests ─► Scheduler   which chunk is read next: an order over what is Left
//!                  ├──► BlockCache  what was read answers the guest's reads
//!                  ├──► Turns       whose turn it is at the device: guests, and moves in fair shares
//!                  └──► Control     bytes in flight, as far as the guest's latency allows
//! ```
//!
//! These parts do no I/O and read no clock: times and positions are arguments. So one code serves disks in use and a model in virtual time.
//! Times are a [`std::time::Duration`] since any one instant.

mod cache;
mod control;
mod left;
mod scheduler;
mod turns;

pub use cache::{BlockCache, Flight, Piece, Place};
pub use control::{Allowed, Control};
pub use left::Left;
pub use scheduler::{Next, Order, Scheduler};
pub use turns::{Holder, Ratio, Reads, Turns, idlest};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
}
