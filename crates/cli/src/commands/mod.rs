//! One module per command; each has `run(&Args) -> Result<ExitCode>`.

pub mod backup;
pub mod base;
pub mod check;
pub mod completions;
pub mod convert;
pub mod create;
pub mod diff;
pub mod disk;
pub mod export;
pub mod gc;
pub mod index;
pub mod info;
pub mod job;
pub mod map;
pub mod merge;
pub mod mount;
pub mod moving;
pub mod named;
pub mod rebase;
pub mod recover;
pub mod replica;
pub mod resize;
pub mod restore;
pub mod serve;
pub mod snapshot;
pub mod states;
pub mod status;
pub mod survey;
pub mod taken;
pub mod tier;
pub mod tiered;
pub mod top;
pub mod vm;

/// This program's file, to start it once more: also when another version was installed over the path it was started from.
pub const OWN_PROGRAM: &str = "/proc/self/exe";
