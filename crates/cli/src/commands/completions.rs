//! `vmstrata completions`: the script a shell needs to complete command lines.

use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::output::print;

/// Prints the script.
///
/// # Errors
/// When stdout does not take it.
pub fn run(args: &CompletionsArgs) -> Result<ExitCode> {
    // Made in memory first: the generator panics when its writer fails, and `| head` is no reason to.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vmstrata", &mut script);
    print(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
