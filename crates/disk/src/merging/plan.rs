//! The chain that is to be merged, from its headers.

use std::path::Path;
use std::sync::Arc;

use vmstrata_qcow2::{LayerRecord, SnapshotInfo};
use vmstrata_types::LayerIndex;

use super::relink::Below;
use super::remove::dropped;
use super::selection::Selection;
use super::{MergeFault, MergeOptions};
use crate::chain::OpenOptions;
use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::layers::index_of;
use crate::loading::{Chain, freeze, read_chain};
use crate::map::FrozenMap;
use crate::names::disk_name;
use crate::opener::{Role, directory_of};
use crate::refs::{ChainFile, layers_of_others};
use crate::resources::Resources;
use crate::snapshots::{self, Held, name_from};

/// Layers to drop, both ends included; the layer above the last is the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeRange {
    /// The lowest.
    pub first: LayerIndex,
    /// The highest.
    pub last: LayerIndex,
}

impl MergeRange {
    /// The layer that everything is copied into.
    pub fn target(self) -> LayerIndex {
        index_of(self.last.index() + 1)
    }

    /// How many layers are dropped.
    ///
    /// # Panics
    /// When the last lies below the first, which no checked range does.
    pub fn count(self) -> usize {
        self.last.index() + 1 - self.first.index()
    }

    /// Refuses layers that the chain does not have below its top, files whose internal snapshots would change or go, and a target
    /// that is not the disk's own, unless that is allowed and no snapshot goes by it.
    pub(crate) fn check(self, chain: &[ChainFile], options: &MergeOptions) -> Result<(), MergeFault> {
        let (first, last, layers) = (self.first.index(), self.last.index(), chain.len());
        if first > last || last + 1 >= layers {
            return Err(MergeFault::Range { first, last, layers });
        }
        let goes = dropped(chain, self).into_iter().filter(|layer| options.removal.wants(layer).is_ok());
        let mut changed = goes.map(|layer| layer.file).chain([chain[self.target().index()].file]);
        let holds = |file| chain.iter().find(|link| link.file == file && link.internal > 0);
        if let Some(link) = changed.find_map(holds) {
            return Err(MergeFault::InternalSnapshots { path: link.path.clone(), count: link.internal });
        }
        self.refuse_held(chain, options)?;
        let of_others = layers_of_others(chain);
        let is_named = || chain[first + 1..=last + 1].iter().any(|link| link.info().is_some());
        if self.target().index() >= of_others || options.beyond_own && !is_named() {
            return Ok(());
        }
        let said = chain[last + 2..=of_others].iter().find_map(ChainFile::origin);
        let disk = said.or_else(|| disk_name(&chain[of_others - 1].path)).unwrap_or_default();
        Err(MergeFault::OfAnotherDisk { disk })
    }
}

impl MergeRange {
    /// Refuses to drop a snapshot that is held, unless it stays another disk's, with its file.
    pub(crate) fn refuse_held(self, chain: &[ChainFile], options: &MergeOptions) -> Result<(), MergeFault> {
        let disk = &chain[chain.len() - 1].path;
        for (layer, dropped) in (self.first.index()..=self.last.index()).rev().zip(dropped(chain, self)) {
            let is_lost = dropped.is_lost(options.removal);
            let held = |info: SnapshotInfo| Held::find(disk, &chain[layer].path, &info);
            if let Some(held) = chain[layer + 1].info().filter(|_| is_lost).and_then(held) {
                return Err(MergeFault::Held(held));
            }
        }
        Ok(())
    }
}

/// All layers below the top of a chain of `layers`; `None` when there are none.
///
/// # Panics
/// With more layers than a chain may have.
pub fn all_of(layers: usize) -> Option<MergeRange> {
    let last = layers.checked_sub(2)?;
    Some(MergeRange { first: index_of(0), last: index_of(last) })
}

/// The layers to drop so that these snapshots of the disk are gone, in as few ranges as possible, the newest first:
/// in that order no range moves another.
///
/// `A..B` is the snapshots A and B, in either order, and all layers between them; a snapshot that is called so goes first.
///
/// # Errors
/// No such snapshot, or one of another disk; otherwise as [`snapshots::list`].
pub fn ranges_of(disk: &Path, names: &[String], options: &OpenOptions) -> Result<Vec<MergeRange>> {
    // Once: depths count from the top, where a disk in use gets layers.
    let snapshots = snapshots::list(disk, options)?;
    Selection::named_in(disk, names, &snapshots)?.ranges_in(disk, &snapshots)
}

/// What the target will stand on.
///
/// # Errors
/// A path that cannot be stored as a name.
pub(crate) fn below_of(chain: &[ChainFile], range: MergeRange) -> Result<Option<Below>> {
    let (first, target) = (&chain[range.first.index()], &chain[range.target().index()]);
    let Some(stays) = range.first.index().checked_sub(1).map(|layer| &chain[layer]) else { return Ok(None) };
    let name = match &first.backing_name {
        // That of a part of a file says more than a path, and is relative to no directory.
        Some(name) if stays.window.is_some() || directory_of(&first.path) == directory_of(&target.path) => {
            name.clone()
        }
        _ => name_from(&target.path, &stays.path)?,
    };
    let record = record_of(&chain[range.first.index()..=range.target().index()]);
    Ok(Some(Below { name, format: stays.format, record }))
}

/// What the last of `chain` is to say of the layer below the first. If one of them stood on another disk's layers, so does the
/// last now, whether or not that layer has a name.
fn record_of(chain: &[ChainFile]) -> Option<Vec<u8>> {
    let first = &chain[0];
    let ends_at = chain.iter().position(|link| !link.goes_on());
    let said = chain.iter().find_map(ChainFile::origin);
    // Where an overlay does not say whose the file below it is, it is that file's.
    let owner = said.or_else(|| disk_name(&chain[ends_at?.checked_sub(1)?].path));
    let (info, Some(owner)) = (first.info(), owner) else { return first.record.clone() };
    let Some(info) = info else { return LayerRecord::Foreign(owner).encode().ok() };
    let with_origin = SnapshotInfo { origin: Some(owner.clone()), ..info };
    // Whose it is matters more than labels that leave no room for that.
    let encoded =
        with_origin.encode().or_else(|_| SnapshotInfo { labels: Vec::new(), ..with_origin }.encode());
    encoded.or_else(|_| LayerRecord::Foreign(owner).encode()).ok()
}

/// The map of the frozen layer at `layer` of the chain of `disk`, and of all below it.
///
/// # Errors
/// A chain that cannot be read, or is another than `chain`.
pub(crate) fn map_up_to(
    disk: &Path,
    chain: &[ChainFile],
    layer: usize,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<Arc<FrozenMap>> {
    let link = &chain[layer];
    if link.window.is_some() {
        let base = link.open(Role::Frozen, &**resources.files().opener())?;
        return resources.share_map(vec![freeze(base, resources)], None);
    }
    let format = Some(link.format);
    let mut open = OpenOptions { format, format_is_exact: true, ..open.clone() };
    open.allow_backing.push(directory_of(disk));
    let map = map_of(&link.path, &open, resources)?;
    let same = |(found, link): (&Arc<Layer>, &ChainFile)| found.identity.file == link.file;
    if map.layers().len() != layer + 1 || !map.layers().zip(chain).all(same) {
        return Err(Error::from(MergeFault::LayersChanged).in_file(disk));
    }
    Ok(map)
}

/// The map of a chain of frozen layers.
///
/// # Errors
/// A chain that cannot be read.
pub(crate) fn map_of(path: &Path, open: &OpenOptions, resources: &Arc<Resources>) -> Result<Arc<FrozenMap>> {
    let open = OpenOptions { read_only: true, ..open.clone() };
    let Chain { top, mut below, index, .. } = read_chain(path, &open, resources)?;
    below.push(freeze(top, resources));
    resources.share_map(below, index)
}
