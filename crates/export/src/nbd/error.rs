//! What can go wrong: for the operator ([`Error`]), and with one client (`End`).

use std::io;
use std::path::PathBuf;

use super::protocol::DecodeError;

/// Why a server cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address is not of a form this server knows.
    #[error("'{text}' is no NBD address: give unix:PATH or tcp:HOST:PORT")]
    Address {
        /// What was given.
        text: String,
    },
    /// The socket cannot be made or bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// A thread or descriptor cannot be had.
    #[error("cannot start the NBD server: {source}")]
    Start {
        /// Why.
        source: io::Error,
    },
    /// An export's name or description is no string of the protocol, or the name is taken.
    #[error("cannot export a disk as '{name}': {reason}")]
    Export {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: ExportFault,
    },
    /// A certificate or key file cannot be read or used.
    #[error("TLS: {path}: {source}")]
    Credential {
        /// The file.
        path: PathBuf,
        /// Why.
        source: CredentialFault,
    },
}

/// What is wrong with an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportFault {
    /// Another disk has this name.
    #[error("the name is taken")]
    Taken,
    /// The name or the description cannot be sent.
    #[error("name and description must be at most 4096 bytes without NUL")]
    NotAString,
}

/// What is wrong with a file of [`TlsConfig::load`](super::TlsConfig::load).
#[derive(Debug, thiserror::Error)]
pub enum CredentialFault {
    /// It cannot be read as PEM.
    #[error("{0}")]
    Pem(#[from] rustls_pki_types::pem::Error),
    /// It has no certificate in it.
    #[error("no certificate in it")]
    Empty,
    /// The certificate, the key or both together are refused.
    #[error("{0}")]
    Rejected(#[from] rustls::Error),
    /// The authority for client certificates is refused.
    #[error("{0}")]
    Authority(#[from] rustls::client::VerifierBuilderError),
}

/// Why a connection ended otherwise than by agreement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    #[error("the client went away")]
    Gone,
    #[error("the client did not finish its handshake in time")]
    Timeout,
    #[error("the client sent too many options")]
    TooManyOptions,
    #[error("the client set flags that were not offered: {flags:#x}")]
    UnknownFlags { flags: u32 },
    #[error("the client asked for an export that it cannot have")]
    NoExport,
    #[error(transparent)]
    HasWriter(#[from] vmstrata_disk::HasWriter),
    #[error("the client announced a message of {len} bytes, more than is allowed")]
    TooBig { len: u64 },
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("{0}")]
    Engine(#[from] vmstrata_disk::Error),
    #[error("{0}")]
    Io(io::Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        match error.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof => Self::Gone,
            _ => Self::Io(error),
        }
    }
}

impl From<rustix::io::Errno> for End {
    fn from(errno: rustix::io::Errno) -> Self {
        io::Error::from(errno).into()
    }
}
