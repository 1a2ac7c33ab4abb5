//! What keeps a log from being used.

use std::io;
use std::path::PathBuf;

/// Why a log cannot be used. Nothing was changed in the log then.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The host failed.
    #[error("cannot {doing} the flush log {}: {source}", log.display())]
    Io {
        /// The log.
        log: PathBuf,
        /// What failed, as a verb.
        doing: &'static str,
        /// What the host said.
        source: io::Error,
    },
    /// There is something else in its place.
    #[error("{} is no flush log, and is not empty; name another file, or remove it", log.display())]
    NotALog {
        /// The file.
        log: PathBuf,
    },
    /// It has no room to be of use.
    #[error("the flush log {} has {len} bytes; it needs at least {min}", log.display())]
    TooSmall {
        /// The log.
        log: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The least length in bytes.
        min: u64,
    },
    /// Another host wrote it.
    #[error("the flush log {} belongs to another host; start a server with it there, which empties it", log.display())]
    OtherHost {
        /// The log.
        log: PathBuf,
    },
    /// Flushed writes in it are damaged: what follows them is there.
    #[error("the flush log {} is damaged: batch {sequence}, at {at:#x}, cannot be read, and later ones are there", log.display())]
    Damaged {
        /// The log.
        log: PathBuf,
        /// The number of the batch.
        sequence: u64,
        /// Where it lies, in bytes from the log's start.
        at: u64,
    },
    /// A file that the log has flushed writes of cannot be used.
    #[error("the flush log {} has flushed writes of {}: {source}; if they may be lost: vmstrata recover {} --discard {}", log.display(), file.display(), log.display(), file.display())]
    Target {
        /// The log.
        log: PathBuf,
        /// The file, by the name that it had when it was opened.
        file: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
}
