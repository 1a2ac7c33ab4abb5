//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod broken;
mod common;
mod golden;
mod new_image;
mod properties;
mod stock_tables;
