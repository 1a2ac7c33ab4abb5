//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

#[path = "../../disk/tests/common/mod.rs"]
mod common;
mod flat;
mod flat_back;
mod follow;
mod moving;
