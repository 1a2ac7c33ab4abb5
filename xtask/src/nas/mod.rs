//! A NAS and hosts on one machine: a real NFS server, reached over 1 Gbit/s and with a delay of choice.
//!
//! ```text
//!   server (nfs-ganesha) ◄── proxy (delay) ◄── network (veth, 1 Gbit/s) ◄── a host: tiered disk ─► nfs (a repository) ─► link
//!                                                                    ◄── a host: stock QEMU, by libnfs
//!   object store ◄── proxy ◄── network ◄── a host: vmstrata serve
//! ```
//!
//! The kernel of the machines that tests run on may have no NFS client. So a host's repository speaks NFSv3 itself ([`NfsRepository`]),
//! and the host is a process of this program ([`host`]), which serves a tiered disk on it as `vmstrata serve` does on a mounted directory.

pub mod host;
mod link;
mod mount;
mod network;
mod nfs;
mod object_store;
mod proxy;
mod server;

pub use mount::Mount;
pub use network::{Network, WIRE_BYTES_PER_S};
pub use nfs::NfsRepository;
pub use object_store::{ObjectStore, StoreKind};
pub use server::{Nas, check};
