//! What can be known of a backup before a byte of it is made.

use std::path::Path;

use vmstrata_disk::create::reserve;
use vmstrata_disk::{Error, LocalFiles, Opener as _, Result, probe_layer, snapshot};
use vmstrata_store::Gate;
use vmstrata_types::MAX_LAYERS;

use crate::fault::BackupFault;
use crate::manifest::{Link, Manifest, State};
use crate::{BackupOptions, BackupTarget};

/// Makes sure, as far as that is known before, that a state of the disk `disk` can be backed up, before a
/// snapshot is taken for it.
///
/// # Errors
/// As [`backup`].
pub fn check(disk: &Path, target: &BackupTarget<'_>, options: &BackupOptions) -> Result<()> {
    link(options)?;
    check_target(disk, target, options)?;
    if let BackupTarget::File { path, replace } = target {
        reserve(path, *replace).map(drop).map_err(|error| error.in_file(path))?;
    }
    match (&options.previous, &options.since) {
        (Some(previous), Some(since)) => Ok(check_previous(previous, since)?),
        _ => Ok(()),
    }
}

/// Refuses a target that cannot be what is asked for, that the disk at `disk` stands on, or that stands on it.
pub(crate) fn check_target(disk: &Path, target: &BackupTarget<'_>, options: &BackupOptions) -> Result<()> {
    match target {
        BackupTarget::Stream(_) if options.compression.is_some() => Err(BackupFault::CompressedStream.into()),
        BackupTarget::File { path, replace: true } if stands_on(disk, path) || stands_on(path, disk) => {
            Err(Error::from(BackupFault::OntoItself).in_file(path))
        }
        _ => Ok(()),
    }
}

/// Whether `base` is in the chain of `top`, as far as that can be read.
pub(crate) fn stands_on(top: &Path, base: &Path) -> bool {
    let file = |path: &Path| LocalFiles.identity(path, &Gate::unrestricted()).map(|found| found.file);
    let Ok(base) = file(base) else { return false };
    let mut next = Some(top.to_owned());
    for _ in 0..MAX_LAYERS {
        let Some(path) = next else { return false };
        if file(&path).is_ok_and(|file| file == base) {
            return true;
        }
        next = probe_layer(&path, None).ok().and_then(|head| head.backing_path);
    }
    false
}

/// What an incremental backup builds upon.
pub(crate) fn link(options: &BackupOptions) -> Result<Option<Link>> {
    let Some(since) = &options.since else {
        if options.backing_name.is_some() || options.previous.is_some() {
            return Err(BackupFault::FullWithBacking.into());
        }
        return Ok(None);
    };
    let file = options.backing_name.clone().ok_or(BackupFault::NoBackingName)?;
    let manifest_sha256 = options.previous.as_ref().map(|previous| previous.sha256);
    Ok(Some(Link { file, since: State::of(since).file, manifest_sha256 }))
}

/// Refuses to store changes since a state on top of a backup of another.
pub(crate) fn check_previous(previous: &Manifest, since: &snapshot::State) -> Result<(), BackupFault> {
    let (found, expected) = (&previous.state, State::of(since));
    if found.file != expected.file {
        return Err(BackupFault::OtherState { found: found.file.clone(), expected: expected.file });
    }
    match found.is_same_snapshot(&expected) {
        Some(false) => Err(BackupFault::OtherSnapshot { file: expected.file }),
        _ => Ok(()),
    }
}
