//! Another chain below a layer of a disk in use, which reads the same there.
//!
//! ```text
//!   before   a ◄── b ◄── layer ◄── 2 ◄── disk
//!   after    c ◄──────── layer ◄── 2 ◄── disk        one sector of `layer` written
//! ```
//!
//! It is the end of a merge: a frozen layer grows for as long as its header is written, and requests get another map. Nothing is copied,
//! nothing removed.

use std::path::Path;
use std::sync::Arc;

use vmstrata_store::FileId;

use super::Disk;
use crate::error::Result;
use crate::layers::index_of;
use crate::merging::plan::map_of;
use crate::merging::relink::Below;
use crate::merging::room::Room;
use crate::merging::{Copier, MergeFault, MergeRange, Way};
use crate::refs::{ChainFile, Users};
use crate::snapshots::name_from;
use crate::{Format, OpenOptions};

use super::merge::Running;

impl Disk {
    /// Makes the image `below` of that format the backing file of the disk's layer `layer`, a frozen one or the active one. The caller guarantees that the old and the new backing
    /// chain read the same wherever `layer` and the layers above it have nothing. A snapshot gives the active layer's name to another: of
    /// that layer, the caller says what it stands `on`.
    ///
    /// # Errors
    /// [`MergeFault::LayersChanged`] if its backing file is no longer `on`. No such layer, or none below it; one that another disk or process uses; a merge that runs; a header without room for the name;
    /// a chain that cannot be read; a host that cannot write. The layer then has the old backing file or the new one.
    pub fn rebase(
        self: &Arc<Self>,
        layer: &Path,
        on: Option<&Path>,
        (below, format): (&Path, Format),
    ) -> Result<()> {
        let (mut running, mut copier) = Running::begin_rebase(self, (layer, on), (below, format))?;
        let relinked = running.relink(&mut copier);
        if relinked.is_err() {
            copier.leave(|way| running.wait(way));
        }
        relinked?;
        tracing::info!(layer = %layer.display(), below = %below.display(), "stands on another layer that reads the same");
        Ok(())
    }
}

impl Running {
    fn begin_rebase(
        disk: &Arc<Disk>,
        (layer, on): (&Path, Option<&Path>),
        (below, format): (&Path, Format),
    ) -> Result<(Self, Copier)> {
        let range = |chain: &[ChainFile]| {
            let at = chain.iter().position(|link| link.path == layer).unwrap_or(0);
            match at.checked_sub(1) {
                // By its file: one path may be said in several ways.
                Some(last) if on.is_some_and(|on| FileId::at(on) != FileId::at(&chain[last].path)) => {
                    Err(MergeFault::LayersChanged)
                }
                Some(last) => Ok(MergeRange { first: index_of(0), last: index_of(last) }),
                None => Err(MergeFault::Range { first: 0, last: at, layers: chain.len() }),
            }
        };
        let (mut running, chain) = Self::enter(disk, range)?;
        let target = running.range.target().index();
        let users = Users::standing_on(&chain[target..], disk.path(), &disk.options());
        let open = OpenOptions { format: Some(format), ..disk.options() };
        let after = map_of(below, &open, &disk.resources)?;
        let record = chain[target].record.clone();
        let below = Below { name: name_from(layer, below)?, format, record };
        if target + 1 == chain.len() {
            let copier = running.promise(&chain, Some(after), Some(&below), Room::find(layer, 0)?)?;
            return Ok((running, copier));
        }
        let (_, target, layers, relink) = running.grow(&chain, &users, Some(&below))?;
        let room = Room::find(layer, 0)?;
        Ok((running, Copier::new(target, Some(layers), Some(after), Way::Stream(relink), room)))
    }
}
