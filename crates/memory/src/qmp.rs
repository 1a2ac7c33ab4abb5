//! Talking to a running QEMU: its machine protocol (QMP) over a Unix socket, one command at a time.
//!
//! ```text
//!   capture, restore, introspection ──► Qmp ──► lines of JSON ──► QEMU's monitor
//! ```
//!
//! Invariants: the peer may be anyone: lines, events and waits are bounded, and what is not QMP is an error. Every wait has
//! a deadline. Source: QEMU `docs/interop/qmp-spec`.
//!
//! A QEMU whose last client was killed in the middle of a command may give its answer, and events, to the next client, before
//! and after it greets (seen of QEMU 7.2). So each command has an id that no other process has given, and what came before
//! the greeting was meant for another.

mod error;
mod wire;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub use error::QmpError;
use wire::Wire;

/// Lines that may come between a command and its answer.
const LINES_MAX: usize = 100_000;

/// A connection to a QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    wire: Wire,
    patience: Duration,
}

impl Qmp {
    /// Connects and leaves negotiation mode. Each command may then take `patience`.
    ///
    /// # Errors
    /// When nobody listens, or whoever listens does not greet as QEMU does: QEMU serves one client of a socket at a time.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self, QmpError> {
        let mut qmp = Self { wire: Wire::connect(path)?, patience };
        qmp.greeted().map_err(|error| match error {
            QmpError::Silent { .. } => QmpError::Busy { path: path.to_owned() },
            other => other,
        })?;
        qmp.tell("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Waits for the greeting; what comes before was meant for the client before.
    fn greeted(&mut self) -> Result<(), QmpError> {
        let deadline = Instant::now() + self.patience;
        for _ in 0..LINES_MAX {
            let message = self.wire.receive(deadline)?;
            let has = |key| message.get(key).is_some();
            if has("QMP") {
                return Ok(());
            }
            if !(has("event") || has("return") || has("error")) {
                break;
            }
        }
        Err(QmpError::Malformed { what: "no greeting" })
    }

    /// Runs `command` and returns what it returns.
    ///
    /// # Errors
    /// [`QmpError::Refused`] with QEMU's words; the others when the connection is lost, silent, or not QMP.
    pub fn ask<T: DeserializeOwned>(&mut self, command: &str, arguments: Value) -> Result<T, QmpError> {
        let value = self.run(command, arguments, None)?;
        serde_json::from_value(value).map_err(|_| QmpError::Unexpected { command: command.to_owned() })
    }

    /// Runs `command`, whatever it returns.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn tell(&mut self, command: &str, arguments: Value) -> Result<(), QmpError> {
        self.run(command, arguments, None).map(drop)
    }

    /// Runs a line of the human monitor and returns its text.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn monitor(&mut self, line: &str) -> Result<String, QmpError> {
        self.ask("human-monitor-command", json!({ "command-line": line }))
    }

    /// Gives QEMU a copy of `file`, to be called `name` in later commands.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn give(&mut self, name: &str, file: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.run("getfd", json!({ "fdname": name }), Some(file)).map(drop)
    }

    fn run(
        &mut self,
        command: &str,
        arguments: Value,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.patience;
        let id = next_id();
        self.wire.send(&json!({ "execute": command, "arguments": arguments, "id": id }), file, deadline)?;
        for _ in 0..LINES_MAX {
            let mut message = self.wire.receive(deadline)?;
            // Its client was killed before the answer came.
            let is_for_another = message.get("id").is_some_and(|answered| *answered != id);
            if is_for_another || message.get("event").is_some() {
                continue;
            }
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                let text = |key: &str| error.get(key).and_then(Value::as_str).unwrap_or("?").to_owned();
                let command = command.to_owned();
                return Err(QmpError::Refused { command, class: text("class"), words: text("desc") });
            }
            return Err(QmpError::Malformed { what: "neither an answer nor an event" });
        }
        Err(QmpError::Malformed { what: "events without an end" })
    }

    /// Process id of the peer.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn peer(&self) -> Result<u32, QmpError> {
        self.wire.peer()
    }
}

/// An id for a command, unlike those of other processes.
fn next_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests;
