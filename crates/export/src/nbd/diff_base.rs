//! The layers that a client can ask for the difference to, by the names of their files or snapshots.
//!
//! Names are only ever compared with those of the disk's own layers: nothing is opened because a client names it but the headers
//! of layers whose files are called as those of such a snapshot are, to see whether they are its. That is done once, when the
//! client selects; where the layer is in the chain is looked up anew after each change of the layers.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_disk::snapshot::{self, SnapshotInfo, frozen_path};
use vmstrata_disk::{Disk, Extent, ExtentKind, Format, LayerInfo};
use vmstrata_types::LayerIndex;

use super::contexts::{Context, ContextSet, DIFF_PREFIX, DiffSlot};

/// Layers listed at most: the newest ones.
pub(crate) const LISTED_MAX: usize = 256;

/// The contexts that a client has selected.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    pub(crate) set: ContextSet,
    /// The layers, by [`DiffSlot`].
    bases: Vec<Selected>,
}

/// A layer that a client has selected.
#[derive(Clone, Debug)]
struct Selected {
    /// As the client calls it.
    name: String,
    file: PathBuf,
    /// What the layer above it says of it. A snapshot may go, and another get its name, its file's name, even its file.
    record: Option<SnapshotInfo>,
    found: Arc<Mutex<Option<Found>>>,
}

/// Where a layer is, and since which change of the layers.
type Found = (u64, Option<Base>);

impl Selected {
    fn new(name: &str, layer: &LayerInfo, layers: &[LayerInfo]) -> Self {
        let record = layers.get(layer.index.index() + 1).and_then(recorded_above);
        Self { name: name.to_owned(), file: layer.path.clone(), record, found: Arc::default() }
    }

    /// Where it is now. The layers' headers are looked at after the layers have changed only.
    fn base(&self, disk: &Disk) -> Option<Base> {
        let generation = disk.generation();
        let mut found = self.found.lock();
        if let Some((_, base)) = found.filter(|(since, _)| *since == generation) {
            return base;
        }
        let layers = disk.layers();
        let base = Base::in_file(&layers, &self.file).filter(|base| {
            let above = layers.get(base.layer.index() + 1);
            above.and_then(recorded_above) == self.record
        });
        *found = Some((generation, base));
        base
    }
}

impl Selection {
    /// What the queries select of a disk: what they do not name exactly, or name past [`super::contexts::DIFFS_MAX`], is left out.
    pub(crate) fn of<'a>(queries: impl Iterator<Item = &'a str>, disk: &Disk) -> Self {
        let layers = disk.layers();
        let mut selection = Self::default();
        queries.for_each(|query| selection.select(query, disk, &layers));
        selection
    }

    fn select(&mut self, query: &str, disk: &Disk, layers: &[LayerInfo]) {
        self.set.select(query, false);
        let Some(name) = query.strip_prefix(DIFF_PREFIX) else { return };
        let Some(slot) = DiffSlot::new(self.bases.len()) else { return };
        if self.bases.iter().any(|known| known.name == name) {
            return;
        }
        if let Some(layer) = find(disk, layers, name) {
            self.set.insert(Context::Diff(slot));
            self.bases.push(Selected::new(name, layer, layers));
        }
    }

    /// The contexts with their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = (Context, String)> {
        let fixed = Context::FIXED.into_iter().filter(|(context, _)| self.set.contains(*context));
        let diffs = self.bases.iter().enumerate().map(|(number, selected)| {
            let slot = DiffSlot::new(number).expect("no more were added");
            (Context::Diff(slot), format!("{DIFF_PREFIX}{}", selected.name))
        });
        fixed.map(|(context, name)| (context, name.to_owned())).chain(diffs)
    }

    /// The selected layer in this place, where it is now; `None` when it has left the chain.
    ///
    /// # Panics
    /// When nothing was selected in this place.
    pub(crate) fn base(&self, slot: DiffSlot, disk: &Disk) -> Option<Base> {
        self.bases[slot.get()].base(disk)
    }
}

/// The names of all contexts that tell the difference to a layer, newest first, within limits: by its file, and by its snapshot
/// where that is the newest of its name.
pub(crate) fn list(disk: &Disk) -> Vec<String> {
    let layers = disk.layers();
    let mut names: Vec<String> = Vec::new();
    for pair in layers.windows(2).rev().take(LISTED_MAX) {
        let file = file_name(&pair[0]).and_then(OsStr::to_str);
        let known = [file.map(str::to_owned), snapshot_of(pair)];
        for name in known.into_iter().flatten().map(|name| format!("{DIFF_PREFIX}{name}")) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

/// The layer in the file called `name`, or else the newest snapshot of that name; `None` when there is none below the active one,
/// or more than one such file.
fn find<'a>(disk: &Disk, layers: &'a [LayerInfo], name: &str) -> Option<&'a LayerInfo> {
    if name.contains('/') {
        return None;
    }
    let of_disk = |format| Some(frozen_path(disk.path(), name, format)?.file_name()?.to_owned());
    let files = FORMATS.into_iter().filter_map(of_disk);
    std::iter::once(name.into())
        .chain(files)
        .find_map(|file| called(layers, &file))
        .or_else(|| recorded(layers, name))
}

const FORMATS: [Format; 2] = [Format::Qcow2, Format::Raw];

/// The one layer below the active one whose file is called `name`.
fn called<'a>(layers: &'a [LayerInfo], name: &OsStr) -> Option<&'a LayerInfo> {
    let (_, below) = layers.split_last()?;
    let mut named = below.iter().filter(|layer| file_name(layer) == Some(name));
    named.next().filter(|_| named.next().is_none())
}

/// The newest layer that is recorded as the snapshot `name`, of this disk or of one that it comes from.
fn recorded<'a>(layers: &'a [LayerInfo], name: &str) -> Option<&'a LayerInfo> {
    let found = layers.windows(2).rev().filter(|pair| is_named_after(&pair[0], name));
    found.filter(|pair| snapshot_of(pair).as_deref() == Some(name)).map(|pair| &pair[0]).next()
}

/// The snapshot that the upper layer of a pair says the lower one is, if the lower one's file is called so.
fn snapshot_of(pair: &[LayerInfo]) -> Option<String> {
    let name = recorded_above(&pair[1])?.name;
    is_named_after(&pair[0], &name).then_some(name)
}

/// Whether the layer's file is called as that of a snapshot `name` is.
fn is_named_after(layer: &LayerInfo, name: &str) -> bool {
    let ends = |format| layer.path.as_os_str().as_bytes().ends_with(format!(".{name}.{format}").as_bytes());
    FORMATS.into_iter().any(ends)
}

/// What a layer says of the one below it.
fn recorded_above(layer: &LayerInfo) -> Option<SnapshotInfo> {
    if layer.format == Format::Qcow2 { snapshot::recorded_in(&layer.path) } else { None }
}

fn file_name(layer: &LayerInfo) -> Option<&OsStr> {
    layer.path.file_name()
}

/// A layer below the active one, and what the layers above it do to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    layer: LayerIndex,
    size: u64,
    /// Guest offset from which on a shorter layer above hides it.
    hidden_from: u64,
}

impl Base {
    /// The layer below the active one that is the file at `path`.
    fn in_file(layers: &[LayerInfo], path: &Path) -> Option<Self> {
        let (_, below) = layers.split_last()?;
        let found = below.iter().find(|layer| layer.path == path)?;
        let above = layers[found.index.index() + 1..].iter().map(|layer| layer.size);
        let hidden_from = above.min().expect("the active layer is above");
        Some(Self { layer: found.index, size: found.size, hidden_from })
    }

    /// What changed in an extent of the disk since this layer was its newest.
    pub(crate) fn status(&self, extent: &Extent) -> u32 {
        match (extent.kind, extent.layer) {
            (ExtentKind::Hole, _) | (_, None) => {
                let hides =
                    extent.range.end().get() > self.hidden_from && extent.range.start.get() < self.size;
                if hides { 2 } else { 0 }
            }
            (_, Some(layer)) if layer <= self.layer => 0,
            (ExtentKind::Zero, _) => 2,
            (ExtentKind::Data | ExtentKind::Compressed, _) => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmstrata_types::{GuestOffset, GuestRange};

    fn extent(start: u64, len: u64, kind: ExtentKind, layer: Option<u16>) -> Extent {
        let range = GuestRange::new(GuestOffset::new(start), len);
        Extent { range, kind, layer: layer.map(LayerIndex::new), host: None }
    }

    #[test]
    fn only_layers_above_the_base_change_anything() {
        let base = Base { layer: LayerIndex::new(4), size: 100, hidden_from: 1000 };
        let status = |kind, layer| base.status(&extent(0, 10, kind, layer));
        assert_eq!((status(ExtentKind::Data, Some(4)), status(ExtentKind::Zero, Some(0))), (0, 0));
        assert_eq!((status(ExtentKind::Data, Some(5)), status(ExtentKind::Compressed, Some(9))), (1, 1));
        assert_eq!((status(ExtentKind::Zero, Some(5)), status(ExtentKind::Hole, None)), (2, 0));
    }

    #[test]
    fn what_a_shorter_layer_hides_reads_as_zeros_now() {
        let base = Base { layer: LayerIndex::BASE, size: 100, hidden_from: 50 };
        let hole = |start, len| base.status(&extent(start, len, ExtentKind::Hole, None));
        assert_eq!((hole(0, 50), hole(40, 20), hole(60, 10), hole(100, 50)), (0, 2, 2, 0));
    }
}
