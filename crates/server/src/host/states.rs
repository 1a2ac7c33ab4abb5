//! Which file a disk's state is: the active one, a snapshot's layer, or a clone that may have to be made.

use std::path::PathBuf;

use vmstrata_disk::{Format, OpenOptions, inspect, snapshot};

use crate::error::Error;
use crate::spec::{CloneOf, DiskSpec, SpecError, StateError};

/// How the files of a disk are opened whose backing files may lie in `allow_backing`, too.
pub(super) fn open_options(spec: &DiskSpec, allow_backing: &[PathBuf]) -> OpenOptions {
    // What is said of a clone's format is said of the disk that it starts from: a clone is always an overlay.
    let format = if spec.clone_of.is_some() { Some(Format::Qcow2) } else { spec.format };
    OpenOptions {
        read_only: spec.read_only,
        cache: spec.cache,
        allow_backing: allow_backing.to_vec(),
        format,
        ..OpenOptions::default()
    }
}

/// Reads the headers of the chain that [`find`] finds. A clone that is to be made is not: its snapshot's are read.
///
/// # Errors
/// As [`find`], and a layer that cannot be read.
pub(crate) fn look_at(spec: &DiskSpec, allow_backing: &[PathBuf]) -> Result<(), Error> {
    let options = open_options(spec, allow_backing);
    if let Some(clone_of) = spec.clone_of.as_ref().filter(|_| spec.path.symlink_metadata().is_err()) {
        snapshot::find(&clone_of.disk, &clone_of.snapshot, &OpenOptions { format: spec.format, ..options })?;
        return Ok(());
    }
    let (path, options) = find(spec, options)?;
    inspect(&path, &options)?;
    Ok(())
}

/// The file to open for `spec`, and how.
///
/// A clone that is there is opened as it is, so that a server that is started again goes on with it.
///
/// # Errors
/// No such snapshot, one that is to be written, another file in the clone's place; whatever the host reports.
pub(super) fn find(spec: &DiskSpec, options: OpenOptions) -> Result<(PathBuf, OpenOptions), Error> {
    if let Some(clone_of) = &spec.clone_of {
        let options = OpenOptions { format: spec.format, ..options.clone() };
        if spec.path.symlink_metadata().is_ok() {
            let options = OpenOptions { format: Some(Format::Qcow2), ..options };
            check_clone(spec, clone_of, &options)?;
        } else {
            let layer = snapshot::clone(&clone_of.disk, &clone_of.snapshot, &spec.path, &options)?;
            tracing::info!(clone = %spec.path.display(), layer = %layer.display(), "made a clone");
        }
    }
    let state = snapshot::resolve(&spec.path, &options)?;
    if state.info.is_some() && !spec.read_only {
        return Err(SpecError::from(StateError::Written { path: spec.path.clone() }).into());
    }
    let options = state.open_options(options);
    Ok((state.path, options))
}

fn check_clone(spec: &DiskSpec, clone_of: &CloneOf, options: &OpenOptions) -> Result<(), Error> {
    let origin = clone_of.disk.file_name().unwrap_or_default().to_string_lossy();
    let is_it = snapshot::list(&spec.path, options)?.iter().any(|below| {
        let info = below.info.as_ref();
        info.is_some_and(|info| info.name == clone_of.snapshot && info.origin.as_deref() == Some(&*origin))
    });
    if is_it {
        return Ok(());
    }
    let (path, CloneOf { disk, snapshot }) = (spec.path.clone(), clone_of.clone());
    Err(SpecError::from(StateError::NotTheClone { path, disk, snapshot }).into())
}
