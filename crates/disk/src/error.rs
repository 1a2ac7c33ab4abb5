//! The one error of the engine: a kind, where it happened, and what caused it.

mod kind;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::ParseError;
use vmstrata_store::{FileError, GateError, LockError};
use vmstrata_types::{HostOffset, LayerIndex};

pub use kind::ErrorKind;

/// Shorthand for results of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the engine, with the file, layer and offset it happened at.
#[derive(Debug)]
pub struct Error(Box<Context>);

#[derive(Debug)]
struct Context {
    kind: ErrorKind,
    path: Option<PathBuf>,
    layer: Option<LayerIndex>,
    at: Option<HostOffset>,
}

impl Error {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The fault of one kind of work, if it is of type `F`: `MergeFault`, `SnapshotFault` or `ResizeFault`, or one of a crate above.
    pub fn fault<F: std::error::Error + 'static>(&self) -> Option<&F> {
        let ErrorKind::Fault(fault) = self.kind() else { return None };
        fault.downcast_ref()
    }

    /// The file it happened in.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The layer it happened in, counted from the base.
    pub fn layer(&self) -> Option<LayerIndex> {
        self.0.layer
    }

    /// The offset in the file it happened at.
    pub fn offset(&self) -> Option<HostOffset> {
        self.0.at
    }

    /// Whether another process uses the file in a way that excludes ours.
    pub(crate) fn is_conflict(&self) -> bool {
        use FileError::Lock;
        let ErrorKind::File(Lock(error)) = self.kind() else { return false };
        matches!(error, LockError::Conflict { .. } | LockError::CopiedInto { .. })
    }

    /// Whether a file of the chain is not what it was when the chain was read.
    pub(crate) fn is_change(&self) -> bool {
        matches!(self.kind(), ErrorKind::Changed)
    }

    /// Whether there is no such file.
    pub fn is_missing_file(&self) -> bool {
        let source = match self.kind() {
            ErrorKind::Gate(GateError::Open { source, .. }) | ErrorKind::Io { source, .. } => source,
            _ => return false,
        };
        source.kind() == io::ErrorKind::NotFound
    }

    /// Whether a file is in use in a way that excludes this one.
    pub fn is_lock(&self) -> bool {
        matches!(self.kind(), ErrorKind::File(FileError::Lock(LockError::Conflict { .. })))
    }

    /// What the host said when `action` was tried: a verb with its object.
    pub fn io(action: &'static str, source: io::Error) -> Self {
        ErrorKind::Io { action, source }.into()
    }

    /// What the host said instead of starting a thread, of which it may have no more for this process.
    pub fn no_thread(source: io::Error) -> Self {
        const ACTION: &str = "start a thread (limits on processes or memory may be reached: ulimit -u, ulimit -v, TasksMax=, pids.max)";
        Self::io(ACTION, source)
    }

    /// Adds the file, unless a closer caller knew it already.
    #[must_use]
    pub fn in_file(mut self, path: &Path) -> Self {
        self.0.path.get_or_insert_with(|| path.to_owned());
        self
    }

    /// Adds the layer, unless known.
    #[must_use]
    pub(crate) fn in_layer(mut self, layer: LayerIndex) -> Self {
        self.0.layer.get_or_insert(layer);
        self
    }

    /// Adds the offset in the file, unless known.
    #[must_use]
    pub fn at(mut self, at: HostOffset) -> Self {
        self.0.at.get_or_insert(at);
        self
    }

    /// The `errno` that says the most of this to a guest or a network client.
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno;
        let errno = match &self.0.kind {
            ErrorKind::Io { source, .. } => match source.raw_os_error() {
                Some(raw) if raw == Errno::NOSPC.raw_os_error() || raw == Errno::DQUOT.raw_os_error() => {
                    Errno::NOSPC
                }
                _ => Errno::IO,
            },
            ErrorKind::OutOfRange { .. } | ErrorKind::BufferLength { .. } => Errno::INVAL,
            ErrorKind::ReadOnly | ErrorKind::HeaderWrite { .. } => Errno::PERM,
            ErrorKind::Full { .. } => Errno::NOSPC,
            ErrorKind::Closed => Errno::SHUTDOWN,
            _ => Errno::IO,
        };
        errno.raw_os_error()
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(Context { kind, path: None, layer: None, at: None }))
    }
}

/// Lets `?` lift the errors that kinds are made from.
macro_rules! lift {
    ($($source:ty),*) => {$(
        impl From<$source> for Error {
            fn from(source: $source) -> Self {
                ErrorKind::from(source).into()
            }
        }
    )*};
}

lift!(
    ParseError,
    GateError,
    FileError,
    vmstrata_check::Error,
    vmstrata_qcow2::CreateError,
    vmstrata_qcow2::index::IndexError
);

/// Makes an error of a module's own faults.
macro_rules! fault {
    ($fault:ty) => {
        impl From<$fault> for $crate::error::Error {
            fn from(fault: $fault) -> Self {
                $crate::error::ErrorKind::Fault(Box::new(fault)).into()
            }
        }
    };
}
pub(crate) use fault;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = match &self.0.kind {
            ErrorKind::Gate(error) => Some(error.path()),
            ErrorKind::File(error) => Some(error.path()),
            _ => None,
        };
        if let Some(path) = self.path().filter(|path| named != Some(path)) {
            write!(f, "{}: ", path.display())?;
        }
        if let Some(layer) = self.0.layer {
            write!(f, "layer {layer}: ")?;
        }
        if let Some(at) = self.0.at {
            write!(f, "at byte {at}: ")?;
        }
        self.0.kind.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.kind {
            ErrorKind::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Gives host errors the action they interrupted.
pub trait IoContext<T> {
    /// As [`Error::io`].
    ///
    /// # Errors
    /// The host's.
    fn while_trying(self, action: &'static str) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn while_trying(self, action: &'static str) -> Result<T> {
        self.map_err(|source| Error::io(action, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_file_layer_and_offset_once() {
        let error = Error::from(ErrorKind::Decompress)
            .at(HostOffset::new(0x50000))
            .in_layer(LayerIndex::new(7))
            .in_file(Path::new("/images/web.qcow2"))
            .in_file(Path::new("/another"));
        assert_eq!(
            error.to_string(),
            "/images/web.qcow2: layer 7: at byte 0x50000: compressed cluster does not decompress: the image is damaged"
        );
    }

    #[test]
    fn a_file_that_the_kind_names_is_not_named_again() {
        let missing = GateError::Open { path: "base.qcow2".into(), source: io::ErrorKind::NotFound.into() };
        let error = Error::from(missing).in_file(Path::new("base.qcow2"));
        assert_eq!(error.to_string(), "cannot open base.qcow2: entity not found");
        let lock = LockError::CopiedInto { path: "base.qcow2".into() };
        let error = Error::from(FileError::from(lock)).in_file(Path::new("base.qcow2")).to_string();
        assert_eq!(error.matches("base.qcow2").count(), 1, "{error}");
        let error = Error::from(FileError::from(LockError::CopiedInto { path: "base.qcow2".into() }));
        assert!(error.in_file(Path::new("web.qcow2")).to_string().starts_with("web.qcow2: "));
    }

    #[test]
    fn a_full_host_is_told_apart_from_a_broken_one() {
        let full = Error::io("write", io::Error::from_raw_os_error(28));
        let broken = Error::io("write", io::Error::from_raw_os_error(5));
        assert_eq!((full.errno(), broken.errno()), (28, 5));
    }
}
