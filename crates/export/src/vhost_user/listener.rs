//! The socket a frontend connects to.

use std::fs::{metadata, remove_file};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::Error;
use crate::unix_socket::{SocketAccess, listen_at};

/// A listening socket, removed when dropped.
#[derive(Debug)]
pub(super) struct SocketFile {
    listener: UnixListener,
    path: PathBuf,
    is_closed: AtomicBool,
}

impl SocketFile {
    /// Listens at `path`, in place of a socket without a listener, and lets in whom `access` names.
    ///
    /// # Errors
    /// When another process listens there, when there is something else, or when the system refuses.
    pub(super) fn bind(path: &Path, access: &SocketAccess) -> Result<Self, Error> {
        remove_stale(path)?;
        let failed = |source| Error::Listen { path: path.to_owned(), source };
        let listener = listen_at(path, access).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned(), is_closed: AtomicBool::new(false) })
    }

    /// The next connection, if one waits.
    pub(super) fn accept(&self) -> Option<UnixStream> {
        match self.listener.accept() {
            Ok((stream, _)) => Some(stream),
            Err(error) => {
                if error.kind() != ErrorKind::WouldBlock {
                    tracing::warn!(path = %self.path.display(), %error, "cannot accept a connection");
                }
                None
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the socket: from now on the path may be another's.
    pub(super) fn close(&self) {
        if !self.is_closed.swap(true, Ordering::AcqRel) {
            let _ = remove_file(&self.path);
        }
    }
}

impl AsFd for SocketFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.close();
    }
}

/// Removes a socket that a killed server left behind.
fn remove_stale(path: &Path) -> Result<(), Error> {
    let Ok(found) = metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(Error::NotASocket { path: path.to_owned() });
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            remove_file(path).map_err(|source| Error::Listen { path: path.to_owned(), source })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        _ => Err(Error::InUse { path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn bind(path: &Path) -> Result<SocketFile, Error> {
        SocketFile::bind(path, &SocketAccess::default())
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard listener leaves its file");
        let first = bind(&path).unwrap();
        assert_eq!(metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(bind(&path), Err(Error::InUse { .. })));
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(bind(&path), Err(Error::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }
}
