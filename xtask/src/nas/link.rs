//! Connections to an NFSv3 server, each for one call at a time. A call takes the one that was used last, as a mount has its connection already.

use std::fmt;
use std::future::Future;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use nfs3_client::io::{AsyncRead, AsyncWrite};
use nfs3_client::nfs3_types::mount::dirpath;
use nfs3_client::nfs3_types::nfs3::{Nfs3Result, nfs_fh3, nfsstat3};
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::{MountClient, Nfs3Client, RpcError};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Where the server listens.
pub(super) const NFS_PORT: u16 = 2049;
pub(super) const MOUNT_PORT: u16 = 20_048;
/// Calls at a time, each with a thread: as many as Linux has on its way to a server at the least.
pub(super) const CALLS: usize = 128;
/// How long an answer may take. What is called again after that may be done twice: the caller knows which calls allow that.
const PATIENCE: Duration = Duration::from_secs(10);

/// A socket that blocks, to the client a stream that is always ready.
pub(super) struct Wire(TcpStream);

impl AsyncRead for Wire {
    async fn async_read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self.0.read(buf)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => Ok(read),
        }
    }
}

impl AsyncWrite for Wire {
    async fn async_write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }
}

pub(super) type Client = Nfs3Client<Wire>;

/// The value of a future that never waits, as the sockets below it block.
pub(super) fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a socket that blocks is always ready"),
    }
}

type Job = Box<dyn FnOnce(&Connections) + Send>;

/// See the module documentation. Threads are of the network namespace of whoever makes this.
pub(super) struct Link {
    jobs: Sender<Job>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

struct Connections {
    server: IpAddr,
    /// The one that was used last is the last.
    idle: Mutex<Vec<(Client, TcpStream)>>,
}

/// What a call will have answered.
pub(super) struct Answer<T>(mpsc::Receiver<io::Result<T>>);

impl<T> Answer<T> {
    pub(super) fn wait(self) -> io::Result<T> {
        self.0.recv().unwrap_or_else(|_| Err(io::Error::other("the thread of the connection is gone")))
    }
}

impl Link {
    pub(super) fn new(server: IpAddr) -> io::Result<Self> {
        let (jobs, queue) = unbounded();
        let connections = Arc::new(Connections { server, idle: Mutex::default() });
        for _ in 0..CALLS {
            let (queue, connections): (Receiver<Job>, _) = (queue.clone(), Arc::clone(&connections));
            let work = move || queue.iter().for_each(|job| job(&connections));
            thread::Builder::new().name("nfs".to_owned()).spawn(work)?;
        }
        Ok(Self { jobs })
    }

    /// Makes a call as soon as a connection is free.
    pub(super) fn start<T, E, C>(&self, call: C) -> Answer<T>
    where
        T: Send + 'static,
        C: FnOnce(&mut Client) -> Result<Nfs3Result<T, E>, RpcError> + Send + 'static,
    {
        let (tell, told) = mpsc::channel();
        let job: Job = Box::new(move |connections| {
            // Who asked may not wait for it any more.
            let _ = tell.send(connections.call(call));
        });
        self.jobs.send(job).expect("threads live as long as this");
        Answer(told)
    }

    /// Makes a call and waits for its answer.
    pub(super) fn ask<T, E, C>(&self, call: C) -> io::Result<T>
    where
        T: Send + 'static,
        C: FnOnce(&mut Client) -> Result<Nfs3Result<T, E>, RpcError> + Send + 'static,
    {
        self.start(call).wait()
    }
}

impl Connections {
    fn call<T, E>(
        &self,
        call: impl FnOnce(&mut Client) -> Result<Nfs3Result<T, E>, RpcError>,
    ) -> io::Result<T> {
        let idle = self.idle.lock().pop();
        let (mut client, stream) = match idle {
            Some((client, stream)) if is_open(&stream) => (client, stream),
            _ => {
                let Wire(stream) = connect(self.server, NFS_PORT)?;
                let wire = Wire(stream.try_clone()?);
                (Client::new_with_auth(wire, user(), opaque_auth::default()), stream)
            }
        };
        let answer = call(&mut client).map_err(rpc_error)?;
        // After an error an old answer may still come.
        self.idle.lock().push((client, stream));
        match answer {
            Nfs3Result::Ok(value) => Ok(value),
            Nfs3Result::Err((status, _)) => Err(status_error(status)),
        }
    }
}

/// Whether a connection without calls was not closed meanwhile.
fn is_open(stream: &TcpStream) -> bool {
    recv(stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) == Err(Errno::AGAIN)
}

fn connect(server: IpAddr, port: u16) -> io::Result<Wire> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(server, port), PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(Wire(stream))
}

/// The superuser, as a host's server is to its NAS.
fn user() -> opaque_auth<'static> {
    opaque_auth::auth_unix(&auth_unix::default())
}

/// The handle of an exported directory, by the server's mount protocol.
pub(super) fn mount(server: IpAddr, path: &str) -> io::Result<nfs_fh3> {
    let mut client = MountClient::new_with_auth(connect(server, MOUNT_PORT)?, user(), opaque_auth::default());
    let mounted = now(client.mnt(dirpath(Opaque::borrowed(path.as_bytes())))).map_err(io::Error::other)?;
    Ok(nfs_fh3 { data: mounted.fhandle.0 })
}

fn rpc_error(error: RpcError) -> io::Error {
    match error {
        // What a socket's timeout is.
        RpcError::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let told = format!("the server did not answer within {} s", PATIENCE.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, told)
        }
        RpcError::Io(error) => error,
        other => io::Error::other(other),
    }
}

/// Most status numbers of NFSv3 are Linux's error numbers.
fn status_error(status: nfsstat3) -> io::Error {
    let errno = match status {
        nfsstat3::NFS3ERR_NAMETOOLONG => Errno::NAMETOOLONG,
        nfsstat3::NFS3ERR_NOTEMPTY => Errno::NOTEMPTY,
        nfsstat3::NFS3ERR_DQUOT => Errno::DQUOT,
        nfsstat3::NFS3ERR_STALE | nfsstat3::NFS3ERR_BADHANDLE => Errno::STALE,
        nfsstat3::NFS3ERR_NOTSUPP => Errno::OPNOTSUPP,
        status if (status as i32) < nfsstat3::NFS3ERR_REMOTE as i32 => {
            Errno::from_raw_os_error(status as i32)
        }
        status => return io::Error::other(status.to_string()),
    };
    errno.into()
}
