//! What a move refuses, or could not do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// See the module documentation.
#[derive(Debug, Error)]
pub enum Error {
    /// The engine could not do it.
    #[error(transparent)]
    Disk(#[from] vmstrata_disk::Error),
    /// A disk, or a target, that cannot be moved, or moved to.
    #[error("{}: cannot be moved to {}: {why}", disk.display(), to.display())]
    Refused {
        /// The disk.
        disk: PathBuf,
        /// The target's directory.
        to: PathBuf,
        /// Why not.
        why: String,
    },
    /// A target that is too small.
    #[error("{}: has {free} bytes free, and {needed} are to be copied there", to.display())]
    NoRoom {
        /// The target's directory.
        to: PathBuf,
        /// What it has.
        free: u64,
        /// What is left to copy.
        needed: u64,
    },
    /// A file that the disk, or a layer, is to become.
    #[error("{}: exists already", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A layer that was changed while it was copied.
    #[error("{}: was changed while it was copied: it is copied again when the move goes on", layer.display())]
    Changed {
        /// The layer.
        layer: PathBuf,
    },
    /// A copy that reads otherwise.
    #[error("{}: reads otherwise than {}: the target's storage is not to be trusted", copy.display(), layer.display())]
    Corrupt {
        /// The copy.
        copy: PathBuf,
        /// The layer.
        layer: PathBuf,
    },
    /// A flat copy that reads otherwise.
    #[error("{}: reads otherwise than what was written at offset {offset}: its storage is not to be trusted", copy.display())]
    Untrue {
        /// The copy.
        copy: PathBuf,
        /// Where.
        offset: u64,
    },
    /// A target that answers too slowly to hold writes for it.
    #[error("{}: had not taken the last writes after {} s: the disk stays where it is, and its guest goes on", target.display(), after.as_secs())]
    Slow {
        /// The target.
        target: PathBuf,
        /// How long it was waited for.
        after: Duration,
    },
    /// The host did not do it.
    #[error("{}: cannot {action}{}: {source}", path.display(), at(*.offset))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Where in the file.
        offset: Option<u64>,
        /// What the host says.
        source: io::Error,
    },
    /// A journal that is none.
    #[error("{}: is no journal of a move: {why}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

fn at(offset: Option<u64>) -> String {
    offset.map_or_else(String::new, |offset| format!(" at offset {offset}"))
}

impl Error {
    /// Whether there is no such file.
    pub(crate) fn is_missing_file(&self) -> bool {
        match self {
            Self::Disk(error) => error.is_missing_file(),
            Self::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            _ => false,
        }
    }

    pub(crate) fn refused(disk: &Path, to: &Path, why: &str) -> Self {
        Self::Refused { disk: disk.to_owned(), to: to.to_owned(), why: why.to_owned() }
    }

    /// Makes an error of what the host says of a file.
    pub(crate) fn of_file<E: Into<io::Error>>(path: &Path, action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, offset: None, source: source.into() }
    }

    /// The same, at an offset.
    pub(crate) fn at_offset<E: Into<io::Error>>(
        path: &Path,
        action: &'static str,
        offset: u64,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, offset: Some(offset), source: source.into() }
    }
}
