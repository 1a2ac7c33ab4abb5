//! One connection to a guest agent: JSON in lines, one command at a time.
//!
//! What an earlier client did not read may still come, and half a command of it may be in the agent: so the byte 0xFF goes
//! first, which resets the agent's parser, and everything it says is passed over until the 0xFF with which it answers
//! (QEMU's `guest-sync-delimited`).
//!
//! Invariant: no wait is longer than it was allowed to be, and no more than [`SAID_MAX`] bytes are read for an answer,
//! whatever comes and however slowly.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::{Value, json};

use super::AgentFault;

/// No answer to what is asked here is as long as this, nor is what may be left of an earlier one.
const SAID_MAX: usize = 256 << 10;
/// Resets the agent's parser, and comes before its answer to that.
const DELIMITER: u8 = 0xff;
/// How often a socket whose queue is full is tried.
const KNOCK_EVERY: Duration = Duration::from_millis(20);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    /// Read and not used yet.
    said: Vec<u8>,
}

/// A point in time, and how far away it was.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    patience: Duration,
}

impl Deadline {
    fn after(patience: Duration) -> Self {
        Self { at: Instant::now() + patience, patience }
    }

    /// What is left, which is never nothing: sockets take that for no limit.
    fn left(self) -> Result<Duration, AgentFault> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(AgentFault::Silent(self.patience)) } else { Ok(left) }
    }
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// No listener, or no room for one more client in time.
    pub(super) fn open(path: &Path, patience: Duration) -> Result<Self, AgentFault> {
        let deadline = Deadline::after(patience);
        let failed = |errno: Errno| AgentFault::Connect(errno.into());
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        loop {
            // A blocking connect would wait for ever for a listener that accepts no client.
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket: OwnedFd =
                socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
            match connect(&socket, &address) {
                Ok(()) => {
                    let stream = UnixStream::from(socket);
                    stream.set_nonblocking(false)?;
                    return Ok(Self { stream, said: Vec::new() });
                }
                Err(Errno::AGAIN) => std::thread::sleep(deadline.left()?.min(KNOCK_EVERY)),
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    /// Makes sure that the agent listens, and that its next answer is to the next command.
    ///
    /// # Errors
    /// As [`Connection::command`].
    pub(super) fn sync(&mut self, patience: Duration) -> Result<(), AgentFault> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let deadline = Deadline::after(patience);
        let id =
            u64::from(std::process::id()) << 20 | u64::from(NEXT.fetch_add(1, Ordering::Relaxed) % (1 << 20));
        let mut said = vec![DELIMITER];
        let arguments = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}});
        said.extend(arguments.to_string().bytes());
        self.say(&said, deadline)?;
        let mut budget = SAID_MAX;
        loop {
            self.take_to(DELIMITER, &mut budget, deadline)?;
            let line = self.take_to(b'\n', &mut budget, deadline)?;
            // An answer to an earlier client's is passed over, as is garbage.
            if serde_json::from_slice::<Value>(&line).is_ok_and(|answer| answer["return"] == id) {
                return Ok(());
            }
        }
    }

    /// Has the agent do something; returns what it says of it.
    ///
    /// # Errors
    /// An agent that refuses, says something else, says too much, hangs up, or does not answer in time.
    pub(super) fn command(&mut self, name: &str, patience: Duration) -> Result<Value, AgentFault> {
        let deadline = Deadline::after(patience);
        self.say(json!({"execute": name}).to_string().as_bytes(), deadline)?;
        let line = self.take_to(b'\n', &mut { SAID_MAX }, deadline)?;
        let mut answer: Value = serde_json::from_slice(&line).map_err(|_| AgentFault::Garbage)?;
        if let Some(error) = answer.get("error") {
            let said = error["desc"].as_str().unwrap_or("it does not say why");
            return Err(AgentFault::Refused(said.chars().filter(|c| !c.is_control()).take(200).collect()));
        }
        answer.get_mut("return").map(Value::take).ok_or(AgentFault::Garbage)
    }

    fn say(&mut self, line: &[u8], deadline: Deadline) -> Result<(), AgentFault> {
        self.stream.set_write_timeout(Some(deadline.left()?))?;
        let line = [line, b"\n"].concat();
        self.stream.write_all(&line).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => AgentFault::Silent(deadline.patience),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => AgentFault::HungUp,
            _ => AgentFault::Io(error),
        })
    }

    /// Takes what is said up to `end`, which is left out.
    fn take_to(&mut self, end: u8, budget: &mut usize, deadline: Deadline) -> Result<Vec<u8>, AgentFault> {
        let mut seen = 0;
        loop {
            if let Some(at) = self.said[seen..].iter().position(|&byte| byte == end) {
                let mut taken: Vec<u8> = self.said.drain(..=seen + at).collect();
                taken.pop();
                return Ok(taken);
            }
            seen = self.said.len();
            self.stream.set_read_timeout(Some(deadline.left()?))?;
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(AgentFault::HungUp),
                Ok(len) => {
                    *budget = budget.checked_sub(len).ok_or(AgentFault::TooLong(SAID_MAX))?;
                    self.said.extend(&buffer[..len]);
                }
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                        return Err(AgentFault::Silent(deadline.patience));
                    }
                    ErrorKind::ConnectionReset => return Err(AgentFault::HungUp),
                    _ => return Err(AgentFault::Io(error)),
                },
            }
        }
    }
}
