//! What lies between hosts and a NAS or an object store: forwards connections, and delays both directions.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::link::{MOUNT_PORT, NFS_PORT};
use super::network::{NAS, Network, S3_PORT};

/// What stock clients ask for the other ports.
const PORTMAP_PORT: u16 = 111;
/// Bytes forwarded at once, and how often that is on its way: more than the wire takes in 20 ms.
const PIECE: usize = 64 << 10;
const ON_THE_WAY: usize = 256;

/// A proxy for all hosts of a network, until the process ends.
#[derive(Clone, Debug)]
pub(super) struct Proxy {
    /// In microseconds, each way.
    delay_us: Arc<AtomicU64>,
}

impl Proxy {
    /// Forwards from now on.
    ///
    /// # Errors
    /// When a port cannot be had.
    pub(super) fn start(network: &Network) -> Result<Self> {
        let proxy = Self { delay_us: Arc::default() };
        thread::scope(|scope| {
            // Sockets and threads are of the namespace in which they are made.
            let start = || -> Result<()> {
                network.enter("wire")?;
                for port in [PORTMAP_PORT, NFS_PORT, MOUNT_PORT, S3_PORT] {
                    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
                    let proxy = proxy.clone();
                    thread::Builder::new()
                        .name("proxy".to_owned())
                        .spawn(move || proxy.listen(&listener, port))?;
                }
                Ok(())
            };
            scope.spawn(start).join().expect("does not panic")
        })?;
        Ok(proxy)
    }

    /// Sets the time that a request and its answer take together.
    pub(super) fn set_round_trip(&self, time: Duration) {
        self.delay_us.store(time.as_micros() as u64 / 2, Ordering::Relaxed);
    }

    fn listen(&self, listener: &TcpListener, port: u16) {
        for client in listener.incoming() {
            // A client whose connection fails finds out by itself.
            let _ = client.and_then(|client| self.forward(client, port));
        }
    }

    fn forward(&self, client: TcpStream, port: u16) -> io::Result<()> {
        let server = TcpStream::connect(SocketAddr::from((NAS, port)))?;
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
        }
        self.pump(client.try_clone()?, server.try_clone()?)?;
        self.pump(server, client)
    }

    /// Has two threads carry what comes from one to the other.
    fn pump(&self, mut from: TcpStream, mut to: TcpStream) -> io::Result<()> {
        let (put, take): (SyncSender<(Instant, Vec<u8>)>, Receiver<_>) = sync_channel(ON_THE_WAY);
        let delay_us = Arc::clone(&self.delay_us);
        let receive = move || {
            let mut piece = vec![0; PIECE];
            while let Ok(len @ 1..) = from.read(&mut piece) {
                let due = Instant::now() + Duration::from_micros(delay_us.load(Ordering::Relaxed));
                if put.send((due, piece[..len].to_vec())).is_err() {
                    break;
                }
            }
        };
        let send = move || {
            for (due, piece) in take {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&piece).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        };
        thread::Builder::new().name("proxy".to_owned()).spawn(receive)?;
        thread::Builder::new().name("proxy".to_owned()).spawn(send)?;
        Ok(())
    }
}
