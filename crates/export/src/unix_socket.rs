//! Unix sockets to listen on, with the permissions that they shall have from the first moment on.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::umask;
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Who may connect unless something else is asked for: the owner. Whoever connects can read and write the disk.
pub(crate) const OWNER_ONLY: u32 = 0o600;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Listens at `path`, where there must be nothing, with these permissions; accepts without waiting.
///
/// Linux gives the file the mode of its socket, less the umask. A change by path after that would leave a moment with other
/// permissions, and could meet another file. Where a thread may have no umask of its own (in some containers), the permissions are
/// what the umask leaves of those asked for.
///
/// # Errors
/// Whatever the system reports.
pub(crate) fn listen_at(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::from_raw_mode(mode))?;
    let address = SocketAddrUnix::new(path)?;
    let bound = std::thread::scope(|scope| {
        // The umask belongs to the process, unless a thread has its own.
        let bind = || {
            // SAFETY: descriptors stay shared; the thread gets a copy of the umask and of the directories it is in.
            match unsafe { unshare_unsafe(UnshareFlags::FS) } {
                Ok(()) => drop(umask(Mode::empty())),
                Err(errno) => tracing::debug!(%errno, "the umask applies to sockets"),
            }
            bind(&socket, &address)
        };
        scope.spawn(bind).join().expect("it does not panic")
    });
    bound?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// The umask is what it is here: that of a process cannot be changed under other tests.
    #[test]
    fn a_socket_has_the_mode_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [0o600, 0o660, 0o666] {
            let path = dir.path().join(mode.to_string());
            let listener = listen_at(&path, mode).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            UnixStream::connect(&path).unwrap();
            listener.accept().unwrap();
        }
    }

    #[test]
    fn what_is_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert_eq!(listen_at(&path, 0o666).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
