//! Bringing a guest back: its memory into files, its devices into a QEMU that waits for them.
//!
//! ```text
//!   command line of QEMU ──► restart: files, -incoming, a monitor ──► QEMU, which waits ──► ready ──► resume: devices ─ cont
//!   Snapshot (vault) ──► fill: pages, hidden losses ──► files of the memory ────────────────────────────┘
//! ```

mod clears;
mod command;
mod error;
mod incoming;
pub mod lazy;
mod memory;
mod options;

pub use command::{BackendFile, CommandError, restart};
pub use error::RestoreError;
pub use incoming::{Incoming, ready, resume};
pub use memory::{Filled, fill};
pub use options::{Pair, edit};
