//! `vmstrata info`: what an image's header says, and what lies below it.
//!
//! Reads headers only and takes no lock, so that disks in use can be looked at.

mod report;
mod text;

use std::process::ExitCode;

use anyhow::Result;
use vmstrata_disk::{OpenOptions, probe_chain, snapshot};

pub use self::report::Layer;

use crate::args::InfoArgs;
use crate::output::answer;

/// Prints the report.
///
/// # Errors
/// When a header of the chain cannot be read.
pub fn run(args: &InfoArgs) -> Result<ExitCode> {
    let options = OpenOptions {
        read_only: true,
        allow_backing: args.backing.allow_backing.clone(),
        format: args.format,
        ..OpenOptions::default()
    };
    let state = snapshot::resolve(&args.file, &options)?;
    let chain = probe_chain(&state.path, &state.open_options(options))?;
    let report = report::Report::new(&chain, args.chain);
    answer(args.json, &report, || text::render(&report))?;
    Ok(ExitCode::SUCCESS)
}
