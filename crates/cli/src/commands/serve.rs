//! `vmstrata serve`: flags in, the ready report out; everything between is the server's.

mod ready;

pub use self::ready::attachments;

use std::process::ExitCode;

use anyhow::Result;
use vmstrata_server::Options;
use vmstrata_server::config::Settings;

use crate::args::{EXIT_USAGE, ServeArgs};

/// Serves until a signal.
///
/// # Errors
/// When the configuration, a disk or a door cannot be used, or a disk cannot be closed clean.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let file = args.config.as_deref().map(Settings::read).transpose()?.unwrap_or_default();
    let options = Options { ready_fd: args.ready_fd, ..args.settings().over(file).into_options() };
    if let Err(error) = options.check() {
        eprintln!("vmstrata: error: {error:#}\n\nFor more information, try 'vmstrata serve --help'.");
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    vmstrata_server::run(&options, |status| {
        if let Err(error) = ready::Report::new(status).print(args.json) {
            // Serving is the job; a reader that went away is no reason to refuse it.
            tracing::warn!("cannot print the ready report: {error}");
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
