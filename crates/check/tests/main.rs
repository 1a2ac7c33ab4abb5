//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod broken;
mod crash;
mod fuzz;
mod hostile;
mod options;
mod stock;
mod support;
