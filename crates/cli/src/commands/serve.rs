//! `vmstrata serve`: flags in, the ready report out; everything between is the server's.

mod ready;

pub use self::ready::attachments;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use vmstrata_api::ServerStatus;
use vmstrata_server::config::Settings;
use vmstrata_server::{ControlPlace, Options};

use crate::args::{ControlArgs, EXIT_USAGE, ServeArgs, ThawGuardArgs};
use crate::client::Client;

/// How long a server that is replaced may take to drain its exports and close its disks.
const REPLACE_PATIENCE: Duration = Duration::from_secs(300);

/// Serves until a signal.
///
/// # Errors
/// When the configuration, a disk or an export cannot be used, or a disk cannot be closed clean.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let file = args.config.as_deref().map(Settings::read).transpose()?.unwrap_or_default();
    let flags = match args.settings() {
        Ok(flags) => flags,
        Err(error) => return Ok(wrong_usage(&error)),
    };
    let settings = flags.over(file);
    crate::logging::start(settings.log_format.unwrap_or_default(), "info");
    let mut options = Options {
        ready_fd: args.ready_fd,
        forget_added: args.forget_added,
        discard_unflushed: args.discard_unflushed,
        guard: Some(PathBuf::from(super::OWN_PROGRAM)),
        ..settings.into_options()
    };
    if let Err(error) = options.check() {
        return Ok(wrong_usage(&error.into()));
    }
    if args.replace {
        ask_to_end(&mut options)?;
    }
    vmstrata_server::run(&options, |status| {
        if let Err(error) = ready::Report::new(status).print(args.json) {
            // Serving is the job; a reader that went away is no reason to refuse it.
            tracing::warn!("cannot print the ready report: {error}");
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Says what is wrong with the command line as clap does.
fn wrong_usage(error: &anyhow::Error) -> ExitCode {
    eprintln!("vmstrata: error: {error:#}\n\nFor more information, try 'vmstrata serve --help'.");
    ExitCode::from(EXIT_USAGE)
}

/// Waits for the end of the server that froze a guest, see [`vmstrata_server::thaw_guard`].
///
/// # Errors
/// When the guest must be thawed, and its agent does not do it.
pub fn thaw_guard(args: &ThawGuardArgs) -> Result<ExitCode> {
    vmstrata_server::thaw_guard(&args.agent, &args.note)?;
    Ok(ExitCode::SUCCESS)
}

/// Asks the server that has the control socket to end; where there is none, this one is the first.
fn ask_to_end(options: &mut Options) -> Result<()> {
    let path = match &options.control {
        ControlPlace::At(path) => path.clone(),
        _ => {
            let dir = options.runtime_dir.clone().unwrap_or_else(vmstrata_server::default_dir);
            dir.join(vmstrata_api::CONTROL_SOCKET)
        }
    };
    anyhow::ensure!(
        !vmstrata_server::is_managers(&path),
        "{}: is the service manager's socket, which starts its own server at the next connection: replace that one with `systemctl restart vmstrata.service`",
        path.display()
    );
    let client = Client::new(&ControlArgs { control: Some(path) })?;
    if client.is_answered() {
        // What this one cannot open the other goes on serving.
        let goes_on = "the server that is to be replaced goes on";
        let status: ServerStatus = client.get("/v1/status").context(goes_on)?;
        vmstrata_server::preflight(options, &status).context(goes_on)?;
        client.tell("/v1/shutdown")?;
        options.control_patience = REPLACE_PATIENCE;
    }
    Ok(())
}
