//! Announces that the server serves: systemd through `NOTIFY_SOCKET`, others through `--ready-fd`.
//!
//! The protocol is one datagram of `KEY=value` lines (sd_notify(3)); it needs no library.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::error::Error;

/// Says on `ready_fd`, when given, and to the service manager, when there is one, that the server is ready.
///
/// # Errors
/// When a place that was asked for cannot be written: the process that waits there would wait for ever.
pub(crate) fn ready(ready_fd: Option<u32>, status: &str) -> Result<(), Error> {
    if let Some(fd) = ready_fd {
        write_ready(fd).map_err(|source| Error::ReadyFd { fd, source })?;
    }
    tell_manager(&format!("READY=1\nSTATUS={status}"))
}

/// Says to the service manager, when there is one, that the server has begun to end.
pub(crate) fn stopping() {
    if let Err(error) = tell_manager("STOPPING=1") {
        tracing::warn!("{error}");
    }
}

/// Opening the descriptor's entry under /proc reaches the same pipe without adopting a number as an owned descriptor.
fn write_ready(fd: u32) -> io::Result<()> {
    let mut pipe = OpenOptions::new().append(true).open(format!("/proc/self/fd/{fd}"))?;
    pipe.write_all(b"READY=1\n")
}

fn tell_manager(message: &str) -> Result<(), Error> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(socket) if !socket.is_empty() => {
            send(&socket, message).map_err(|source| Error::Notify { socket: socket.into(), source })
        }
        _ => Ok(()),
    }
}

fn send(socket: &OsStr, message: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut buffer = [0; 256];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    }

    #[test]
    fn a_message_reaches_a_socket_in_the_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), "READY=1").unwrap();
        assert_eq!(received(&socket), "READY=1");
    }

    #[test]
    fn a_message_reaches_an_abstract_socket() {
        let name = format!("vmstrata-notify-test-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(OsStr::new(&format!("@{name}")), "STOPPING=1").unwrap();
        assert_eq!(received(&socket), "STOPPING=1");
    }

    #[test]
    fn a_socket_nobody_reads_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(send(dir.path().join("absent").as_os_str(), "READY=1").is_err());
    }

    #[test]
    fn a_closed_descriptor_is_an_error() {
        assert!(write_ready(987_654).is_err());
    }
}
