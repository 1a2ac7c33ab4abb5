//! The QEMU guest agent: its file systems are frozen for the moment of a snapshot.
//!
//! ```text
//!   freeze ──► connect, sync ──► guest-fsfreeze-freeze ──► Frozen ──► the cut ──► guest-fsfreeze-thaw
//!                  │ no answer         │ no answer            │ killed             │ no answer
//!                  ▼                   ▼                      ▼                    ▼
//!              not quiesced        thaw, in case        thawed by another    connect anew, thaw, until
//!                                  it freezes yet       process: [`guard`]   patience ends; then [`guard`]
//! ```
//!
//! Place in the data flow: beside [`crate::host`]'s snapshots, on the thread that takes one. What the agent says comes from
//! the guest, so it may be anything: [`connection`] bounds its length and the time it may take.
//!
//! Invariants:
//! - Whatever was asked to freeze is asked to thaw, on every road out; [`Frozen`] does so when it is dropped.
//! - An agent that *refused* to freeze is left alone: its file systems may be frozen for someone else.

mod connection;
mod guard;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use connection::Connection;
use guard::Guard;
pub(crate) use guard::Guards;
pub use guard::thaw_guard;

/// How long each part may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// To be let in and answered at all.
    pub(crate) sync: Duration,
    /// To write back what is dirty, and freeze.
    pub(crate) freeze: Duration,
    /// To thaw, with all attempts.
    pub(crate) thaw: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { sync: seconds(5), freeze: seconds(30), thaw: seconds(20) }
    }
}

/// One attempt to thaw waits no longer than this for an answer before the next one begins.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between two attempts.
const BREATH: Duration = Duration::from_millis(100);

/// What is wrong with an agent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentFault {
    /// There is no listener at the socket.
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    /// No answer in time.
    #[error("it did not answer within {0:?}")]
    Silent(Duration),
    /// The connection ended.
    #[error("it hung up")]
    HungUp,
    /// More bytes than any answer has.
    #[error("what it said is no answer: more than {0} bytes")]
    TooLong(usize),
    /// Something else than an answer.
    #[error("what it said is no answer")]
    Garbage,
    /// Someone else has it freeze or thaw.
    #[error("another snapshot has frozen it, and did not end within {0:?}")]
    Busy(Duration),
    /// Without a guard, a guest would stay frozen if this process were killed.
    #[error("cannot start the process that thaws it should the server be killed: {0}")]
    Guard(std::io::Error),
    /// An error of its own.
    #[error("it refused: {0}")]
    Refused(String),
    /// The host's error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// A guest whose file systems are frozen, until this is dropped.
#[derive(Debug)]
pub(crate) struct Frozen {
    socket: PathBuf,
    /// `None` once it has broken.
    connection: Option<Connection>,
    patience: Patience,
    /// `None` once it was asked to thaw.
    guard: Option<Guard>,
    /// How many file systems were frozen.
    pub(crate) file_systems: u64,
}

/// Freezes the file systems of the guest whose agent listens at `socket`. Should this process be killed, `guards` see to it
/// that the guest goes on.
///
/// # Errors
/// No agent that answers, or one that refuses; no guard. Nothing is frozen then, or is asked to thaw.
pub(crate) fn freeze(socket: &Path, patience: Patience, guards: &Guards) -> Result<Frozen, AgentFault> {
    let mut note = guards.note(socket, patience.sync)?;
    let mut connection = Connection::open(socket, patience.sync)?;
    connection.sync(patience.sync)?;
    if note.may_be_frozen {
        // By a server that was killed.
        connection.command("guest-fsfreeze-thaw", patience.thaw)?;
        note.may_be_frozen = false;
    }
    let mut guard = guards.start(socket, note)?;
    let answer = connection.command("guest-fsfreeze-freeze", patience.freeze);
    let file_systems = match answer {
        Ok(ref value) => value.as_u64().ok_or(AgentFault::Garbage),
        Err(refused @ AgentFault::Refused(_)) => {
            guard.note.may_be_frozen = false;
            return Err(refused);
        }
        Err(fault) => Err(fault),
    };
    let connection = file_systems.is_ok().then_some(connection);
    let mut frozen = Frozen {
        socket: socket.to_owned(),
        connection,
        patience,
        guard: Some(guard),
        file_systems: *file_systems.as_ref().unwrap_or(&0),
    };
    match file_systems {
        Ok(_) => Ok(frozen),
        Err(fault) => {
            // It may freeze yet.
            frozen.thaw_or_say();
            Err(fault)
        }
    }
}

impl Frozen {
    /// The agent's socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Lets the guest go on. Returns how many file systems were frozen until now, where that is known.
    ///
    /// # Errors
    /// An agent that does not answer any more: the guest may be frozen still, and its guard goes on trying.
    pub(crate) fn thaw(mut self) -> Result<Option<u64>, AgentFault> {
        self.try_thaw()
    }

    fn try_thaw(&mut self) -> Result<Option<u64>, AgentFault> {
        let Some(mut guard) = self.guard.take() else { return Ok(None) };
        let mut attempts = 0;
        let answer = insist(&self.socket, self.patience.thaw, |attempt| {
            attempts += 1;
            match self.connection.take() {
                Some(mut connection) => connection.command("guest-fsfreeze-thaw", attempt),
                None => thaw_anew(&self.socket, attempt),
            }
        })?;
        guard.note.may_be_frozen = false;
        // An attempt that was not answered may have thawed some.
        Ok(answer.as_u64().filter(|_| attempts == 1))
    }

    fn thaw_or_say(&mut self) {
        if let Err(fault) = self.try_thaw() {
            tracing::error!(
                agent = %self.socket.display(), %fault,
                "the guest's file systems may be frozen: send guest-fsfreeze-thaw to its agent"
            );
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw_or_say();
    }
}

/// Tries again until patience ends.
fn insist<T>(
    socket: &Path,
    patience: Duration,
    mut thaw: impl FnMut(Duration) -> Result<T, AgentFault>,
) -> Result<T, AgentFault> {
    let deadline = Instant::now() + patience;
    let mut left = patience;
    loop {
        let fault = match thaw(left.min(ATTEMPT)) {
            Ok(thawed) => return Ok(thawed),
            Err(fault) => fault,
        };
        std::thread::sleep(BREATH.min(deadline.saturating_duration_since(Instant::now())));
        left = deadline.saturating_duration_since(Instant::now());
        // An attempt without time to be answered would only hide why the others failed.
        if left < BREATH {
            return Err(fault);
        }
        tracing::warn!(agent = %socket.display(), %fault, "the guest is not thawed yet");
    }
}

/// Thaws the guest of an agent that may be frozen; returns whether it was. An agent whose socket has no listener is gone.
fn thaw_left(socket: &Path, patience: Duration) -> Result<bool, AgentFault> {
    insist(socket, patience, |attempt| {
        let status = Connection::open(socket, attempt).and_then(|mut connection| {
            connection.sync(attempt)?;
            connection.command("guest-fsfreeze-status", attempt)
        });
        match status {
            Err(AgentFault::Connect(error)) if is_gone(&error) => Ok(false),
            Ok(status) if status == "thawed" => Ok(false),
            _ => thaw_anew(socket, attempt).map(|_| true),
        }
    })
}

fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused)
}

/// Thaws by a new connection. An agent that is still busy freezing does not answer, and finds the command after that.
fn thaw_anew(socket: &Path, patience: Duration) -> Result<serde_json::Value, AgentFault> {
    let deadline = Instant::now() + patience;
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut connection = Connection::open(socket, left())?;
    match connection.sync(left() / 2) {
        Ok(()) | Err(AgentFault::Silent(_)) => connection.command("guest-fsfreeze-thaw", left()),
        Err(fault) => Err(fault),
    }
}

#[cfg(test)]
pub(crate) mod tests;
