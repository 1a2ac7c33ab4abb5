//! One module per command; each has `run(&Args) -> Result<ExitCode>`.

pub mod check;
pub mod completions;
pub mod create;
pub mod info;
pub mod map;
pub mod serve;
