//! Event descriptors: ours, and those a frontend sends for kicks and calls.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};

/// A new event descriptor.
///
/// # Errors
/// When the process has too many descriptors.
pub(super) fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes a descriptor from a frontend non-blocking: a thread that serves several queues must never wait for
/// one of them, whatever the descriptor turns out to be.
///
/// # Errors
/// When the descriptor's flags cannot be changed.
pub(super) fn adopt(fd: OwnedFd) -> io::Result<OwnedFd> {
    let flags = fcntl_getfl(&fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(fd)
}

/// Signals an event. A full counter is a signal nobody has taken yet; a broken descriptor hurts its owner.
#[inline]
pub(super) fn signal(fd: impl AsFd) {
    if let Err(errno) = write(fd, &1u64.to_ne_bytes())
        && errno != Errno::AGAIN
    {
        tracing::debug!(%errno, "cannot signal an event");
    }
}

/// Takes a signalled event; whether the descriptor behaves like an event.
pub(super) fn take(fd: impl AsFd) -> bool {
    let mut count = [0; 8];
    matches!(read(fd, &mut count), Ok(8) | Err(Errno::AGAIN | Errno::INTR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_taken_once_and_never_blocks() {
        let fd = event().unwrap();
        signal(&fd);
        signal(&fd);
        assert!(take(&fd) && take(&fd));
    }

    #[test]
    fn what_is_no_event_is_noticed() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(writer);
        let fd = adopt(reader.into()).unwrap();
        assert!(!take(&fd));
        signal(&fd);
    }
}
