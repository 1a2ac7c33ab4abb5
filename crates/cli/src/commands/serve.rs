//! `vmstrata serve`: flags in, the ready report out; everything between is the server's.

mod ready;

pub use self::ready::attachments;

use std::process::ExitCode;

use anyhow::Result;
use vmstrata_server::{ControlPlace, Limits, Options, TlsFiles};

use crate::args::{EXIT_USAGE, ServeArgs};

/// Serves until a signal.
///
/// # Errors
/// When a disk or door cannot be opened, or a disk cannot be closed clean.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let options = options(args);
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

fn options(args: &ServeArgs) -> Options {
    let nbd_tls = args
        .nbd_tls_cert
        .clone()
        .zip(args.nbd_tls_key.clone())
        .map(|(certificate, key)| TlsFiles { certificate, key, client_ca: args.nbd_tls_client_ca.clone() });
    Options {
        disks: args.disks.clone(),
        vhost_user: args.vhost_user.clone(),
        nbd: args.nbd.clone(),
        nbd_tls,
        allow_backing: args.backing.allow_backing.clone(),
        limits: Limits {
            metadata_cache_bytes: args.resources.metadata_cache,
            max_open_files: args.resources.max_open_files.map(|files| files as usize),
            workers: args.resources.workers.map(|workers| workers as usize),
        },
        runtime_dir: args.resources.runtime_dir.clone(),
        ready_fd: args.ready_fd,
        control: match &args.control {
            _ if args.no_control => ControlPlace::Off,
            Some(path) => ControlPlace::At(path.clone()),
            None => ControlPlace::IfFree,
        },
        metrics: args.metrics,
    }
}
