//! Chores of this repository, as a library so that its tests and its binary share them.
//!
//! ```text
//!   tidy    rules about the sources that the compiler does not check
//!   chain   makes qcow2 chains of any length, with data that proves where it came from
//!   bench   runs QEMU, vmstrata and the floor over such chains in turn, and writes what it measured
//!   nas     an NFS server, hosts and the network between them, in namespaces of this machine
//!   guest   a small Linux that boots in stock QEMU in seconds
//!   demo    500 snapshots, stock QEMU and vmstrata side by side
//!   soak    1,000 snapshots under a guest, most of them deleted, the server killed meanwhile
//!   stress  stamped sectors over all exports, through kills, full disks and merges, against a model
//! ```
//!
//! Nothing here ships: the crates under `crates/` never depend on this one. The chain generator writes the
//! format from its specification and not through `vmstrata-qcow2`, so that the generator and the reader are
//! two independent readings of one text.

mod answer;
pub mod bench;
pub mod build;
pub mod chain;
pub mod demo;
pub mod guest;
pub mod nas;
pub mod size;
pub mod soak;
pub mod stress;
pub mod tidy;
