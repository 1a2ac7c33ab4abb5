//! What goes wrong between this program and a QEMU.

use std::io;
use std::path::PathBuf;

/// Why QEMU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens, or not to this user.
    #[error("{}: cannot reach QEMU's monitor", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Somebody listens and does not greet.
    #[error(
        "{}: QEMU does not greet: its monitor serves one client at a time, so give it a socket for vmstrata alone",
        path.display()
    )]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// The connection broke.
    #[error("the connection to QEMU's monitor broke")]
    Io(#[from] io::Error),
    /// QEMU is gone.
    #[error("QEMU closed its monitor: it has ended, or was killed")]
    Closed,
    /// Nothing came until the deadline.
    #[error("QEMU's monitor did not answer within {seconds:.1} s")]
    Silent {
        /// How long it was waited for.
        seconds: f64,
    },
    /// More than any QEMU says in one line.
    #[error("QEMU's monitor sent a line of more than {max} bytes")]
    Long {
        /// The most that is taken.
        max: usize,
    },
    /// The peer does not speak the protocol.
    #[error("what listens is no QEMU monitor in its machine protocol: {what}")]
    Malformed {
        /// What was wrong.
        what: &'static str,
    },
    /// QEMU's own refusal.
    #[error("QEMU refuses {command}: {words}")]
    Refused {
        /// What was asked.
        command: String,
        /// QEMU's class of error, such as `CommandNotFound`.
        class: String,
        /// QEMU's words.
        words: String,
    },
    /// An answer of another shape than this command has.
    #[error("QEMU's answer to {command} is not understood")]
    Unexpected {
        /// What was asked.
        command: String,
    },
}
