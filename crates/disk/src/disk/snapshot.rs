//! Snapshots of a disk in use.

use std::path::PathBuf;
use std::time::Duration;

use parking_lot::MutexGuard;
use vmstrata_store::Gate;

use super::Disk;
use super::switch::{NewNames, Switch};
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Format;
use crate::layers::Top;
use crate::snapshot::{PrepareOptions, Prepared, SnapshotInfo, prepare};

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The layer that holds the state of the disk at that moment.
    pub layer: PathBuf,
    /// For how long writes were held; reads were not.
    pub pause: Duration,
}

impl Disk {
    /// Takes a snapshot: what is active becomes a frozen layer called after `info.name`, and an empty overlay takes the
    /// writes from now on, under the disk's own path.
    ///
    /// Everything that completed before the call is in the snapshot, nothing that begins after it returned is. When it
    /// returns, the snapshot is on stable storage.
    ///
    /// # Errors
    /// A disk that takes no writes, a name that is taken or none, a host that cannot make the files: nothing has changed.
    /// Or a host that cannot flush or write what was active: the disk takes no more writes.
    pub fn snapshot(&self, info: &SnapshotInfo) -> Result<Taken> {
        let mut taken = snapshot_together(&[self], info)?;
        Ok(taken.pop().expect("one for each disk"))
    }

    fn prepare_snapshot(&self, info: &SnapshotInfo) -> Result<Prepared> {
        self.check_writable()?;
        let (format, file) = match &self.layers_now().top {
            Top::Qcow2(active) => (Format::Qcow2, active.identity.file),
            Top::Raw(raw) => (Format::Raw, raw.identity.file),
            Top::Frozen => unreachable!("checked to be writable"),
        };
        let opener = self.resources.files().opener();
        if opener.identity(&self.path, &Gate::unrestricted())?.file != file {
            return Err(Error::from(ErrorKind::Changed).in_file(&self.path));
        }
        prepare(&self.path, info, &PrepareOptions { format: Some(format), ..PrepareOptions::default() })
    }
}

/// Takes a snapshot of several disks at one instant: no write is in one of them that began after one that is missing in
/// another had completed. As [`Disk::snapshot`] for each; returned in the order of `disks`.
///
/// # Errors
/// As [`Disk::snapshot`]. When a file system fails while the new overlays get the disks' names, disks that come before it
/// have the snapshot, and it and those after it do not.
///
/// # Panics
/// When a disk is named twice.
pub fn snapshot_together(disks: &[&Disk], info: &SnapshotInfo) -> Result<Vec<Taken>> {
    let _changing = hold_all(disks);
    let prepared = disks.iter().map(|disk| disk.prepare_snapshot(info)).collect::<Result<Vec<_>>>()?;
    let layers: Vec<PathBuf> = prepared.iter().map(|prepared| prepared.frozen_path().to_owned()).collect();
    let mut switches = Vec::with_capacity(disks.len());
    for (disk, prepared) in disks.iter().zip(&prepared) {
        let names = NewNames { overlay: prepared.overlay(), frozen: prepared.frozen_path() };
        switches.push(Switch::prepare(disk, names)?);
    }
    let mut published = Vec::with_capacity(disks.len());
    let mut failed = None;
    for (switch, prepared) in switches.into_iter().zip(prepared) {
        // Once renamed, what is written must go to the overlay, or nowhere.
        let flushed =
            prepared.rename().map(|renamed| renamed.flush().map_err(|error| switch.disk().latch(error)));
        match flushed.and_then(|flushed| flushed) {
            Ok(()) => published.push(switch),
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    let (unsettled, pause) = Switch::make(published);
    for unsettled in unsettled {
        if let Err(error) = unsettled.settle() {
            failed.get_or_insert(error);
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    tracing::info!(snapshot = info.name, disks = disks.len(), pause_us = pause.as_micros(), "snapshot taken");
    Ok(layers.into_iter().map(|layer| Taken { layer, pause }).collect())
}

/// Keeps others from changing the disks' layers. Always in the same order, whoever asks.
fn hold_all<'a>(disks: &[&'a Disk]) -> Vec<MutexGuard<'a, ()>> {
    let mut ordered = disks.to_vec();
    ordered.sort_by_key(|disk| std::ptr::from_ref::<Disk>(disk));
    let is_twice = |pair: &[&Disk]| std::ptr::eq(pair[0], pair[1]);
    assert!(!ordered.windows(2).any(is_twice), "each disk is named once");
    ordered.into_iter().map(|disk| disk.changing.lock()).collect()
}
