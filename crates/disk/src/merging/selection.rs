//! Which layers are meant, whatever happens to names and numbers meanwhile.
//!
//! A disk in use gets layers while others are dropped, a name that has become free may be given again, and so may the number of a
//! file: the file of a dropped layer even stays, as that of the next one, where layers are committed. So a layer is known by
//! its file and by what is recorded of it as a snapshot, where nothing is by its file and its place.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use vmstrata_store::{FileId, Gate};

use super::{MergeFault, MergeRange};
use crate::chain::OpenOptions;
use crate::error::{Error, Result};
use crate::layers::index_of;
use crate::opener::{LocalFiles, Opener as _};
use crate::snapshots::{self, Snapshot};

/// A layer of a disk's chain, as somebody says which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerRef {
    /// By its number of now, counted from the base, which is 0.
    Number(usize),
    /// By its file, whatever path leads there.
    File(PathBuf),
}

/// Layers of a disk that are to be dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    layers: Vec<LayerId>,
    /// They were not chosen as snapshots of the disk.
    beyond_own: bool,
}

/// A layer, as it is known again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerId {
    file: FileId,
    what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    /// A snapshot, by its name and its time, which no other has.
    Snapshot(String, u64),
    /// A layer without a record, at this place.
    Nameless(PathBuf),
}

impl LayerId {
    fn of(layer: &Snapshot) -> Self {
        let what = match &layer.info {
            Some(info) => What::Snapshot(info.name.clone(), info.taken_ns),
            // Links may lead there otherwise when a layer above is gone.
            None => What::Nameless(layer.layer.canonicalize().unwrap_or_else(|_| layer.layer.clone())),
        };
        Self { file: layer.file, what }
    }
}

impl Selection {
    /// These snapshots of the disk. `A..B` is the snapshots A and B, in either order, and all layers between them; a snapshot
    /// that is called so goes first.
    ///
    /// # Errors
    /// No such snapshot; otherwise as [`snapshots::list`].
    pub fn named(disk: &Path, names: &[String], options: &OpenOptions) -> Result<Self> {
        Self::named_in(disk, names, &snapshots::list(disk, options)?)
    }

    pub(super) fn named_in(disk: &Path, names: &[String], snapshots: &[Snapshot]) -> Result<Self> {
        // The newest of that name is the one people mean.
        let depth_of = |name: &str| {
            let found = snapshots::pick(snapshots, name).map_err(|error| error.in_file(disk))?;
            Ok::<_, Error>(found.depth - 1)
        };
        let mut layers = Vec::with_capacity(names.len());
        for name in names {
            let (from, to) = match (depth_of(name), name.split_once("..")) {
                (Ok(depth), _) => (depth, depth),
                (Err(_), Some((from, to))) => (depth_of(from)?, depth_of(to)?),
                (Err(error), None) => return Err(error),
            };
            layers.extend(snapshots[from.min(to)..=from.max(to)].iter().map(LayerId::of));
        }
        Ok(Self { layers, beyond_own: false })
    }

    /// All layers from one to the other, in either order, with or without names. which those are is decided here; whether they
    /// may be dropped, which takes [`MergeOptions::beyond_own`] below the end of the disk's own history, when they are.
    ///
    /// [`MergeOptions::beyond_own`]: super::MergeOptions::beyond_own
    ///
    /// # Errors
    /// No such layer below the active one; otherwise as [`snapshots::list`].
    pub fn between(disk: &Path, one: &LayerRef, other: &LayerRef, options: &OpenOptions) -> Result<Self> {
        let layers = snapshots::list(disk, options)?;
        let (one, other) = (number_of(one, disk, &layers)?, number_of(other, disk, &layers)?);
        let numbers = one.min(other)..=one.max(other);
        refuse_outside(&numbers, disk, &layers)?;
        Ok(Self { layers: known_of(&layers, |number| numbers.contains(&number)), beyond_own: true })
    }

    /// All layers between `base`, which stays with all that it stands on, and the disk's active one.
    ///
    /// # Errors
    /// No such layer below the active one; otherwise as [`snapshots::list`].
    pub fn above(disk: &Path, base: &LayerRef, options: &OpenOptions) -> Result<Self> {
        let layers = snapshots::list(disk, options)?;
        let base = number_of(base, disk, &layers)?;
        refuse_outside(&(base..=base), disk, &layers)?;
        Ok(Self { layers: known_of(&layers, |number| number > base), beyond_own: false })
    }

    /// All layers below the disk's active one.
    ///
    /// # Errors
    /// As [`snapshots::list`].
    pub fn below(disk: &Path, options: &OpenOptions) -> Result<Self> {
        Ok(Self { layers: known_of(&snapshots::list(disk, options)?, |_| true), beyond_own: false })
    }

    /// Refuses layers among which the disk has named snapshots: their states are lost.
    ///
    /// # Errors
    /// [`MergeFault::LosesSnapshots`]; otherwise as [`snapshots::list`].
    pub fn refuse_loss(&self, disk: &Path, options: &OpenOptions) -> Result<()> {
        let layers = snapshots::list(disk, options)?;
        let own = layers.iter().filter(|layer| layer.is_own() && self.has(layer));
        let names: Vec<String> = own.filter_map(|layer| layer.name().map(str::to_owned)).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(Error::from(MergeFault::LosesSnapshots { names }).in_file(disk))
    }

    /// Where those are that the disk still stands on, in as few ranges as possible, the newest first: in that order no range
    /// moves another.
    ///
    /// # Errors
    /// What would be copied into a layer of another disk; otherwise as [`snapshots::list`].
    pub fn ranges(&self, disk: &Path, options: &OpenOptions) -> Result<Vec<MergeRange>> {
        self.ranges_in(disk, &snapshots::list(disk, options)?)
    }

    pub(super) fn ranges_in(&self, disk: &Path, snapshots: &[Snapshot]) -> Result<Vec<MergeRange>> {
        let mut ranges: Vec<MergeRange> = Vec::new();
        for snapshot in snapshots.iter().filter(|snapshot| self.has(snapshot)) {
            let layer = snapshot.number;
            match ranges.last_mut() {
                Some(range) if range.first.index() == layer + 1 => range.first = index_of(layer),
                _ => ranges.push(MergeRange { first: index_of(layer), last: index_of(layer) }),
            }
        }
        if self.beyond_own {
            return Ok(ranges);
        }
        // All are looked at before the first is merged.
        let target = |range: &MergeRange| snapshots.iter().rev().nth(range.target().index());
        match ranges.iter().find_map(|range| target(range)?.owner.clone()) {
            Some(owner) => Err(Error::from(MergeFault::OfAnotherDisk { disk: owner }).in_file(disk)),
            None => Ok(ranges),
        }
    }

    fn has(&self, layer: &Snapshot) -> bool {
        // Finding out where a layer is takes a system call for each part of its path.
        self.layers.iter().any(|known| known.file == layer.file && *known == LayerId::of(layer))
    }
}

/// Those whose numbers are wanted.
fn known_of(layers: &[Snapshot], wanted: impl Fn(usize) -> bool) -> Vec<LayerId> {
    layers.iter().filter(|layer| wanted(layer.number)).map(LayerId::of).collect()
}

/// The number of a layer, if it is there.
fn number_of(layer: &LayerRef, disk: &Path, layers: &[Snapshot]) -> Result<usize> {
    let path = match layer {
        LayerRef::Number(number) => return Ok(*number),
        LayerRef::File(path) => path,
    };
    let file = LocalFiles.identity(path, &Gate::unrestricted())?.file;
    let found = layers.iter().find(|layer| layer.file == file);
    let fault = || Error::from(MergeFault::NotALayer { path: path.clone() }).in_file(disk);
    found.map(|layer| layer.number).ok_or_else(fault)
}

/// Refuses numbers of layers that are not there below the active one.
fn refuse_outside(numbers: &RangeInclusive<usize>, disk: &Path, layers: &[Snapshot]) -> Result<()> {
    let (first, last) = (*numbers.start(), *numbers.end());
    if last < layers.len() {
        return Ok(());
    }
    Err(Error::from(MergeFault::Range { first, last, layers: layers.len() + 1 }).in_file(disk))
}
