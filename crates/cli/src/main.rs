//! `vmstrata`: makes, shows, checks and serves qcow2 chains.
//!
//! ```text
//!   args ──► commands/{create,info,map,check,survey,serve,completions} ──► disk, survey, server
//!        ├─► commands/vm ──► memory (a running QEMU's, through its monitor)
//!        └─► commands/{status,top,disk,export,job} ──► client ──► a running server's control socket
//!                 └──► output (stdout: results; stderr: logs, progress, errors)
//! ```
//!
//! This crate only translates between a person or a script and the library crates: it holds no knowledge of
//! the format. `anyhow` lives here and nowhere below.

#![allow(
    unreachable_pub,
    reason = "nothing of a program is reachable from outside; pub says what a module offers"
)]

mod args;
mod attach;
mod audit;
mod client;
mod commands;
mod disk_spec;
mod key_values;
mod logging;
mod output;
mod units;

use std::io;
use std::process::ExitCode;

use args::{Cli, Command, EXIT_USAGE};
use vmstrata_server::LogFormat;

fn main() -> ExitCode {
    let cli = match Cli::of_process() {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody is left to be told when the terminal is gone.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    audit::start(cli.audit);
    match run(cli.command) {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmstrata: error: {}", output::visible_lines(&vmstrata_types::told(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn run(mut command: Command) -> anyhow::Result<ExitCode> {
    // A server logs as its configuration file says, which it reads first.
    if !matches!(command, Command::Serve(_)) {
        logging::start(LogFormat::Text, "warn");
    }
    if !matches!(command, Command::Completions(_)) {
        vmstrata_store::proc::check()?;
    }
    commands::named::find_served(&mut command);
    let _readings = commands::tiered::prepare(&mut command)?;
    match command {
        Command::Create(args) => commands::create::run(&args),
        Command::Info(args) => commands::info::run(&args),
        Command::Map(args) => commands::map::run(&args),
        Command::Check(args) => commands::check::run(&args),
        Command::Index(args) => commands::index::run(&args),
        Command::Snapshot(args) => commands::snapshot::run(&args),
        Command::Merge(args) => commands::merge::run(&args),
        Command::Flatten(args) => commands::merge::flatten(&args),
        Command::Rebase(args) => commands::rebase::run(&args),
        Command::Gc(args) => commands::gc::run(&args),
        Command::Resize(args) => commands::resize::run(&args),
        Command::Move(args) => commands::moving::run(&args),
        Command::Drain(args) => commands::moving::drain(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Mount(args) => commands::mount::run(&args),
        Command::Diff(args) => commands::diff::run(&args),
        Command::Backup(args) => commands::backup::run(&args),
        Command::Restore(args) => commands::restore::run(&args),
        Command::Recover(args) => commands::recover::run(&args),
        Command::Survey(args) => commands::survey::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Status(args) => commands::status::run(&args),
        Command::Top(args) => commands::top::run(&args),
        Command::Disk(args) => commands::disk::run(&args),
        Command::Export(args) => commands::export::run(&args),
        Command::Job(args) => commands::job::run(&args),
        Command::Tier(args) => commands::tier::run(&args),
        Command::Base(args) => commands::base::run(&args),
        Command::Replica(args) => commands::replica::run(&args),
        Command::Vm(args) => commands::vm::run(&args),
        Command::Completions(args) => commands::completions::run(&args),
        Command::ThawGuard(args) => commands::serve::thaw_guard(&args),
        Command::MountGuard(args) => commands::mount::guard(&args),
    }
}

/// Whether the reader of stdout, such as `head`, had seen enough.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|io| io.kind() == io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let cause = || io::Error::from(io::ErrorKind::NotFound);
        let told = anyhow::Error::new(cause()).context(format!("cannot open a.qcow2: {}", cause()));
        assert_eq!(vmstrata_types::told(told.as_ref()), "cannot open a.qcow2: entity not found");
        let untold = anyhow::Error::new(cause()).context("cannot open a.qcow2");
        assert_eq!(vmstrata_types::told(untold.as_ref()), "cannot open a.qcow2: entity not found");
    }
}
