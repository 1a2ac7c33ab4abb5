//! Waiting for processes and sockets, for a limited time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

fn polled(fd: &impl AsFd, flags: PollFlags, time: Duration) -> io::Result<bool> {
    let timeout = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    match poll(&mut [PollFd::new(fd, flags)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waits until `socket` can be read, or, if asked for, written.
pub(super) fn for_socket(socket: &UnixStream, write: bool, time: Duration) -> io::Result<()> {
    let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    polled(socket, flags, time).map(drop)
}

/// Waits until there is something to read, or the end; `false` when the time is up.
pub(super) fn for_input(from: &impl AsFd, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if polled(from, PollFlags::IN, left)? {
            return Ok(true);
        }
        if left.is_zero() {
            return Ok(false);
        }
    }
}

/// A child whose end can be waited for with a limit.
#[derive(Debug)]
pub(super) struct Waited {
    pub(super) child: Child,
    pidfd: OwnedFd,
}

impl Waited {
    /// Takes a child that was just started.
    pub(super) fn new(child: Child) -> io::Result<Self> {
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok(Self { child, pidfd })
    }

    /// Its exit status, or `None` when it still runs at `until`.
    pub(super) fn ended(&mut self, until: Instant) -> io::Result<Option<ExitStatus>> {
        if for_input(&self.pidfd, until)? { self.child.wait().map(Some) } else { Ok(None) }
    }
}

impl Drop for Waited {
    fn drop(&mut self) {
        // One that has been waited for is not killed again.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
