//! `vmstrata vm`: snapshots of running guests, and guests started from them.

mod args;
mod disks;
mod guard;
mod kept;
mod migrate;
mod migration;
mod pages;
mod periodic;
mod picture;
mod restore;
mod snapshot;
mod states;
mod store;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use vmstrata_memory::qmp::Qmp;

use crate::args::{VmArgs, VmCommand};

/// How long a command of QEMU's monitor may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs one of the commands.
///
/// # Errors
/// What could not be done.
pub fn run(args: &VmArgs) -> Result<ExitCode> {
    match &args.command {
        VmCommand::Args(args) => args::run(args),
        VmCommand::Snapshot(args) => snapshot::run(args),
        VmCommand::Restore(args) => restore::run(args),
        VmCommand::Migrate(args) => migrate::run(args),
        VmCommand::Pages(args) => pages::run(args),
        VmCommand::Store(command) => store::run(command),
        VmCommand::Guard => Ok(guard::run()),
    }
}

/// The socket of a guest's monitor.
fn monitor(guest: &str, named: Option<&Path>) -> PathBuf {
    named.map_or_else(|| vmstrata_server::default_dir().join(format!("{guest}.qmp")), Path::to_owned)
}

/// Connects to a guest's monitor.
fn connect(guest: &str, socket: &Path) -> Result<Qmp> {
    Qmp::connect(socket, PATIENCE).with_context(|| {
        format!(
            "guest {guest} cannot be reached (see `vmstrata vm args {guest}`, or name its monitor with --qmp)"
        )
    })
}
