//! Snapshots of a disk in use.

use std::path::PathBuf;
use std::time::Duration;

use parking_lot::MutexGuard;
use vmstrata_store::Gate;

use super::Disk;
use super::settle::Unsettled;
use super::switch::{NewNames, Switch};
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Format;
use crate::layers::Top;
use crate::snapshot::{PrepareOptions, Prepared, SnapshotInfo, group_broken, make_ready};

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
    /// returns, the snapshot is on stable storage, and settled ([`Disk::settle`]).
    ///
    /// # Errors
    /// A disk that takes no writes, a name that is taken or none, a host that cannot make the files: nothing has changed.
    /// Or a host that cannot flush or write what was active: the disk takes no more writes.
    pub fn snapshot(&self, info: &SnapshotInfo) -> Result<Taken> {
        let mut taken = snapshot_together(&[self], info)?;
        self.settle()?;
        Ok(taken.pop().expect("one for each disk"))
    }

    /// An overlay, not on stable storage yet, and what the active file will be called.
    fn prepare_snapshot(&self, info: &SnapshotInfo) -> Result<(Prepared, PathBuf)> {
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
        let options = PrepareOptions { format: Some(format), ..PrepareOptions::default() };
        make_ready(&self.path, info, &options).map_err(|error| error.in_file(&self.path))
    }
}

/// Takes a snapshot of several disks at one instant: no write is in one of them that began after one that is missing in
/// another had completed. As [`Disk::snapshot`] for each, but that something is left to do ([`Disk::settle`]); returned in
/// the order of `disks`.
///
/// # Errors
/// As [`Disk::snapshot`]. When a file system fails while the new overlays get the disks' names,
/// [`SnapshotFault::GroupBroken`] names those that have the snapshot.
///
/// # Panics
/// When a disk is named twice.
pub fn snapshot_together(disks: &[&Disk], info: &SnapshotInfo) -> Result<Vec<Taken>> {
    let mut changing = hold_all(disks);
    let infos = (0..).map(|number| info.for_disk(number));
    let prepared = disks
        .iter()
        .zip(infos)
        .map(|(disk, info)| disk.prepare_snapshot(&info))
        .collect::<Result<Vec<_>>>()?;
    let mut switches = Vec::with_capacity(disks.len());
    for (disk, (prepared, frozen)) in disks.iter().zip(&prepared) {
        switches.push(Switch::prepare(disk, NewNames { overlay: prepared.overlay(), frozen })?);
    }
    let layers: Vec<PathBuf> = prepared.iter().map(|(_, frozen)| frozen.clone()).collect();
    let linked = prepared.into_iter().map(|(mut prepared, frozen)| {
        prepared.link(frozen).map_err(|error| error.in_file(prepared.active()))?;
        Ok(prepared)
    });
    let linked = linked.collect::<Result<Vec<Prepared>>>()?;
    let (published, mut failed) = publish(switches, linked);
    let (uncommitted, pause) = Switch::make(published);
    let mut done = Vec::with_capacity(disks.len());
    for uncommitted in uncommitted {
        match uncommitted.commit() {
            Ok((disk, unsettled)) => {
                let held = changing.iter_mut().find(|(other, _)| std::ptr::eq(*other, disk));
                disk.leave_unsettled(unsettled, &mut held.expect("all are held").1);
                done.push(disk.path.display().to_string());
            }
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    if let Some(error) = failed {
        return Err(group_broken(done, error));
    }
    tracing::info!(snapshot = info.name, disks = disks.len(), pause_us = pause.as_micros(), "snapshot taken");
    Ok(layers.into_iter().map(|layer| Taken { layer, pause }).collect())
}

/// Lets the disks' names lead to the overlays, as far as the host lets it; returns the changes that are to be made.
fn publish<'disk>(
    switches: Vec<Switch<'disk>>,
    prepared: Vec<Prepared>,
) -> (Vec<Switch<'disk>>, Option<Error>) {
    let mut published = Vec::with_capacity(switches.len());
    for (switch, prepared) in switches.into_iter().zip(prepared) {
        // Once renamed, what is written must go to the overlay, or nowhere.
        let flushed =
            prepared.rename().map(|renamed| renamed.flush().map_err(|error| switch.disk().latch(error)));
        match flushed.and_then(|flushed| flushed) {
            Ok(()) => published.push(switch),
            Err(error) => return (published, Some(error)),
        }
    }
    (published, None)
}

/// Keeps others from changing the disks' layers. Always in the same order, whoever asks.
fn hold_all<'a>(disks: &[&'a Disk]) -> Vec<(&'a Disk, MutexGuard<'a, Option<Unsettled>>)> {
    let mut ordered = disks.to_vec();
    ordered.sort_by_key(|disk| std::ptr::from_ref::<Disk>(disk));
    let is_twice = |pair: &[&Disk]| std::ptr::eq(pair[0], pair[1]);
    assert!(!ordered.windows(2).any(is_twice), "each disk is named once");
    ordered.into_iter().map(|disk| (disk, disk.change())).collect()
}
