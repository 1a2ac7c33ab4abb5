//! The chain that is to be merged, from its headers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::{LayerRecord, SnapshotInfo};
use vmstrata_store::{FileId, Gate};
use vmstrata_types::LayerIndex;

use super::relink::Below;
use super::remove::dropped;
use super::selection::Selection;
use super::{MergeFault, MergeOptions};
use crate::chain::{Chain, OpenOptions, Roles, Top, freeze, open_layer, read_chain, walk};
use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Format, Layer};
use crate::layers::index_of;
use crate::map::FrozenMap;
use crate::opener::{Opener, Role, directory_of};
use crate::resources::Resources;
use crate::snapshot::{self, Held, disk_name, name_from};

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
    pub(crate) fn check(self, links: &[Link], options: &MergeOptions) -> Result<(), MergeFault> {
        let (first, last, layers) = (self.first.index(), self.last.index(), links.len());
        if first > last || last + 1 >= layers {
            return Err(MergeFault::Range { first, last, layers });
        }
        let goes = dropped(links, self).into_iter().filter(|layer| options.removal.wants(layer).is_ok());
        let mut changed = goes.map(|layer| layer.file).chain([links[self.target().index()].file]);
        let holds = |file| links.iter().find(|link| link.file == file && link.internal > 0);
        if let Some(link) = changed.find_map(holds) {
            return Err(MergeFault::InternalSnapshots { path: link.path.clone(), count: link.internal });
        }
        self.refuse_held(links, options)?;
        let of_others = layers_of_others(links);
        let is_named = || links[first + 1..=last + 1].iter().any(|link| link.info().is_some());
        if self.target().index() >= of_others || options.beyond_own && !is_named() {
            return Ok(());
        }
        let said = links[last + 2..=of_others].iter().find_map(Link::origin);
        let disk = said.or_else(|| disk_name(&links[of_others - 1].path)).unwrap_or_default();
        Err(MergeFault::OfAnotherDisk { disk })
    }
}

impl MergeRange {
    /// Refuses to drop a snapshot that is held, unless it stays another disk's, with its file.
    pub(crate) fn refuse_held(self, links: &[Link], options: &MergeOptions) -> Result<(), MergeFault> {
        let disk = &links[links.len() - 1].path;
        for (layer, dropped) in (self.first.index()..=self.last.index()).rev().zip(dropped(links, self)) {
            let is_lost = dropped.is_lost(options.removal);
            let held = |info: SnapshotInfo| Held::find(disk, &links[layer].path, &info);
            if let Some(held) = links[layer + 1].info().filter(|_| is_lost).and_then(held) {
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
/// No such snapshot, or one of another disk; otherwise as [`snapshot::list`].
pub fn ranges_of(disk: &Path, names: &[String], options: &OpenOptions) -> Result<Vec<MergeRange>> {
    // Once: depths count from the top, where a disk in use gets layers.
    let snapshots = snapshot::list(disk, options)?;
    Selection::named_in(disk, names, &snapshots)?.ranges_in(disk, &snapshots)
}

/// A file of the chain.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) path: PathBuf,
    pub(crate) file: FileId,
    pub(crate) format: Format,
    /// The name of the layer below as its header has it.
    pub(crate) backing_name: Option<String>,
    /// What it says of the layer below as a snapshot.
    pub(crate) record: Option<Vec<u8>>,
    /// Whether it knows of an index.
    pub(crate) has_index: bool,
    /// Snapshots within the file, of stock tools' making, which have tables of their own over the same backing file.
    pub(crate) internal: u32,
}

impl Link {
    fn of(top: Top) -> Self {
        let has_index = top.head.as_ref().is_some_and(|head| {
            head.header.autoclear.contains(vmstrata_qcow2::Autoclear::INDEX)
                || crate::index::sidecar_of(&top.path).exists()
        });
        let format = if top.head.is_some() { Format::Qcow2 } else { Format::Raw };
        let internal = top.head.as_ref().map_or(0, |head| head.header.snapshot_count);
        let (backing_name, record) = top.head.map_or((None, None), |head| (head.backing_name, head.snapshot));
        Self {
            file: top.opened.identity.file,
            path: top.path,
            format,
            backing_name,
            record,
            has_index,
            internal,
        }
    }

    /// Opens the layer, which must be the file that it was.
    ///
    /// # Errors
    /// A file that cannot be opened, or another one.
    pub(crate) fn open(&self, role: Role, opener: &dyn Opener) -> Result<Top> {
        let top = open_layer(&self.path, role, Some(self.format), &Gate::unrestricted(), opener)?;
        if top.opened.identity.file == self.file {
            Ok(top)
        } else {
            Err(Error::from(ErrorKind::Changed).in_file(&self.path))
        }
    }

    /// What it says of the layer below, as far as that can be read.
    fn said(&self) -> Option<LayerRecord> {
        self.record.as_deref().and_then(|data| LayerRecord::parse(data).ok())
    }

    /// What it says of the layer below as a snapshot.
    pub(crate) fn info(&self) -> Option<SnapshotInfo> {
        match self.said()? {
            LayerRecord::Snapshot(info) => Some(info),
            LayerRecord::Foreign(_) => None,
        }
    }

    /// The disk that the layers below belong to, if it says that this is another one.
    fn origin(&self) -> Option<String> {
        Some(self.said()?.origin()?.to_owned())
    }

    /// Whether the layer below is a snapshot of the same disk.
    fn goes_on(&self) -> bool {
        self.info().is_some_and(|info| info.origin.is_none())
    }
}

/// How many layers, from the base on, are not of this disk's own history. That ends, from the top, at the first link that
/// does not say of the layer below which of the disk's snapshots it is: whoever made a plain overlay on a disk, or on a
/// snapshot of one, stands on what is not theirs.
pub(crate) fn layers_of_others(links: &[Link]) -> usize {
    links.iter().rposition(|link| !link.goes_on()).unwrap_or(0)
}

/// The files of the chain of `disk`, base first.
///
/// # Errors
/// As [`walk`].
pub(crate) fn links(disk: &Path, options: &OpenOptions, opener: &dyn Opener) -> Result<Vec<Link>> {
    let roles = Roles { top: Role::Inspected, below: Role::Inspected };
    let (top, mut links) = walk(disk, options, roles, opener, Link::of)?;
    links.push(Link::of(top));
    Ok(links)
}

/// What the target will stand on.
///
/// # Errors
/// A path that cannot be stored as a name.
pub(crate) fn below_of(links: &[Link], range: MergeRange) -> Result<Option<Below>> {
    let (first, target) = (&links[range.first.index()], &links[range.target().index()]);
    let Some(stays) = range.first.index().checked_sub(1).map(|layer| &links[layer]) else { return Ok(None) };
    let name = match &first.backing_name {
        Some(name) if directory_of(&first.path) == directory_of(&target.path) => name.clone(),
        _ => name_from(&target.path, &stays.path)?,
    };
    let record = record_of(&links[range.first.index()..=range.target().index()]);
    Ok(Some(Below { name, format: stays.format, record }))
}

/// What the last of `links` is to say of the layer below the first. If one of them stood on another disk's layers, so does the
/// last now, whether or not that layer has a name.
fn record_of(links: &[Link]) -> Option<Vec<u8>> {
    let first = &links[0];
    let ends_at = links.iter().position(|link| !link.goes_on());
    let said = links.iter().find_map(Link::origin);
    // Where an overlay does not say whose the file below it is, it is that file's.
    let owner = said.or_else(|| disk_name(&links[ends_at?.checked_sub(1)?].path));
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
/// A chain that cannot be read, or is another than `links`.
pub(crate) fn map_up_to(
    disk: &Path,
    links: &[Link],
    layer: usize,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<Arc<FrozenMap>> {
    let link = &links[layer];
    let format = Some(link.format);
    let mut open = OpenOptions { read_only: true, format, format_is_exact: true, ..open.clone() };
    open.allow_backing.push(directory_of(disk));
    let Chain { top, mut below, index, .. } = read_chain(&link.path, &open, resources)?;
    below.push(freeze(top, resources));
    let same = |(found, link): (&Arc<Layer>, &Link)| found.identity.file == link.file;
    if below.len() != layer + 1 || !below.iter().zip(links).all(same) {
        return Err(Error::from(MergeFault::LayersChanged).in_file(disk));
    }
    resources.share_map(below, index)
}
