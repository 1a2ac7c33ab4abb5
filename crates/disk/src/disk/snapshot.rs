//! Snapshots of a disk in use.

use std::path::PathBuf;
use std::time::Duration;

use vmstrata_store::Gate;

use super::Disk;
use super::state::Changing;
use super::switch::{NewNames, Switch};
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Format;
use crate::layers::Top;
use crate::snapshots::{
    Prepared, SnapshotFault, SnapshotInfo, check_ready, group_broken, list, prepare_live,
};

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The layer that holds the state of the disk at that moment.
    pub layer: PathBuf,
    /// For how long writes were held; reads were not.
    pub pause: Duration,
    /// Whether the disk was a raw file: its path is qcow2 from now on.
    pub was_raw: bool,
}

impl Disk {
    /// Takes a snapshot: what is active becomes a frozen layer called after `info.name`, and an empty overlay takes the
    /// writes from now on, under the disk's own path.
    ///
    /// Everything that completed before the call is in the snapshot, nothing that begins after it returned is. When it
    /// returns, the snapshot is on stable storage, and finalized ([`Disk::finalize`]).
    ///
    /// # Errors
    /// A disk that takes no writes, a name that is taken or none, a host that cannot make the files: nothing has changed.
    /// Or a host that cannot flush or write what was active: the disk takes no more writes.
    pub fn snapshot(&self, info: &SnapshotInfo) -> Result<Taken> {
        let mut taken = snapshot_together(&[self], info)?;
        self.finalize()?;
        Ok(taken.pop().expect("one for each disk"))
    }

    /// How the active layer's file is written; refuses a disk that takes no writes, or whose name leads to another file.
    pub(super) fn active_format(&self) -> Result<Format> {
        self.check_changeable()?;
        self.home().options.check_beside(self.path())?;
        let (format, file) = match &self.layers_now().top {
            Top::Qcow2(active) => (Format::Qcow2, active.identity.file),
            Top::Raw(raw) => (Format::Raw, raw.identity.file),
            Top::Frozen => return Err(Error::from(ErrorKind::ReadOnly).in_file(self.path())),
        };
        let opener = self.resources.files().opener();
        if opener.identity(self.path(), &Gate::unrestricted())?.file != file {
            return Err(Error::from(ErrorKind::Changed).in_file(self.path()));
        }
        Ok(format)
    }

    /// Refuses a snapshot that cannot be taken, having changed nothing.
    fn check_snapshot(&self, info: &SnapshotInfo, convert_raw: bool) -> Result<()> {
        let format = self.active_format()?;
        if format == Format::Raw && !convert_raw {
            return Err(Error::from(SnapshotFault::StaysRaw).in_file(self.path()));
        }
        self.check_name(&info.name)?;
        check_ready(self.path(), info, (format, self.home().options.subclusters))
            .map_err(|error| error.in_file(self.path()))
    }

    /// Refuses a name that the chain has, under whatever file name: the older state could not be named any more.
    fn check_name(&self, name: &str) -> Result<()> {
        let mut names = self.snapshot_names.lock();
        // While the disk is open, this process alone gives its chain new names; what was deleted is looked for again.
        if names.as_ref().is_some_and(|names| !names.contains(name)) {
            return Ok(());
        }
        let snapshots = match list(self.path(), &self.options()) {
            Ok(snapshots) => snapshots,
            Err(error) => {
                // The disk itself reads what it opened: it goes on, and so do its snapshots.
                tracing::warn!(disk = %self.path().display(), %error, "its snapshots cannot be listed: taken names are not known");
                return Ok(());
            }
        };
        let known = snapshots.iter().filter_map(|snapshot| snapshot.name().map(str::to_owned));
        *names = Some(known.collect());
        match snapshots.into_iter().find(|snapshot| snapshot.name() == Some(name)) {
            Some(taken) => {
                let fault = SnapshotFault::NameTaken { name: name.to_owned(), layer: taken.layer };
                Err(Error::from(fault).in_file(self.path()))
            }
            None => Ok(()),
        }
    }

    /// An overlay, not on stable storage yet, and what the active file will be called.
    fn prepare_snapshot(&self, info: &SnapshotInfo) -> Result<(Prepared, PathBuf)> {
        let how = (self.active_format()?, self.home().options.subclusters);
        let ready = prepare_live(self.path(), info, how);
        let ready = ready.map_err(|error| error.in_file(self.path()))?;
        if let Some(names) = &mut *self.snapshot_names.lock() {
            names.insert(info.name.clone());
        }
        Ok(ready)
    }
}

/// Some disks whose layers are held: a snapshot of them is checked before a guest is stopped for it.
#[derive(Debug)]
pub struct Together<'disk> {
    disks: Vec<&'disk Disk>,
    changing: Vec<(&'disk Disk, Changing<'disk>)>,
}

impl<'disk> Together<'disk> {
    /// Waits until the layers of these disks are not being changed, and finalizes their last snapshots.
    ///
    /// # Panics
    /// When a disk is named twice.
    pub fn of(disks: &[&'disk Disk]) -> Self {
        Self { disks: disks.to_vec(), changing: hold_all(disks) }
    }

    /// Refuses a snapshot that could not be taken of all of them, before anything is done for it; of a raw disk unless its path
    /// may become qcow2 (`convert_raw`).
    ///
    /// # Errors
    /// A disk that takes no writes, a name that is taken or none, a record that does not fit, a raw disk: nothing has changed.
    pub fn check(&self, info: &SnapshotInfo, convert_raw: bool) -> Result<()> {
        let infos = (0..).map(|number| info.for_disk(number));
        self.disks.iter().zip(infos).try_for_each(|(disk, info)| disk.check_snapshot(&info, convert_raw))
    }
}

/// Takes a snapshot of several disks at one instant: no write is in one of them that began after one that is missing in
/// another had completed; the path of a raw one becomes qcow2. As [`Disk::snapshot`] for each, but that something is left to do ([`Disk::finalize`]); returned in
/// the order of `disks`.
///
/// # Errors
/// As [`Disk::snapshot`]. When a file system fails while the new overlays get the disks' names,
/// [`SnapshotFault::GroupBroken`] names those that have the snapshot.
///
/// # Panics
/// When a disk is named twice.
pub fn snapshot_together(disks: &[&Disk], info: &SnapshotInfo) -> Result<Vec<Taken>> {
    let together = Together::of(disks);
    together.check(info, true)?;
    together.take(info, || {})
}

impl Together<'_> {
    /// Takes the snapshot, which was checked. Calls `cut` as soon as writes go to the new layers: who stood still for it may go on,
    /// while the snapshot is brought to stable storage.
    ///
    /// # Errors
    /// As [`snapshot_together`]; `cut` may not have been called then.
    pub fn take(self, info: &SnapshotInfo, cut: impl FnOnce()) -> Result<Vec<Taken>> {
        let Self { disks, mut changing } = self;
        take_all(&disks, &mut changing, info, cut)
    }
}

fn take_all<'disk>(
    disks: &[&'disk Disk],
    changing: &mut [(&'disk Disk, Changing<'disk>)],
    info: &SnapshotInfo,
    cut: impl FnOnce(),
) -> Result<Vec<Taken>> {
    let infos = (0..).map(|number| info.for_disk(number));
    let were_raw: Vec<bool> = disks.iter().map(|disk| matches!(disk.layers_now().top, Top::Raw(_))).collect();
    let prepared = disks.iter().zip(infos).map(|(disk, info)| disk.prepare_snapshot(&info));
    let prepared = prepared.collect::<Result<Vec<_>>>()?;
    let mut switches = Vec::with_capacity(disks.len());
    for (disk, (prepared, frozen)) in disks.iter().zip(&prepared) {
        switches.push(Switch::prepare(
            disk,
            NewNames { overlay: prepared.overlay(), frozen, path: disk.path() },
        )?);
    }
    let layers: Vec<PathBuf> = prepared.iter().map(|(_, frozen)| frozen.clone()).collect();
    let linked = prepared.into_iter().map(|(prepared, frozen)| link(prepared, frozen));
    let (published, mut failed) = publish(switches, linked.collect::<Result<_>>()?);
    let (uncommitted, pause) = Switch::make(published, || {});
    cut();
    for disk in disks {
        disk.resources.maintenance().layer_is_new();
    }
    let mut done = Vec::with_capacity(disks.len());
    for (disk, pending) in uncommitted {
        match disk.commit_frozen(&pending) {
            Ok(()) => {
                let held = changing.iter_mut().find(|(other, _)| std::ptr::eq(*other, disk));
                held.expect("all are held").1.pending = Some(pending);
                done.push(disk.path().display().to_string());
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
    Ok(layers.into_iter().zip(were_raw).map(|(layer, was_raw)| Taken { layer, pause, was_raw }).collect())
}

/// Gives the active file the name by which the overlay knows it.
fn link(mut prepared: Prepared, frozen: PathBuf) -> Result<Prepared> {
    prepared.link(frozen).map_err(|error| error.in_file(prepared.active()))?;
    Ok(prepared)
}

/// Lets the disks' names lead to the overlays, as far as the host lets it; returns the changes that are to be made.
fn publish<'disk>(
    switches: Vec<Switch<'disk>>,
    prepared: Vec<Prepared>,
) -> (Vec<Switch<'disk>>, Option<Error>) {
    let mut published = Vec::with_capacity(switches.len());
    for (switch, mut prepared) in switches.into_iter().zip(prepared) {
        let flushed = prepared.rename().and_then(|()| {
            // Once renamed, what is written must go to the overlay, or nowhere.
            prepared.flush_names().map_err(|error| switch.disk.fail(error))
        });
        match flushed {
            Ok(()) => published.push(switch),
            Err(error) => return (published, Some(error)),
        }
    }
    (published, None)
}

/// Keeps others from changing the disks' layers. Always in the same order, so that two callers do not deadlock.
fn hold_all<'a>(disks: &[&'a Disk]) -> Vec<(&'a Disk, Changing<'a>)> {
    let mut ordered = disks.to_vec();
    ordered.sort_by_key(|disk| std::ptr::from_ref::<Disk>(disk));
    let is_twice = |pair: &[&Disk]| std::ptr::eq(pair[0], pair[1]);
    assert!(!ordered.windows(2).any(is_twice), "each disk is named once");
    ordered.into_iter().map(|disk| (disk, disk.change())).collect()
}
