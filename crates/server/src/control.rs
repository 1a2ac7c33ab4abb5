//! The control thread: HTTP on a unix socket, beside the data path and never on it.
//!
//! ```text
//!   socket ──► listen: connections, bounded ──► router ──► routes ──► Host
//!                                                 │          └─ what may wait runs on threads of its own
//!                                                 └─ problem: every error as RFC 9457 has it
//! ```
//!
//! **Adding a route**: write its types into `vmstrata-api`, its handler with `#[utoipa::path]` into a module of
//! `routes`, and name it in `router`. The OpenAPI document follows by itself; `VMSTRATA_BLESS=1 cargo test -p
//! vmstrata-server openapi` writes the committed copy anew.
//!
//! Who may connect is a matter of the socket's permissions (0600): a client that controls the server can read and write
//! its disks. Still, what is sent is bounded: connections, time for a header, bytes and time for a body.

mod body;
mod listen;
mod problem;
mod router;
mod routes;
mod socket;

use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

pub use self::router::openapi;
use self::socket::ControlSocket;
pub use self::socket::is_managers;
use crate::error::{Error, SocketFault};
use crate::host::Host;
use crate::options::{ControlPlace, Options};

/// Threads for changes under way: opening and closing disks. More wait.
const CHANGES_MAX: usize = 32;
/// Threads that look after the host beside them: what waits, and snapshots that no rule keeps.
const LOOKS: usize = 2;
/// How long requests under way may take when the server ends.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The running control thread. Dropping it ends it, and removes its socket.
#[derive(Debug)]
pub(crate) struct Control {
    stop: watch::Sender<bool>,
    runtime: tokio::runtime::Handle,
    thread: Option<JoinHandle<()>>,
}

/// Where the control thread listens.
#[derive(Debug)]
pub(crate) struct Places {
    socket: Option<ControlSocket>,
    metrics: Option<TcpListener>,
}

impl Places {
    /// The path of the control socket, if there is one.
    pub(crate) fn control(&self) -> Option<PathBuf> {
        self.socket.as_ref().and_then(ControlSocket::path)
    }

    /// Takes the control socket and the port for metrics, before any disk is opened: a second server on the same
    /// socket must fail before it touches anything.
    ///
    /// # Errors
    /// A place that cannot be had.
    pub(crate) fn take(options: &Options, runtime_dir: &Path) -> Result<Self, Error> {
        let bind = |address| {
            let bound = TcpListener::bind(address);
            let ready = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
            ready.map_err(|source| Error::Metrics { address, source })
        };
        let socket = take_socket(&options.control, runtime_dir, options.control_patience)?;
        Ok(Self { socket, metrics: options.metrics.map(bind).transpose()? })
    }
}

fn take_socket(
    place: &ControlPlace,
    runtime_dir: &Path,
    patience: Duration,
) -> Result<Option<ControlSocket>, Error> {
    let path = match place {
        ControlPlace::Off => return Ok(None),
        ControlPlace::At(path) => path,
        ControlPlace::InRuntimeDir => &runtime_dir.join(vmstrata_api::CONTROL_SOCKET),
    };
    match ControlSocket::from_manager() {
        Some(activated) => Ok(Some(activated)),
        None => bind_within(path, patience).map(Some),
    }
}

/// Waits for a server that is ending.
fn bind_within(path: &Path, patience: Duration) -> Result<ControlSocket, Error> {
    let deadline = Instant::now() + patience;
    loop {
        match ControlSocket::bind(path) {
            Err(Error::Control { fault: SocketFault::InUse { .. }, .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            result => return result,
        }
    }
}

impl Control {
    /// Answers for `host` from now on.
    ///
    /// # Errors
    /// A host that is out of threads or descriptors.
    pub(crate) fn start(host: &Arc<Host>, places: Places) -> Result<Self, Error> {
        let failed = |source| Error::System { action: "start the control thread", source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(CHANGES_MAX + LOOKS)
            .thread_name("control-change")
            .build()
            .map_err(failed)?;
        let (stop, stopped) = watch::channel(false);
        let handle = runtime.handle().clone();
        let host = Arc::clone(host);
        let serve = move || {
            let served = runtime.block_on(listen::serve(host, places, stopped));
            if let Err(error) = served {
                tracing::error!("the control socket is lost: {error}");
            }
            runtime.shutdown_timeout(LAST_WORDS);
        };
        let thread = std::thread::Builder::new().name("control".into()).spawn(serve).map_err(failed)?;
        Ok(Self { stop, runtime: handle, thread: Some(thread) })
    }

    /// Opens what waits, and deletes snapshots that no rule keeps, from now on.
    pub(crate) fn look_after(&self, host: &Arc<Host>) {
        self.runtime.spawn(Arc::clone(host).reconcile());
        self.runtime.spawn(Arc::clone(host).retain());
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the control thread panicked");
        }
    }
}

/// The runtime's form of what was bound before it ran.
fn adopt(socket: std::os::unix::net::UnixListener) -> io::Result<tokio::net::UnixListener> {
    tokio::net::UnixListener::from_std(socket)
}
