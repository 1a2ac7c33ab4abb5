//! The one error of a check: what went wrong, and where in the file.

use std::fmt;
use std::io;

use vmstrata_qcow2::ParseError;
use vmstrata_types::HostOffset;

/// Shorthand for results of a check.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image could not be checked, with the offset in its file.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    at: Option<HostOffset>,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The host could not read, write or flush the file.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried, as a verb with its object.
        action: &'static str,
        /// What the host said.
        source: io::Error,
    },
    /// The file is no qcow2 image, or has a header that cannot be used.
    #[error("{0}")]
    Format(#[from] ParseError),
    /// A file of more clusters than a check can number.
    #[error(
        "the file has {clusters} clusters, more than the {max} that can be checked: copy it with `qemu-img convert`"
    )]
    TooLarge {
        /// Clusters of the file.
        clusters: u64,
        /// The most that can be checked.
        max: u64,
    },
    /// An image that references more than a check may count.
    #[error("checking needs more than the {bytes_max} bytes of memory allowed")]
    Memory {
        /// Bytes allowed.
        bytes_max: u64,
    },
    /// A repair needs more of a structure than the format has room for.
    #[error("the image cannot grow any more: {what} is at the format's limit")]
    Full {
        /// The structure that cannot grow.
        what: &'static str,
    },
}

impl Error {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The offset in the file it happened at.
    pub fn offset(&self) -> Option<HostOffset> {
        self.at
    }

    /// Adds the offset in the file, unless known.
    #[must_use]
    pub(crate) fn at(mut self, at: HostOffset) -> Self {
        self.at.get_or_insert(at);
        self
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self { kind, at: None }
    }
}

impl From<ParseError> for Error {
    fn from(error: ParseError) -> Self {
        ErrorKind::from(error).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = self.at {
            write!(f, "at byte {at}: ")?;
        }
        self.kind.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            ErrorKind::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Gives host errors the action they interrupted.
pub(crate) trait IoContext<T> {
    fn while_trying(self, action: &'static str) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn while_trying(self, action: &'static str) -> Result<T> {
        self.map_err(|source| ErrorKind::Io { action, source }.into())
    }
}
