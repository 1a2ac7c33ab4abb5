//! Where clients connect: unix sockets and TCP.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::net::{SocketFlags, acceptfrom_with, sockopt};

use super::Error;
use super::limits::SOCKET_BUFFER;
use crate::unix_socket::{SocketAccess, listen_at};

/// The port IANA has reserved for NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Where a server listens. Written `unix:PATH` or `tcp:HOST[:PORT]`; an IPv6 host stands in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A socket in the file system; who may connect is a matter of its permissions.
    Unix(PathBuf),
    /// A TCP port; port 0 takes any free one.
    Tcp {
        /// Name or address of the interface.
        host: String,
        /// The port.
        port: u16,
    },
}

impl Address {
    /// Whether other hosts may reach it, as far as its name tells.
    pub fn is_reached_from_elsewhere(&self) -> bool {
        let Self::Tcp { host, .. } = self else { return false };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        bare != "localhost" && !bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let fail = || Error::Address { text: text.to_owned() };
        if text.contains('\0') {
            return Err(fail());
        }
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        let rest = text.strip_prefix("tcp:").ok_or_else(fail)?;
        let (host, port) = match rest.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
            Some((host, port)) => (host, port),
            None => rest.split_at(rest.find(':').unwrap_or(rest.len())),
        };
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| fail())?,
            None if port.is_empty() => DEFAULT_PORT,
            None => return Err(fail()),
        };
        if host.is_empty() { Err(fail()) } else { Ok(Self::Tcp { host: host.to_owned(), port }) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

/// A bound socket that clients can connect to. A unix socket's file is removed with the listener.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    address: Address,
    /// Device and inode of the socket's file, so that a successor's file is never removed.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// Binds and listens. A socket file that a dead server left behind is replaced; the new one is its owner's alone.
    ///
    /// # Errors
    /// [`Error::Bind`], for example when another server listens there.
    pub fn bind(address: &Address) -> Result<Self, Error> {
        Self::bind_for(address, &SocketAccess::default())
    }

    /// As [`Listener::bind`]; who may connect to a unix socket is what `access` says, whatever the umask.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_for(address: &Address, access: &SocketAccess) -> Result<Self, Error> {
        Self::try_bind(address, access).map_err(|source| Error::Bind { address: address.to_string(), source })
    }

    fn try_bind(address: &Address, access: &SocketAccess) -> io::Result<Self> {
        match address {
            Address::Unix(path) => {
                remove_stale(path)?;
                let listener = listen_at(path, access)?;
                let file = identity(path).ok();
                Ok(Self { socket: listener.into(), address: address.clone(), file })
            }
            Address::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port))?;
                listener.set_nonblocking(true)?;
                let port = listener.local_addr()?.port();
                let address = Address::Tcp { host: host.clone(), port };
                Ok(Self { socket: listener.into(), address, file: None })
            }
        }
    }

    /// Where clients connect, with the port that was taken.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection, non-blocking, and where it comes from if that is another host, or this one over TCP; `None` when
    /// none is waiting.
    pub(crate) fn accept(&self) -> io::Result<Option<(OwnedFd, Option<IpAddr>)>> {
        use rustix::io::Errno;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, from) = match acceptfrom_with(&self.socket, flags) {
            Ok((socket, from)) => (socket, from.and_then(|from| SocketAddr::try_from(from).ok())),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        match self.address {
            Address::Tcp { .. } => {
                // Replies are complete messages already; a dead peer must not hold its connection for ever.
                sockopt::set_tcp_nodelay(&socket, true)?;
                sockopt::set_socket_keepalive(&socket, true)?;
            }
            Address::Unix(_) => enlarge_buffer(&socket),
        }
        Ok(Some((socket, from.map(|from| from.ip().to_canonical()))))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (Address::Unix(path), Some(file)) = (&self.address, self.file)
            && identity(path).is_ok_and(|now| now == file)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Lets a socket take more at a time, as far as the system allows it.
fn enlarge_buffer(socket: &OwnedFd) {
    let forced = sockopt::set_socket_send_buffer_size_force(socket, SOCKET_BUFFER);
    if forced.is_err() {
        // Without the privilege, up to the system's limit; without that, slower.
        let _ = sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER);
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Removes a socket file without a listener; any other file stays, and makes binding fail.
fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let is_refused =
        || UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if is_socket && is_refused() { std::fs::remove_file(path) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn addresses_are_read_and_shown_alike() {
        for (text, shown) in [
            ("unix:/run/nbd.sock", "unix:/run/nbd.sock"),
            ("tcp:localhost", "tcp:localhost:10809"),
            ("tcp:[::1]:7", "tcp:[::1]:7"),
            ("tcp:[::]", "tcp:[::]:10809"),
            ("tcp:0.0.0.0:0", "tcp:0.0.0.0:0"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), shown);
        }
        let is_open = |text: &str| text.parse::<Address>().unwrap().is_reached_from_elsewhere();
        assert!(["tcp:[::]", "tcp:0.0.0.0:0", "tcp:host"].into_iter().all(is_open));
        assert!(!["unix:/a", "tcp:localhost", "tcp:[::1]:7", "tcp:127.0.0.2:1"].into_iter().any(is_open));
        for text in ["", "unix:", "tcp:", "tcp::1", "tcp:h:x", "tcp:h:70000", "tcp:[::1]7", "/run/nbd.sock"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::Unix(directory.path().join("s"));
        let first = Listener::bind(&address).unwrap();
        assert!(matches!(Listener::bind(&address), Err(Error::Bind { .. })), "two servers on one socket");
        // What a killed server leaves: the file, without a listener.
        drop(UnixListener::bind(directory.path().join("stale")).unwrap());
        Listener::bind(&Address::Unix(directory.path().join("stale"))).unwrap();
        drop(first);
        assert!(!directory.path().join("s").exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        std::fs::write(&path, "precious").unwrap();
        assert!(Listener::bind(&Address::Unix(path.clone())).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn port_zero_is_replaced_by_the_port_taken() {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(matches!(listener.address(), Address::Tcp { port: 1.., .. }));
        assert!(listener.accept().unwrap().is_none());
    }
}
