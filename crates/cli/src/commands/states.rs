//! States of disks as people name them, and what to say when one is still being written.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use vmstrata_disk::{Error, ErrorKind, OpenOptions, snapshot};
use vmstrata_store::FileError;

use crate::args::BackingArgs;

/// A state found by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its newest layer.
    pub path: PathBuf,
    /// Its name, if it has one.
    pub snapshot: Option<String>,
    /// When it was taken, in seconds since 1970, if known.
    pub taken_at: Option<u64>,
}

/// The state that `name` means: the file of a frozen layer.
///
/// `DISK@NAME` is the snapshot NAME of DISK; all else is a file.
///
/// # Errors
/// A disk that has no such snapshot, or whose chain cannot be read.
pub fn resolve(name: &Path, backing: &BackingArgs) -> Result<Named> {
    let options = OpenOptions { allow_backing: backing.allow_backing.clone(), ..OpenOptions::default() };
    let state = snapshot::resolve(name, &options).map_err(|error| explain(&error))?;
    let taken_at = state.info.as_ref().map(|info| info.taken_ns / 1_000_000_000);
    Ok(Named { path: state.path, snapshot: state.info.map(|info| info.name), taken_at })
}

/// An engine's error for people: says what to do about a state that is still being written.
///
/// Leaves the host's error out of the chain: a pipe that breaks under a backup is a failure, not a reader that has
/// seen enough.
pub fn explain(error: &Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::File(FileError::Lock(_)) => {
            anyhow!("{error}. If it is the active layer of a running disk, take a snapshot and use that")
        }
        _ => anyhow!("{error}"),
    }
}
