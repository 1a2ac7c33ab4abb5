//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod bench_base;
mod bench_fragmented;
mod bench_fuse;
mod bench_history;
mod bench_migrate;
mod bench_tier;
mod chain_stock;
mod counting;
mod guest_bench_memory;
mod guest_bench_migrate;
mod guest_boot;
mod guest_memory_blocks;
mod guest_memory_lazy;
mod guest_memory_live;
mod guest_memory_lost;
mod guest_memory_pages;
mod guest_memory_refill;
mod guest_memory_snapshot;
mod guest_memory_tiered;
mod guest_quiesce;
mod guest_reconnect;
mod guest_resize;
mod guest_snapshots;
mod guest_soak;
mod guest_systemd;
mod guest_upgrade;
mod nas_mount;
mod nas_repository;
mod stress;
#[path = "../../crates/repo/tests/suite/mod.rs"]
mod suite;
