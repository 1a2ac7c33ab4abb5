//! What a host's copy of a disk stands on: layers of the repository, which a pin keeps.
//!
//! ```text
//!   repository   base ◄─ 1 ◄─ 2       pinned for the copy         merged: base' ◄─ 7
//!                             ▲                                                    ▲
//!   this host                 └─ epochs 3 to 7 ◄─ active layer                     └─ the same epochs: they hide what differs
//! ```
//!
//! The epochs on the host say all that has changed since the copy was made. So they may as well stand on any later state, and do once
//! the pin keeps much that the newest head does not need.
//!
//! Invariant: a pin is made before a layer stands on what it keeps, and released after none does. A killed process leaves a pin too many.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use vmstrata_disk::{Disk, SIDECAR};
use vmstrata_repo::Repository;
use vmstrata_store::proc::host_name;

use crate::error::Result;
use crate::head::{Epoch, Head, Object, ObjectId, OwnerId, PinId};
use crate::pin::{Pin, Purpose};

/// Bytes that are kept for a copy alone, until it is made to stand on other layers.
const DEAD_BYTES: u64 = 64 << 20;

/// Pins the epoch of a head for the copy of its owner, which is about to stand on it.
pub(crate) fn pin_for(repository: &dyn Repository, head: &Head) -> Result<Pin> {
    pin_as(repository, head, head.owner)
}

/// The same for a copy that another one's head is for.
pub(crate) fn pin_as(repository: &dyn Repository, head: &Head, owner: OwnerId) -> Result<Pin> {
    Pin::make_from(repository, head.clone(), Some(head.epoch.number), &copy_of(owner))
}

/// Pins an epoch for the copy of its owner before a head publishes it. Nothing that it names is deleted before the pin is made: the caller sees to that.
pub(crate) fn pin_first(repository: &dyn Repository, owner: OwnerId, epoch: Epoch) -> Result<Pin> {
    let pin = Pin { id: PinId::draw(), epoch, purpose: copy_of(owner) };
    pin.put(repository)?;
    Ok(pin)
}

fn copy_of(owner: OwnerId) -> Purpose {
    Purpose::Copy { owner, host: host_name() }
}

/// The pins of a copy, of which `pins` are all, whose disks stand on the layers `below`; `None` where one is missing. Releases the others.
///
/// # Errors
/// What the repository reports.
pub(crate) fn needed(
    repository: &dyn Repository,
    pins: Vec<Pin>,
    mut below: BTreeSet<ObjectId>,
) -> Result<Option<Vec<Pin>>> {
    let mut found = Vec::new();
    for pin in pins {
        let before = below.len();
        pin.epoch.disks.iter().for_each(|disk| _ = below.remove(&disk.newest()));
        if below.len() < before {
            found.push(pin);
        } else {
            pin.release(repository)?;
        }
    }
    Ok(below.is_empty().then_some(found))
}

/// The pins of a copy: of all that it may stand on.
///
/// # Errors
/// As [`Pin::all`].
pub(crate) fn pins_of(repository: &dyn Repository, owner: OwnerId) -> Result<Vec<Pin>> {
    let is_own = |pin: &Pin| pin.purpose.is_copy_of(owner);
    Ok(Pin::all(repository)?.into_iter().filter(is_own).collect())
}

/// The layer of the repository that the copy stands on, and the lowest layer of the copy, unless that takes writes.
pub(crate) fn border(disk: &Disk, repository: &Path) -> Option<(ObjectId, Option<PathBuf>)> {
    let layers = disk.layers();
    let own = layers.iter().position(|layer| layer.path.parent() != Some(repository))?;
    let below = layers[own.checked_sub(1)?].path.file_name()?.to_str().and_then(ObjectId::of)?;
    Some((below, (own + 1 < layers.len()).then(|| layers[own].path.clone())))
}

/// Deletes the indices, in the copy's directory, of layers of the repository that the copy does not stand on any more.
pub(crate) fn forget_indices(disks: &[Arc<Disk>], local: &Path) -> io::Result<()> {
    let layers: Vec<_> = disks.iter().flat_map(|disk| disk.layers()).collect();
    let mut indices = Vec::new();
    for entry in fs::read_dir(local)? {
        let name = entry?.file_name();
        let layer = name.to_str().and_then(|name| name.strip_suffix(SIDECAR));
        let is_used = |layer: &str| layers.iter().any(|used| used.path.file_name() == Some(layer.as_ref()));
        if layer.is_some_and(|layer| ObjectId::of(layer).is_some() && !is_used(layer)) {
            indices.push(local.join(name));
        }
    }
    indices.iter().try_for_each(fs::remove_file)
}

/// Whether pins keep much that this epoch does not need.
pub(crate) fn is_wasteful(pins: &[Pin], newest: &Epoch) -> bool {
    let stored =
        |objects: &mut dyn Iterator<Item = &Object>| objects.map(|object| object.stored).sum::<u64>();
    let live = stored(&mut newest.objects());
    let is_dead = |object: &&Object| newest.objects().all(|other| other.id != object.id);
    let dead = pins.iter().flat_map(|pin| pin.epoch.objects()).filter(is_dead);
    let dead: BTreeMap<ObjectId, &Object> = dead.map(|object| (object.id, object)).collect();
    stored(&mut dead.into_values()) >= DEAD_BYTES.max(live / 8)
}
