//! Connections: accepted up to a limit, each on its own task, ended together.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use vmstrata_api::ChangedBy;

use super::{LAST_WORDS, Places, router};
use crate::host::Host;

/// Connections at one time to the control socket, and as many to the metrics' port; more are closed as soon as they are accepted.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// Time to send a request's header, also for the next one on the same connection.
const HEADER_PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a request's header.
const HEADER_BYTES_MAX: usize = 16 << 10;
/// How long to wait when no more connections can be accepted for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stopped` says so, then lets requests under way finish for a moment.
pub(super) async fn serve(
    host: Arc<Host>,
    places: Places,
    mut stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let graceful = GracefulShutdown::new();
    // Clients of the metrics' port must not keep others from the control socket.
    let [crowd, readers] = ["control", "metrics"].map(|to| Crowd::new(to, &graceful));
    let full = router::full(Arc::clone(&host));
    let metrics = router::metrics(host);
    // Kept until the end: the socket's file goes with it.
    let socket = places.socket;
    let control = socket.as_ref().map(|socket| super::adopt(socket.listener()?)).transpose()?;
    let port = places.metrics.map(TcpListener::from_std).transpose()?;
    tokio::select! {
        () = accept_unix(control, &crowd, &full) => {}
        () = accept_tcp(port, &readers, &metrics) => {}
        _ = stopped.wait_for(|stopped| *stopped) => {}
    }
    drop((crowd, readers));
    if tokio::time::timeout(LAST_WORDS, graceful.shutdown()).await.is_err() {
        tracing::debug!("control connections are cut off");
    }
    Ok(())
}

async fn accept_unix(listener: Option<UnixListener>, crowd: &Crowd<'_>, router: &Router) {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let peer = stream.peer_cred().map(|peer| (peer.uid(), peer.pid()));
                let (uid, pid) = peer.unwrap_or((u32::MAX, None));
                crowd.admit(stream, &router.clone().layer(Extension(ChangedBy::Client { uid, pid })));
            }
            Err(error) => refused(&error).await,
        }
    }
}

async fn accept_tcp(listener: Option<TcpListener>, crowd: &Crowd<'_>, router: &Router) {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => crowd.admit(stream, router),
            Err(error) => refused(&error).await,
        }
    }
}

async fn refused(error: &io::Error) {
    tracing::warn!("cannot accept a connection to the control socket: {error}");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// The connections of one kind that are open.
struct Crowd<'a> {
    to: &'static str,
    places: Arc<Semaphore>,
    graceful: &'a GracefulShutdown,
}

impl<'a> Crowd<'a> {
    fn new(to: &'static str, graceful: &'a GracefulShutdown) -> Self {
        Self { to, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)), graceful }
    }

    fn admit(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, router: &Router) {
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => drop(tokio::spawn(converse(stream, router.clone(), place, self.graceful.watcher()))),
            Err(_) => {
                tracing::warn!(limit = CONNECTIONS_MAX, "too many {} connections: one is refused", self.to)
            }
        }
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    place: OwnedSemaphorePermit,
    watcher: Watcher,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_PATIENCE)
        .max_header_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!("control connection ended: {error}");
    }
    drop(place);
}
