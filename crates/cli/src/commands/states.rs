//! States of disks as people name them, and what to say when one is still being written.

use std::path::Path;

use anyhow::{Result, anyhow};
use vmstrata_disk::snapshot::State;
use vmstrata_disk::{Error, ErrorKind, Format, OpenOptions, snapshot};
use vmstrata_store::FileError;

use crate::args::BackingArgs;

/// The state that `name` means: the file of a frozen layer.
///
/// `DISK@NAME` is the snapshot NAME of DISK, which holds `format`; its own format is the one that the layer above it says. All
/// else is a file that holds `format`. What a raw layer begins with is its guest's.
///
/// # Errors
/// A disk that has no such snapshot, or whose chain cannot be read.
pub fn resolve(name: &Path, format: Option<Format>, backing: &BackingArgs) -> Result<State> {
    let options =
        OpenOptions { format, allow_backing: backing.allow_backing.clone(), ..OpenOptions::default() };
    snapshot::resolve(name, &options).map_err(|error| explain(&error))
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
