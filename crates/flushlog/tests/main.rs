//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod common;
mod damage;
mod faults;
mod group;
mod power;
