//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod attach;
mod cache;
mod cached_disk;
mod clone;
#[path = "../../disk/tests/common/mod.rs"]
mod common;
mod compose;
mod dense;
mod detach;
mod elsewhere;
mod group;
mod replica;
mod standby;
mod takeover;
mod tier_support;
mod tiered;
mod window;
