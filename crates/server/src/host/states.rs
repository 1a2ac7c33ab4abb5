//! Which file a disk's state is: the active one, a snapshot's layer, or a clone that may have to be made.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use vmstrata_disk::snapshot::Snapshot;
use vmstrata_disk::{Format, OpenOptions, check_locks, snapshot};
use vmstrata_migrate::source_directory;
use vmstrata_nbd::Uri;
use vmstrata_store::FileId;

use crate::error::Error;
use crate::spec::{CloneOf, DiskSpec, SpecError, StateError};

/// How the files of a disk are opened whose backing files may lie in `allow_backing`, too.
pub(super) fn open_options(spec: &DiskSpec, allow_backing: &[PathBuf]) -> OpenOptions {
    // What is said of a clone's format is said of the disk that it starts from: a clone is always an overlay.
    let format = if spec.clone_of.is_some() { Some(Format::Qcow2) } else { spec.format };
    let mut backing = spec.backing.clone().unwrap_or_else(|| allow_backing.to_vec());
    backing.extend(source_directory(&spec.path));
    // It lies beside the clone.
    backing.extend(spec.stand_in().filter(|directory| directory.is_dir()));
    OpenOptions {
        read_only: spec.read_only,
        force: spec.force,
        cache: spec.cache,
        detect_zeroes: spec.detect_zeroes,
        subclusters: spec.subclusters,
        allow_backing: backing,
        allow_backing_alone: spec.backing.is_some(),
        format,
        ..OpenOptions::default()
    }
}

/// Reads the headers of the chain that is opened for `spec`, and looks at its files' locks, but for those of files that `passes`.
/// A clone that is to be made is not opened: its snapshot is looked for.
///
/// # Errors
/// As [`make_clone`] and [`find`], a layer that cannot be read, and one that is in use.
pub(crate) fn look_at(
    spec: &DiskSpec,
    allow_backing: &[PathBuf],
    passes: impl Fn(FileId) -> bool,
) -> Result<(), Error> {
    let spec = &spec.clone().where_it_is();
    // Its server tells who has it.
    if Uri::is_meant(&spec.path) {
        return Ok(());
    }
    if let Some(tier) = &spec.tier {
        // Its layers are this host's own, whose locks the other server has; its image is of no use once it is published elsewhere.
        if tier.repository.is_some() {
            return Ok(());
        }
        return spec
            .path
            .metadata()
            .map(drop)
            .map_err(|source| Error::System { action: "find the disk", source });
    }
    if spec.local.is_some() && spec.path.symlink_metadata().is_err() {
        return Ok(());
    }
    let options = open_options(spec, allow_backing);
    if let Some(clone_of) = &spec.clone_of {
        if spec.path.symlink_metadata().is_err() {
            snapshot::find(&clone_of.disk, &clone_of.snapshot, &of_origin(spec, options))?;
            return Ok(());
        }
        check_clone(spec, clone_of, &options)?;
    }
    let (path, options) = find(spec, options)?;
    Ok(check_locks(&path, &options, passes)?)
}

/// Makes the clone that `spec` is of a snapshot, if it is one and is not there.
///
/// One that is there is taken as it is, so that a server that is started again goes on with it.
///
/// # Errors
/// No such snapshot, another file in the clone's place; whatever the host reports.
pub(super) fn make_clone(spec: &DiskSpec, options: OpenOptions) -> Result<(), Error> {
    let Some(clone_of) = &spec.clone_of else { return Ok(()) };
    if spec.path.symlink_metadata().is_ok() {
        return check_clone(spec, clone_of, &options);
    }
    let options = of_origin(spec, options);
    let layer = snapshot::clone(&clone_of.disk, &clone_of.snapshot, &spec.path, &options)?;
    tracing::info!(clone = %spec.path.display(), layer = %layer.display(), "made a clone");
    Ok(())
}

impl DiskSpec {
    /// Refuses what there is not of a disk that stays on this host.
    pub(super) fn refuse_if_local(&self, what: &'static str) -> Result<(), Error> {
        match self.local {
            Some(local) => Err(Error::Local { name: self.name.clone(), role: local.role.as_str(), what }),
            None => Ok(()),
        }
    }
}

/// Makes the file of a disk that stays on this host, unless it is there: a guest of a server that was started again has its data on it.
///
/// # Errors
/// Another file in its place; what the host reports.
pub(super) fn make_local(spec: &DiskSpec) -> Result<(), Error> {
    let Some(local) = spec.local else { return Ok(()) };
    let bytes = local.bytes.get();
    let make = || {
        let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(&spec.path)?;
        let found = file.metadata()?;
        if found.is_file() && found.len() == 0 {
            file.set_len(bytes)?;
            tracing::info!(disk = spec.name, path = %spec.path.display(), bytes, role = local.role.as_str(), "made its file");
        }
        file.metadata()
    };
    let found = make().map_err(|source| Error::System { action: "make the disk's file", source })?;
    if found.is_file() && found.len() == bytes {
        return Ok(());
    }
    Err(SpecError::from(StateError::NotTheLocal { path: spec.path.clone(), bytes }).into())
}

/// Removes the file of a disk that stays on this host.
///
/// # Errors
/// What the host reports.
pub(super) fn remove_local(spec: &DiskSpec) -> Result<(), Error> {
    let Some(local) = spec.local else { return Ok(()) };
    match fs::remove_file(&spec.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        removed => removed.map_err(|source| Error::System { action: "remove the disk's file", source })?,
    }
    tracing::info!(disk = spec.name, path = %spec.path.display(), role = local.role.as_str(), "removed its file with it");
    Ok(())
}

/// The file to open for `spec`, and how.
///
/// # Errors
/// No such snapshot, one that is to be written; whatever the host reports.
pub(super) fn find(spec: &DiskSpec, options: OpenOptions) -> Result<(PathBuf, OpenOptions), Error> {
    if Uri::is_meant(&spec.path) {
        return Ok((spec.path.clone(), options));
    }
    let state = snapshot::resolve(&spec.path, &options)?;
    if state.info.is_some() && !spec.read_only {
        return Err(SpecError::from(StateError::Written { path: spec.path.clone() }).into());
    }
    let options = state.open_options(options);
    Ok((state.path, options))
}

/// How the disk is looked at that a clone starts from.
fn of_origin(spec: &DiskSpec, clone: OpenOptions) -> OpenOptions {
    OpenOptions { format: spec.format, ..clone }
}

/// Refuses a file that visibly is something else than this clone. Flattened, reverted or with layers dropped, a clone does not
/// stand on that snapshot any more, and is the same disk still.
fn check_clone(spec: &DiskSpec, clone_of: &CloneOf, options: &OpenOptions) -> Result<(), Error> {
    let layers = snapshot::list(&spec.path, options)?;
    if !stands_on_another(&layers, spec, clone_of, options) {
        return Ok(());
    }
    let (path, CloneOf { disk, snapshot }) = (spec.path.clone(), clone_of.clone());
    Err(SpecError::from(StateError::NotTheClone { path, disk, snapshot }).into())
}

/// Whether layers below a clone say that it is another disk's, or one of a newer snapshot.
fn stands_on_another(
    layers: &[Snapshot],
    spec: &DiskSpec,
    clone_of: &CloneOf,
    options: &OpenOptions,
) -> bool {
    let asked = Some(clone_of.snapshot.as_str());
    let foreign: Vec<&Snapshot> = layers.iter().filter(|layer| layer.origin.is_some()).collect();
    if foreign.iter().position(|layer| layer.name() == asked).is_some_and(|at| at > 0) {
        return true;
    }
    let origin = clone_of.disk.file_name().unwrap_or_default().to_string_lossy();
    if foreign.iter().any(|layer| layer.origin.as_deref() == Some(&*origin)) {
        return false;
    }
    let unnamed = || layers.iter().any(|layer| layer.info.is_none() && layer.damage.is_none());
    if foreign.is_empty() && !unnamed() {
        // Nothing but snapshots of its own.
        return false;
    }
    // What does not say whose it is may still be a layer of the disk that it came from. That one may be gone by now.
    let Ok(chain) = snapshot::list(&clone_of.disk, &of_origin(spec, options.clone())) else {
        return !foreign.is_empty();
    };
    let file = |layer: &Snapshot| layer.layer.metadata().map(|file| (file.dev(), file.ino())).ok();
    let chain: HashSet<(u64, u64)> = chain.iter().filter_map(file).collect();
    !layers.iter().filter_map(file).any(|layer| chain.contains(&layer))
}

#[cfg(test)]
mod tests {
    use vmstrata_api as api;

    use super::*;

    #[test]
    fn a_tiered_disk_needs_its_image_unless_it_is_published_elsewhere() {
        let look = |repository: Option<&str>| {
            let (path, tier) = ("/none/web.qcow2".to_owned(), Some("/tier".to_owned()));
            let repository = repository.map(str::to_owned);
            let asked = api::DiskSpec { path, tier, repository, ..api::DiskSpec::default() };
            look_at(&asked.try_into().unwrap(), &[], |_| false)
        };
        look(Some("hdfs://namenode/vms/web")).unwrap();
        assert!(look(None).unwrap_err().to_string().contains("find the disk"));
    }
}
