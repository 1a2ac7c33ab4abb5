//! Pages of clean cache that need no copy, because the guest's disks have their bytes.
//!
//! ```text
//!   capture:  clean pages ─► Claims: buffer heads, or inode and file system ─► pieces of disks ─► read, compare ─► Found
//!   restore:  frames without bytes ─► Refiller: their pieces ─► read, compare hashes ─► pages, and those to be hidden
//!             where the guest runs first: those not reached ─► Later ─► pages as the guest needs them
//! ```
//!
//! The disks are read at the instant of the snapshot, at which a clean page equals what they hold. Everything that says
//! where is a guest's claim: a page is refilled only if its bytes were found there, and is believed only if they still are.

mod claims;
mod find;
mod later;
mod reader;
mod refiller;

pub use find::{Found, find};
pub use later::Later;
pub use refiller::Refiller;
