//! The control socket: taken by one server at a time, for its owner alone.

use std::fs::{File, OpenOptions, remove_file, symlink_metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

use crate::error::{Error, SocketFault};
use crate::spec::SOCKET_PATH_BYTES_MAX;

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;

/// A listening control socket; its file is removed when this is dropped, unless the service manager made it.
///
/// Invariant: the server with a socket at a path holds the lock on the file beside it, so that of two servers starting at
/// once neither removes the other's socket as stale. The lock ends with the process, however that ends.
#[derive(Debug)]
pub(super) struct ControlSocket {
    listener: UnixListener,
    own: Option<(PathBuf, File)>,
}

impl ControlSocket {
    /// The first unix socket that the service manager passed (sd_listen_fds(3)), if it passed one.
    pub(super) fn from_manager() -> Option<Self> {
        let mut passed = listenfd::ListenFd::from_env();
        let listener = (0..passed.len()).find_map(|at| passed.take_unix_listener(at).ok().flatten())?;
        if let Err(error) = listener.set_nonblocking(true) {
            tracing::warn!("the service manager's socket cannot be used: {error}");
            return None;
        }
        tracing::info!("controlled through the service manager's socket");
        Some(Self { listener, own: None })
    }

    /// Listens at `path`, in place of a socket that a dead server left.
    ///
    /// # Errors
    /// When a server has the path, when there is something else, or when the system refuses.
    pub(super) fn bind(path: &Path) -> Result<Self, Error> {
        let taken = take(path).map_err(|fault| Error::Control { path: path.to_owned(), fault })?;
        tracing::info!(path = %path.display(), "controlled here");
        Ok(taken)
    }

    /// Where it is.
    pub(super) fn path(&self) -> Option<PathBuf> {
        self.listener.local_addr().ok()?.as_pathname().map(Path::to_owned)
    }

    pub(super) fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if let Some((path, _lock)) = &self.own {
            let _ = remove_file(path);
        }
    }
}

/// Whether someone listens at `path` who is no server that made it: a service manager, which starts its own server for whoever
/// connects.
pub fn is_managers(path: &Path) -> bool {
    match File::open(lock_path(path)).map(|lock| flock(&lock, FlockOperation::NonBlockingLockShared)) {
        Ok(Err(_)) => false,
        Ok(Ok(())) => UnixStream::connect(path).is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound && UnixStream::connect(path).is_ok(),
    }
}

fn take(path: &Path) -> Result<ControlSocket, SocketFault> {
    if path.as_os_str().as_bytes().len() > SOCKET_PATH_BYTES_MAX {
        return Err(SocketFault::TooLong);
    }
    let lock = lock_beside(path)?.ok_or_else(|| SocketFault::InUse { pid: listener_of(path) })?;
    remove_stale(path)?;
    let listener = listen_at(path).map_err(|errno| SocketFault::Listen(errno.into()))?;
    Ok(ControlSocket { listener, own: Some((path.to_owned(), lock)) })
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// The process that listens at `path`.
fn listener_of(path: &Path) -> Option<i32> {
    let stream = UnixStream::connect(path).ok()?;
    Some(socket_peercred(&stream).ok()?.pid.as_raw_pid())
}

/// The lock of the server that has the socket; `None` if another process has it.
fn lock_beside(path: &Path) -> Result<Option<File>, SocketFault> {
    let options = &mut OpenOptions::new();
    let opened = options.create(true).truncate(false).write(true).mode(0o600).open(lock_path(path));
    let file = opened.map_err(SocketFault::Listen)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(SocketFault::Listen(errno.into())),
    }
}

/// Removes a socket without a listener. One with a listener belongs to a service manager.
fn remove_stale(path: &Path) -> Result<(), SocketFault> {
    match symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(found) if !found.file_type().is_socket() => Err(SocketFault::NotASocket),
        Ok(_) if UnixStream::connect(path).is_ok() => Err(SocketFault::InUse { pid: listener_of(path) }),
        Ok(_) => remove_file(path).map_err(SocketFault::Listen),
    }
}

fn listen_at(path: &Path) -> rustix::io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the file the mode of its socket: there is no moment at which others could connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn fault(path: &Path) -> SocketFault {
        match ControlSocket::bind(path) {
            Err(Error::Control { fault, .. }) => fault,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_server_has_the_socket_and_its_owner_alone_may_connect() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let first = ControlSocket::bind(&path).unwrap();
        assert!(!is_managers(&path));
        let mode = symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(fault(&path), SocketFault::InUse { pid: Some(pid) } if pid == own));
        UnixStream::connect(&path).unwrap();
        drop(first);
        assert!(!path.exists());
        ControlSocket::bind(&path).unwrap();
    }

    #[test]
    fn the_socket_of_a_dead_server_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard listener leaves its file");
        let taken = ControlSocket::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(taken);
    }

    #[test]
    fn what_is_no_socket_of_ours_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(fault(&path), SocketFault::NotASocket));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
        let managed = dir.path().join("managed.sock");
        let _manager = UnixListener::bind(&managed).unwrap();
        assert!(matches!(fault(&managed), SocketFault::InUse { .. }));
        assert!(is_managers(&managed) && !is_managers(&path) && !is_managers(&dir.path().join("none")));
        assert!(matches!(fault(&dir.path().join("s".repeat(108))), SocketFault::TooLong));
    }
}
