//! `vmstrata vm`: snapshots of guests' memory.

mod store;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::{VmArgs, VmCommand};

/// Runs one of the commands.
///
/// # Errors
/// What could not be done.
pub fn run(args: &VmArgs) -> Result<ExitCode> {
    match &args.command {
        VmCommand::Store(command) => store::run(command),
    }
}
