//! A tiered disk gets another version of its base below what it has of its own.
//!
//! ```text
//!   repository   v1 ◄── own                      this host   ◄── epochs ◄── active layer
//!   afterwards   v2 ◄── what differs from v2                 ◄── active layer
//! ```
//!
//! What the host has not published is in the new layer as far as v2 has it not: it is never shipped by itself.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::{Disk, OpenOptions, Resources};

use crate::attach::{point_at, share};
use crate::copies::{Claimed, claim, newest_cut, open_options, take_over};
use crate::dense::ship_state;
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch};
use crate::pending::Pending;
use crate::pin::Pin;
use crate::place::Place;
use crate::stand::pins_of;

/// What [`rebase`] and [`Rebasing`](crate::Rebasing) have made: an overlay on a layer.
#[derive(Clone, Copy, Debug)]
pub struct Draft<'a> {
    /// The disk, as its host has it: a layer that no guest writes meanwhile.
    pub disk: &'a Path,
    /// The layer.
    pub onto: &'a Path,
    /// Where the overlay goes, which is to read as the disk.
    pub path: &'a Path,
    /// Directories in which layers of both lie.
    pub layers: [&'a Path; 2],
}

/// Has a disk that is not served stand on the published layer `onto` of another disk, as its next epoch. `make` makes the draft, flushed and
/// compared. Snapshots of the disk keep what they stand on.
///
/// # Errors
/// A disk of a group, snapshots that wait to be published, a base on another file system, what `make` reports: the disk is then as it was. As [`take_over`]: then the disk has to be
/// taken over.
pub fn rebase<E: From<Error>>(
    place: &Place,
    onto: &Path,
    open: &OpenOptions,
    resources: &Arc<Resources>,
    make: impl FnOnce(Draft<'_>) -> Result<(), E>,
) -> Result<(), E> {
    if let Some(group) = place.group_name() {
        return Err(Error::of_group(group)("a disk of a group keeps its base".to_owned()).into());
    }
    let opens = [open.clone()];
    let Claimed { copy, mut publisher, .. } = claim(place, &opens, resources, |repository| repository)?;
    // They would go with the copy.
    if !Pending::of(&place.local)?.all().is_empty() {
        let epoch = publisher.head().epoch.number;
        return Err(Error::NotAllPublished { copy: place.local.clone(), epoch }.into());
    }
    let open = open_options(place, open);
    let (disk, path) = (place.disk(), draft_of(place));
    // What a killed server had not flushed belongs to it.
    let opened = Disk::open(&disk, &open, resources).map_err(Error::from)?;
    let size = opened.size();
    opened.close().map_err(Error::from)?;
    drop(opened);
    let number = publisher.head().epoch.number.max(newest_cut(place, &open)?).next();
    let mut objects = share(place, onto)?;
    let below = objects.last().expect("a state has a layer").id;
    remove_if_there(&path)?;
    let layer = place.layer(below);
    make(Draft { disk: &disk, onto: &layer, path: &path, layers: [&place.local, &place.repository] })?;
    objects.push(ship_state(&**publisher.repository(), &path, Some(below), &open, resources)?);
    remove_if_there(&path)?;
    let state = DiskState { name: place.name(), size, objects };
    publisher.publish(Epoch { number, time_ns: now_ns(), disks: vec![state] })?;
    let (repository, owner) = (Arc::clone(publisher.repository()), publisher.head().owner);
    drop((copy, publisher));
    let (head, aside) = take_over(place, &open, resources)?;
    point_at(place, &head.epoch)?;
    let Some(aside) = aside else { return Ok(()) };
    // It reads as what is published.
    fs::remove_dir_all(&aside).map_err(Error::of_file(&aside, "remove the old copy"))?;
    tracing::info!(copy = %aside.display(), "removed: the disk stands on another version of its base");
    let release = |pin: Pin| pin.release(&*repository);
    Ok(pins_of(&*repository, owner)?.into_iter().try_for_each(release)?)
}

/// Where the overlay is made.
pub(crate) fn draft_of(place: &Place) -> PathBuf {
    place.local.join("rebased.qcow2")
}

pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::of_file(path, "remove")(error)),
        _ => Ok(()),
    }
}
