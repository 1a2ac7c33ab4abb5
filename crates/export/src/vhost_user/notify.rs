//! Event descriptors: ours, and those a frontend sends for kicks, calls and errors.
//!
//! A frontend shares the open file descriptions of its descriptors with this process, and may change them at any time:
//! clear `O_NONBLOCK`, fill the counter, empty it between a poll and a read. So nothing here relies on them: events are
//! signalled through an [`EventNotifier`] and taken by reads that are told themselves not to wait.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::readlink;
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};
use vmstrata_store::EventNotifier;

/// What `/proc` says of an eventfd. No path of a file looks like this: those begin with a slash.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// A new event descriptor of ours.
///
/// # Errors
/// When the process has too many descriptors.
pub(super) fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Takes a frontend's descriptor for an event.
///
/// # Errors
/// When it is anything else. The kernel knows without asking the file: one of a hostile file system may never answer.
pub(super) fn adopt(fd: OwnedFd) -> io::Result<OwnedFd> {
    let link = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    if link.as_bytes() == EVENTFD {
        return Ok(fd);
    }
    let what = link.to_string_lossy();
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{what} is no eventfd: kicks, calls and errors need one"),
    ))
}

/// Signals an event of ours. A full counter is a signal that was not taken yet.
pub(super) fn signal(fd: impl AsFd) {
    if let Err(errno) = write(fd, &1u64.to_ne_bytes())
        && errno != Errno::AGAIN
    {
        tracing::debug!(%errno, "cannot signal an event");
    }
}

/// Takes a signalled event of ours.
pub(super) fn take(fd: impl AsFd) {
    // Empty unless it was signalled: both are fine.
    let _ = read(fd, &mut [0; 8]);
}

/// Takes a frontend's signalled event, if it is still signalled; whether the descriptor behaves like an event.
pub(super) fn take_theirs(fd: impl AsFd) -> bool {
    let mut count = [0; 8];
    // At the current position: an eventfd has no other.
    let taken = preadv2(fd, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
    matches!(taken, Ok(8) | Err(Errno::AGAIN | Errno::INTR))
}

/// Signals a frontend's event; whether there is one. A failure hurts its owner only.
#[inline]
pub(super) fn call(notifier: &EventNotifier) -> bool {
    notifier.notify().unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot signal a frontend's event");
        true
    })
}

/// Signals an event of a frontend's that is rarely signalled.
pub(super) fn call_once(event: impl AsFd) {
    let called = EventNotifier::new().and_then(|notifier| {
        notifier.set(Some(event.as_fd()))?;
        notifier.notify()
    });
    if let Err(error) = called {
        tracing::debug!(%error, "cannot signal a frontend's event");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_taken_once_and_never_blocks() {
        let fd = adopt(event().unwrap()).unwrap();
        signal(&fd);
        call_once(&fd);
        assert!(take_theirs(&fd) && take_theirs(&fd));
        take(&fd);
    }

    #[test]
    fn an_event_that_blocks_and_is_empty_is_not_waited_for() {
        let fd = adopt(eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap();
        assert!(take_theirs(&fd));
    }

    #[test]
    fn what_is_no_event_is_refused() {
        let (reader, _writer) = io::pipe().unwrap();
        assert!(adopt(reader.into()).unwrap_err().to_string().contains("is no eventfd"));
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create_new(dir.path().join("anon_inode:[eventfd]")).unwrap();
        assert!(adopt(file.into()).is_err());
    }
}
