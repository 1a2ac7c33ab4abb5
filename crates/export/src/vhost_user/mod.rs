//! The vhost-user-blk export: a disk for virtual machines, through rings in their own memory.
//!
//! ```text
//!  frontend (QEMU, cloud-hypervisor, ...)            one server, one disk
//!  ┌───────────────┐  messages, descriptors   ┌──────────────────────────────────────────┐
//!  │ control       │ ───── unix socket ─────► │ control thread: Backend ── Vring          │
//!  │               │                          │      │ start, stop                        │
//!  │ guest memory  │ ◄──── shared, mmap ────► │ I/O threads: Worker ── Queue ── Ring      │
//!  │ rings         │ ◄── kick, call events ─► │      │            IoQueue ──► disk         │
//!  └───────────────┘                          └──────────────────────────────────────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `backend`, `vring` | the protocol's messages, and what they say about each queue |
//! | `back_channel` | telling the frontend that the disk has another size |
//! | `worker`, `queue`, `poller` | an I/O thread: its queues, and when it looks and when it sleeps |
//! | `ring` | the split virtqueue |
//! | `request`, `config` | what requests mean, and what the device says about itself |
//! | `memory`, `inflight`, `dirty` | the memory that the frontend shares, and what is noted in it |
//! | `shared_file`, `guarded` | which files that may be, and what happens when the frontend takes the memory away |
//!
//! One frontend at a time is served on a socket; when it goes, whatever it had in flight is finished and the
//! socket is open for the next. A frontend may be hostile: it can stop its own queues, nothing else.
//!
//! The guest's memory must be shared with the server (QEMU: `memory-backend-memfd` or
//! `memory-backend-file` on tmpfs or hugetlbfs, `share=on`).

mod back_channel;
mod backend;
mod config;
mod dirty;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guarded;
mod inflight;
mod listener;
mod memory;
mod notify;
mod poller;
mod queue;
mod request;
mod ring;
mod server;
mod shared_file;
mod stats;
mod vring;
mod worker;

use std::path::PathBuf;

pub use server::{Options, Server};
pub use stats::Stats;

/// Why a disk cannot be served, or no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Someone answers on the socket already.
    #[error("{path} is in use: another server answers there")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// There is something at the path that is not a socket.
    #[error("{path} exists and is not a socket: remove it or choose another path")]
    NotASocket {
        /// What was to become the socket.
        path: PathBuf,
    },
    /// The socket cannot be made.
    #[error("cannot listen on {path}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// An option is out of range.
    #[error("{name} must be {allowed}, not {value}")]
    Option {
        /// The field of [`Options`].
        name: &'static str,
        /// What it may be.
        allowed: &'static str,
        /// What it is.
        value: u64,
    },
    /// A thread, or what it needs, cannot be made.
    #[error("cannot start a thread of the server")]
    Thread(#[source] std::io::Error),
    /// The engine refused.
    #[error(transparent)]
    Disk(#[from] vmstrata_disk::Error),
}
