//! The benchmark: the same chains and the same client for stock QEMU, vmstrata, and the floor.
//!
//! ```text
//!   run ──► session (servers side by side) ──► server (child process) + client (libblkio), fio, nbdcopy
//!    └────► results (samples, medians) ──► targets (paired ratios) ──► tables (shown) and plot (SVG)
//!   fragmented ─► disks whose blocks lie all over a long history
//!   fresh   ──► a disk of one layer, and what its first snapshots cost
//!   convert ─► disks converted, beside `qemu-img convert`
//!   fuse    ─► disks as files on loop devices, beside a raw file
//!   flush   ─► guests that flush often, with a flush log and without
//!   tier    ─► disks whose epochs go to a NAS, beside none and beside QEMU on the NAS
//!   base    ─► guests that boot from one base on a NAS, upgrade, swap and wait
//!   rocksdb ─► a database in a guest, on a long history and on one layer
//!   history ──► the same servers and client, over a thousand snapshots of a live disk
//!   migrate ─► moves that follow their guests: on a modelled disk in virtual time, on real storage, beside a real guest
//!   memory  ──► guests at work, their memory taken and given back, beside full copies and QEMU's migration
//! ```
//!
//! Servers alternate, within a round and within a run, and a ratio is taken from one round: drifts of a shared machine
//! fall out of it.

pub mod base;
mod cached;
pub mod client;
pub mod convert;
mod fleet;
mod floor;
pub mod flush;
pub mod fragmented;
pub mod fresh;
pub mod fuse;
pub mod history;
pub mod load;
pub mod machine;
pub mod memory;
pub mod migrate;
mod mover;
pub mod moving;
pub mod plot;
mod prepared;
pub mod publish;
mod qmp;
pub mod report;
pub mod results;
pub mod rocksdb;
pub mod run;
pub mod server;
pub mod session;
pub mod shown;
pub mod table;
pub mod targets;
pub mod tier;
