//! Bringing a guest back before its memory is read.
//!
//! ```text
//!   QEMU ──► page fault ──► mount: a file per backend (FUSE) ──► LazyMemory: what is here? ──► local file
//!                                                                   │ not yet
//!            fill, in the background ───────────────────────────────┤
//!                                                                   ▼
//!                                    PageSource (vault, ...): an extent at a time, kept in the local file
//! ```
//!
//! A page is read from its sources once; from then on it is in the local file, and so is what the guest writes to memory that
//! it shares with others. When all pages are there the sources are let go.
//!
//! Invariants: a page that may be missed is either in the local file before the guest runs, or hidden from the guest; a page
//! that the guest needs and that no source has is an error wherever it is read, never zeros. What the guest wrote is never
//! replaced by what a source has.
//!
//! Lock order: a stripe of `reading`, then `placing`.

mod memory;
mod mount;
mod prepare;
mod source;

pub use memory::{LazyMemory, Left, PageError};
pub use mount::{MemoryFile, Mounted, detach};
pub use prepare::{Lazily, prepare};
pub use source::{Give, PageSource, VaultSource};
