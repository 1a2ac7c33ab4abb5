//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod common;
mod deep;
mod documented;
mod history;
mod hostile;
mod page;
mod scale;
mod stock;
