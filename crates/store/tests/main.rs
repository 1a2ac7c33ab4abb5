//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod common;
mod direct_kill;
mod fault;
mod file;
mod gate;
mod hung_files;
mod lock;
mod refusing_host;
mod ring;
mod view;
