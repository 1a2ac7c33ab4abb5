//! Lines of JSON on a Unix socket, bounded in length and time.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use serde_json::Value;

use super::QmpError;

/// The longest line that is taken: QEMU's longest answers (`query-qmp-schema`) have some hundreds of KiB.
pub(super) const LINE_BYTES_MAX: usize = 16 << 20;
/// Bytes asked for at once.
const READ_BYTES: usize = 64 << 10;

/// A connection that carries one JSON value a line.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    /// What was received and not yet used.
    buffer: Vec<u8>,
    /// How much of `buffer` holds no end of a line.
    searched: usize,
}

impl Wire {
    pub(super) fn connect(path: &Path) -> Result<Self, QmpError> {
        let connect = UnixStream::connect(path);
        let stream = connect.map_err(|source| QmpError::Connect { path: path.to_owned(), source })?;
        Ok(Self { stream, buffer: Vec::new(), searched: 0 })
    }

    /// Sends a line, with a descriptor beside its first byte.
    pub(super) fn send(
        &mut self,
        message: &Value,
        file: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), QmpError> {
        let line = format!("{message}\n").into_bytes();
        let mut rest = line.as_slice();
        if let Some(file) = file {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            rest = &rest[send_with(&self.stream, rest, file)?..];
        }
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) => retry(error)?,
            }
        }
        Ok(())
    }

    /// The next line that is not empty.
    pub(super) fn receive(&mut self, deadline: Instant) -> Result<Value, QmpError> {
        let asked = Instant::now();
        loop {
            if let Some(line) = self.take_line() {
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return serde_json::from_slice(&line).map_err(|_| QmpError::Malformed { what: "no JSON" });
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(QmpError::Long { max: LINE_BYTES_MAX });
            }
            let seconds = asked.elapsed().as_secs_f64();
            let left = left(deadline).map_err(|_| QmpError::Silent { seconds })?;
            self.stream.set_read_timeout(Some(left))?;
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Result<(), QmpError> {
        let len = self.buffer.len();
        self.buffer.resize(len + READ_BYTES, 0);
        let read = self.stream.read(&mut self.buffer[len..]);
        self.buffer.truncate(len + read.as_ref().map_or(0, |count| *count));
        match read {
            Ok(0) => Err(QmpError::Closed),
            Ok(_) => Ok(()),
            Err(error) => retry(error),
        }
    }

    fn take_line(&mut self) -> Option<Vec<u8>> {
        let end = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n');
        let Some(end) = end.map(|end| self.searched + end) else {
            self.searched = self.buffer.len();
            return None;
        };
        self.searched = 0;
        Some(self.buffer.drain(..=end).collect())
    }

    pub(super) fn peer(&self) -> Result<u32, QmpError> {
        let credentials = sockopt::socket_peercred(&self.stream).map_err(io::Error::from)?;
        Ok(credentials.pid.as_raw_nonzero().get().unsigned_abs())
    }
}

/// Interrupted and timed-out calls are tried again: deadlines are looked at before each.
fn retry(error: io::Error) -> Result<(), QmpError> {
    match error.kind() {
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(()),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(QmpError::Closed),
        _ => Err(error.into()),
    }
}

fn left(deadline: Instant) -> Result<Duration, QmpError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(QmpError::Silent { seconds: 0.0 }) } else { Ok(left) }
}

fn send_with(stream: &UnixStream, bytes: &[u8], file: BorrowedFd<'_>) -> Result<usize, QmpError> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)), "there is room for one descriptor");
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    Ok(sent.map_err(io::Error::from)?)
}
