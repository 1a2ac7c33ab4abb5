//! Another chain below a layer of a disk in use, which reads the same there.
//!
//! ```text
//!   before   a ◄── b ◄── layer ◄── 2 ◄── disk
//!   after    c ◄──────── layer ◄── 2 ◄── disk        one sector of `layer` written
//! ```
//!
//! It is the end of a merge: a frozen layer grows for as long as its header is written, and requests get another map. Nothing is copied.
//!
//! A file that takes a frozen layer's place ([`Disk::replace_layer`]) is noted beside the disk before it has its name, and the layer before
//! it loses its place. So a crash leaves the one or the other in the chain, and the note of what goes ([`crate::merging::cleanup`]).

use std::path::Path;
use std::sync::Arc;

use vmstrata_store::{FileId, Place};

use super::Disk;
use crate::atomic_file::{flush_directory, flush_file};
use crate::error::{IoContext as _, Result};
use crate::layers::index_of;
use crate::merging::plan::map_of;
use crate::merging::relink::Below;
use crate::merging::remove::dropped;
use crate::merging::room::Room;
use crate::merging::{Copier, MergeFault, MergeRange, Way, cleanup};
use crate::refs::{ChainFile, Users};
use crate::snapshots::name_from;
use crate::{Format, OpenOptions};

use super::merge::Running;

/// How often snapshots may be taken at a moment at which the layers must not change.
const TRIES: u32 = 20;

/// Finds the layer of a chain, above the base, that is to stand on another one.
type Which<'a> = &'a dyn Fn(&[ChainFile]) -> std::result::Result<usize, MergeFault>;

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
        let which = |chain: &[ChainFile]| {
            let at = chain.iter().position(|link| link.path == layer).unwrap_or(0);
            let last =
                at.checked_sub(1).ok_or(MergeFault::Range { first: 0, last: at, layers: chain.len() })?;
            // By its file: one path may be said in several ways.
            match on {
                Some(on) if FileId::at(on) != FileId::at(&chain[last].path) => Err(MergeFault::LayersChanged),
                _ => Ok(at),
            }
        };
        self.rebase_layer(&which, (below, format), false)
    }

    /// Puts the qcow2 image `draft`, which reads the same, in the place of the disk's frozen layer `old`, under the name `new` beside the
    /// disk. The file of the old layer goes, at a later merge if something needs it now. After an error, the draft does.
    ///
    /// # Errors
    /// As [`Disk::rebase`]; a file that is called `new`; a layer that is not there. The chain then has the old layer, or the new one.
    pub fn replace_layer(self: &Arc<Self>, old: &Path, draft: &Path, new: &Path) -> Result<()> {
        let place = || -> Result<()> {
            flush_file(draft)?;
            cleanup::note_draft(self.path(), draft, new)?;
            let renamed = Place::of(draft).and_then(|draft| {
                draft.rename_new(&draft.directory().place(new.file_name().unwrap_or_default()))?;
                // NFS has only given it another one.
                if draft.is_file() { draft.remove() } else { Ok(()) }
            });
            renamed.while_trying("give the layer its name")?;
            flush_directory(new)
        };
        place().map_err(|error| error.in_file(new))?;
        let file = FileId::at(old);
        let which = |chain: &[ChainFile]| {
            let at = chain.iter().position(|link| Some(link.file) == file);
            at.map(|at| at + 1).ok_or_else(|| MergeFault::NotALayer { path: old.to_owned() })
        };
        for _ in 1..TRIES {
            match self.rebase_layer(&which, (new, Format::Qcow2), true) {
                Err(error) if matches!(error.fault(), Some(MergeFault::LayersChanged)) => {}
                replaced => return replaced,
            }
        }
        self.rebase_layer(&which, (new, Format::Qcow2), true)
    }

    /// With `removes`, the file of the layer that it stood on goes.
    fn rebase_layer(
        self: &Arc<Self>,
        which: Which<'_>,
        (below, format): (&Path, Format),
        removes: bool,
    ) -> Result<()> {
        let (mut running, mut copier, chain) = Running::begin_rebase(self, which, (below, format))?;
        if removes {
            let last = running.range.last;
            let goes = dropped(&chain, MergeRange { first: last, last });
            cleanup::announce(self.path(), copier.target.identity.file, &goes)?;
        }
        let relinked = running.relink(&mut copier);
        if relinked.is_err() {
            copier.leave(|way| running.wait(way));
        }
        relinked?;
        let layer = &chain[running.range.target().index()].path;
        tracing::info!(layer = %layer.display(), below = %below.display(), "stands on another layer that reads the same");
        drop((copier, running));
        if removes {
            let _changing = self.change();
            self.sweep_merged();
        }
        Ok(())
    }
}

impl Running {
    fn begin_rebase(
        disk: &Arc<Disk>,
        which: Which<'_>,
        (below, format): (&Path, Format),
    ) -> Result<(Self, Copier, Vec<ChainFile>)> {
        let below_target = |target: usize| MergeRange { first: index_of(0), last: index_of(target - 1) };
        let range = |chain: &[ChainFile]| which(chain).map(below_target);
        let (mut running, chain) = Self::enter(disk, range)?;
        let target = running.range.target().index();
        let layer = &chain[target].path;
        let users = Users::standing_on(&chain[target..], disk.path(), &disk.options());
        let open = OpenOptions { format: Some(format), ..disk.options() };
        let after = map_of(below, &open, &disk.resources)?;
        let record = chain[target].record.clone();
        let below = Below { name: name_from(layer, below)?, format, record };
        if target + 1 == chain.len() {
            let copier = running.promise(&chain, Some(after), Some(&below), Room::find(layer, 0)?)?;
            return Ok((running, copier, chain));
        }
        let (_, target, layers, relink) = running.grow(&chain, &users, Some(&below))?;
        let room = Room::find(layer, 0)?;
        let copier = Copier::new(target, Some(layers), Some(after), Way::Stream(relink), room);
        Ok((running, copier, chain))
    }
}
