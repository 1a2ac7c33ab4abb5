//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod chain;
#[path = "../../disk/tests/common/mod.rs"]
mod common;
mod convert;
mod diff_model;
mod faults;
mod states;
