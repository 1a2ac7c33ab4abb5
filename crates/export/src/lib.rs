//! The exports to a disk: vhost-user-blk for virtual machines, NBD and files for everything else.
//!
//! ```text
//!   guest ──► virtqueues ──► vhost_user ──┐
//!   client ──► sockets ────► nbd ─────────┼──► vmstrata_disk::IoQueue, one per I/O thread
//!   program ──► files ─────► fuse ────────┘
//! ```
//!
//! An export turns what its clients ask into ranges of guest bytes and segments of memory, and nothing else:
//! it holds no data of its own and decides nothing about layers. What comes in through an export is hostile
//! until checked; no client can harm another one, or take more memory than its export's limits say.

mod buffer;
mod engine;
pub mod fuse;
pub mod nbd;
mod reach;
mod slab;
mod unix_socket;
pub mod vhost_user;

pub use reach::warn_if_libvirt_is_kept_out;
pub use unix_socket::SocketAccess;
