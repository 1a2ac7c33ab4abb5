//! One server from start to end.

use std::sync::Arc;

use vmstrata_api::ServerStatus;
use vmstrata_store::io_uring_refused;

use crate::control::{Control, Places};
use crate::error::Error;
use crate::host::Host;
use crate::notify;
use crate::options::Options;
use crate::saved::SavedFile;
use crate::shutdown::Shutdown;

/// Serves until a signal.
///
/// `on_ready` is called once, when every disk and export is open, before readiness is announced.
///
/// # Errors
/// When a disk or export cannot be opened, or a disk cannot be closed clean.
pub fn run(options: &Options, on_ready: impl FnOnce(&ServerStatus)) -> Result<(), Error> {
    let mut shutdown =
        Shutdown::new().map_err(|source| Error::System { action: "take over the signals", source })?;
    if let Some(error) = io_uring_refused() {
        tracing::warn!(%error, "the host does not let this process use io_uring: threads carry requests out, which is slower; allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile, or set kernel.io_uring_disabled=0");
    }
    let runtime_dir = options.runtime_dir()?;
    let places = Places::take(options, &runtime_dir)?;
    let saved = places.control().map(|control| SavedFile::new(&runtime_dir, &control));
    let host = Host::new(options, runtime_dir)?;
    let control = Control::start(&host, places)?;
    let served = host.open_wanted(options, saved).and_then(|()| {
        host.keep_unflushed();
        control.look_after(&host);
        serve(options, &host, &mut shutdown, on_ready)
    });
    // The control thread answers to the last that the server is ending, and what is still open.
    let closed = host.close();
    drop(control);
    served.and(closed)?;
    tracing::info!("ended clean");
    Ok(())
}

fn serve(
    options: &Options,
    host: &Arc<Host>,
    shutdown: &mut Shutdown,
    on_ready: impl FnOnce(&ServerStatus),
) -> Result<(), Error> {
    host.thaw_what_is_left();
    let status = host.status();
    on_ready(&status);
    let count = status.disks.len();
    let noun = if count == 1 { "disk" } else { "disks" };
    let waiting = status.disks.iter().filter(|disk| disk.open_error.is_some()).count();
    let but = if waiting > 0 { format!(", {waiting} of them not open") } else { String::new() };
    notify::ready(options.ready_fd, &format!("{count} {noun}{but}"))?;
    let signal = shutdown.wait();
    tracing::info!("{signal}: finishing what is in flight; a second signal ends at once");
    notify::stopping();
    Ok(())
}
