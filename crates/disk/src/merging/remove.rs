//! Removing the files of dropped layers, unless someone needs them ([`crate::refs`]).
//!
//! A file is needed by an image that names it as its backing file, and by a process that has it open. Where not all who might
//! need it could be asked, nothing is removed. What is needed keeps all layers below it.

use std::path::{Path, PathBuf};

use vmstrata_store::{FileId, Place};

use super::plan::MergeRange;
use super::{MergeFault, MergeOptions};
use crate::index::forget_sidecar;
use crate::names::is_published;
use crate::refs::{
    ChainFile, Kept, LocalHolders, Users, back_refs, below, is_open, layers_of_others, missing,
};

/// Which files of dropped layers are removed, if no one needs them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Removal {
    /// Those of this disk's own snapshots; not a base without a name, or one that came with a clone.
    #[default]
    Snapshots,
    /// All in the disk's own directory, where who stands on them is seen.
    All,
    /// All, wherever they lie: only for somebody who knows that no disk stands on them of which vmstrata does not know.
    Everywhere,
    /// None.
    Nothing,
}

/// The file of a dropped layer.
#[derive(Clone, Debug)]
pub(crate) struct Dropped {
    pub(crate) path: PathBuf,
    pub(super) file: FileId,
    pub(crate) is_own_snapshot: bool,
    /// In the disk's directory.
    pub(super) is_beside: bool,
    /// It is a part of the file.
    pub(super) is_part: bool,
}

impl Dropped {
    /// Whether its state, if it has a name, is lost: it is this disk's own, or its file goes.
    pub(super) fn is_lost(&self, removal: Removal) -> bool {
        self.is_own_snapshot || removal.wants(self).is_ok()
    }
}

/// The files of the layers in `range`, newest first.
pub(crate) fn dropped(chain: &[ChainFile], range: MergeRange) -> Vec<Dropped> {
    let layers = range.first.index()..=range.last.index();
    let of_others = layers_of_others(chain);
    let disk = &chain[chain.len() - 1].path;
    let of = |layer: usize| Dropped {
        path: chain[layer].path.clone(),
        file: chain[layer].file,
        is_own_snapshot: layer >= of_others && chain[layer + 1].info().is_some(),
        is_beside: back_refs::is_beside(&chain[layer].path, disk),
        is_part: chain[layer].window.is_some(),
    };
    layers.rev().map(of).collect()
}

/// Makes sure that all who may need the files that are to go could be asked, before anything is copied for the sake of that.
///
/// # Errors
/// [`MergeFault::Overlooked`].
pub(crate) fn refuse_overlooked(
    chain: &[ChainFile],
    range: MergeRange,
    options: &MergeOptions,
    users: &Users,
) -> Result<(), MergeFault> {
    let goes = |layer: &Dropped| options.removal.wants(layer).is_ok();
    match users.overlooked().filter(|_| dropped(chain, range).iter().any(goes)) {
        Some(why) => Err(MergeFault::Overlooked { why }),
        None => Ok(()),
    }
}

/// Which files are to go, and what may stand in the way.
pub(crate) struct Wanted<'a> {
    pub(crate) removal: Removal,
    /// Disks that told of themselves and are not where they were are taken to be deleted.
    pub(crate) forget_missing: bool,
    /// `None` to foresee what becomes of a disk that another process has: its locks say nothing.
    pub(crate) here: Option<LocalHolders<'a>>,
    /// Another process uses the disk's layers, or a disk on them, and may know of them as they were before.
    pub(crate) by_others: bool,
}

/// Removes what may be removed; tells of each file which it was.
pub(crate) fn remove(
    dropped: &[Dropped],
    users: &mut Users,
    wanted: &Wanted<'_>,
) -> (Vec<PathBuf>, Vec<(PathBuf, Kept)>) {
    let (mut removed, mut kept) = (Vec::new(), Vec::new());
    for layer in dropped {
        match remove_one(layer, users, wanted) {
            Ok(()) => {
                users.forget(&layer.path);
                removed.push(layer.path.clone());
            }
            Err(why) => kept.push((layer.path.clone(), why)),
        }
    }
    (removed, kept)
}

impl Removal {
    /// Whether the file is to go if no one needs it.
    pub(crate) fn wants(self, layer: &Dropped) -> Result<(), Kept> {
        match self {
            Self::Nothing => Err(Kept::Asked),
            _ if layer.is_part => Err(Kept::Part),
            _ if is_published(&layer.path) => Err(Kept::Published),
            Self::Snapshots if !layer.is_own_snapshot => Err(Kept::NotASnapshot),
            Self::All if !layer.is_own_snapshot && !layer.is_beside => Err(Kept::Elsewhere),
            Self::Snapshots | Self::All | Self::Everywhere => Ok(()),
        }
    }
}

/// Which of the files would not be removed, and why.
pub(super) fn foresee(dropped: &[Dropped], users: &mut Users, wanted: &Wanted<'_>) -> Vec<Option<Kept>> {
    let mut foresee_one =
        |layer: &Dropped| may_go(layer, users, wanted).map(|_| users.forget(&layer.path)).err();
    dropped.iter().map(&mut foresee_one).collect()
}

fn remove_one(layer: &Dropped, users: &Users, wanted: &Wanted<'_>) -> Result<(), Kept> {
    let place = may_go(layer, users, wanted)?;
    // First, so that a process killed in between leaves nothing that speaks of a file that is gone.
    forget_beside(&layer.path);
    below(&layer.path).unwrap_or_default().iter().for_each(|below| back_refs::remove(below, &layer.path));
    if is_at(layer, &place) { place.remove().map_err(failed) } else { Err(Kept::Replaced) }
}

/// Removes what vmstrata keeps beside a layer that goes, as far as that can be done: its index, and who said to stand on it.
fn forget_beside(layer: &Path) {
    forget_sidecar(layer);
    back_refs::remove_all(layer);
}

/// Where the file is that nothing stands against removing.
fn may_go(layer: &Dropped, users: &Users, wanted: &Wanted<'_>) -> Result<Place, Kept> {
    wanted.removal.wants(layer)?;
    if let Some(by) = users.of(layer.file) {
        return Err(Kept::Needed { by: by.clone() });
    }
    if let Some(why) = users.overlooked() {
        return Err(why);
    }
    let unread = |error: std::io::Error| Kept::Unread { path: layer.path.clone(), reason: error.to_string() };
    let missing = missing(&layer.path).map_err(unread)?.into_iter().next();
    if let Some(back_ref) = missing.filter(|_| !wanted.forget_missing) {
        return Err(Kept::Missing { by: back_ref.disk });
    }
    if let Some(tag) = back_refs::some_hold(&layer.path).map_err(unread)? {
        return Err(Kept::Held { tag });
    }
    // What is looked at here is what is removed, whatever the path leads to by then.
    let place = Place::of(&layer.path).map_err(failed)?;
    if !is_at(layer, &place) {
        return Err(Kept::Replaced);
    }
    let is_used =
        |here: LocalHolders<'_>| (here.needs)(layer.file) || is_open(&layer.path, layer.file, &here);
    if wanted.by_others || wanted.here.is_some_and(is_used) {
        return Err(Kept::InUse);
    }
    Ok(place)
}

fn is_at(layer: &Dropped, place: &Place) -> bool {
    place.look().is_ok_and(|found| found.is_file() && found.file() == layer.file)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: std::io::Error) -> Kept {
    Kept::Failed { reason: error.to_string() }
}
