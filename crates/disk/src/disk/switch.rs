//! Giving a running disk a new active layer: the engine's part of a snapshot.
//!
//! ```text
//!   open the overlay ─► publish its name ─► hold writers ─► swap ─► let them go ─► commit ─► (finalize)
//!        all I/O on new files               └── memory only ──┘     data, tables, clean header
//! ```
//!
//! Writers wait only for those under way and for the swap; readers do not wait at all. What was active goes on to be
//! asked for its entries ([`crate::map::FrozenMap::over`]) until the snapshot is finalized ([`super::finalize`]). A flush of the
//! guest meanwhile brings both to stable storage, the older one first.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_store::{Gate, LocalFile, Store};
use vmstrata_types::MAX_LAYERS;

use super::Disk;
use super::finalize::PendingFinalize;
use super::open::open_top;
use crate::active::session::{FEATURES_SINCE, end_session};
use crate::chain::{Unflushed, open_layer};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::{Format, Layer};
use crate::layers::{Layers, Top, index_of};
use crate::map::{Before, FrozenMap};
use crate::opener::Role;

/// The new files of a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewNames<'a> {
    /// The overlay, under whatever name it has before it is published.
    pub(super) overlay: &'a Path,
    /// What the file that is active now will be called.
    pub(super) frozen: &'a Path,
    /// What the overlay will be called, and the disk.
    pub(super) path: &'a Path,
}

/// A change of a disk's active layer that is ready to be made.
#[derive(Debug)]
pub(super) struct Switch<'disk> {
    pub(super) disk: &'disk Disk,
    /// What was active, once the change is made.
    pending: PendingFinalize,
    after: Unpublished,
}

/// Layers over a new overlay, until they are a disk's. If they never are, the overlay's journal goes with them.
#[derive(Debug)]
struct Unpublished(Option<Layers>);

impl Drop for Unpublished {
    fn drop(&mut self) {
        if let Some(Layers { top: Top::Qcow2(active), .. }) = &self.0 {
            active.changes.remove_journal();
        }
    }
}

impl<'disk> Switch<'disk> {
    /// Makes ready for an empty overlay to become the active layer of `disk`, and what is active now a frozen one. The
    /// overlay is on stable storage then. The caller holds the disk's layers ([`super::state::Changing`]).
    ///
    /// # Errors
    /// A read-only or closed disk, or an overlay that cannot be opened or is of another size: nothing has changed.
    pub(super) fn prepare(disk: &'disk Disk, names: NewNames<'_>) -> Result<Self> {
        disk.check_changeable()?;
        let before = arc_swap::Guard::into_inner(disk.layers_now());
        let after = disk.layers_over(&before, names)?;
        let pending = PendingFinalize { before, path: names.frozen.to_owned() };
        Ok(Self { disk, pending, after })
    }

    /// Makes the changes at one instant: writers of all these disks are held meanwhile. The overlays have the disks' names,
    /// durably. Calls `meanwhile` at that instant. Returns what was active, for [`Disk::commit_frozen`], and for how long writers were held.
    pub(super) fn make(
        mut switches: Vec<Self>,
        meanwhile: impl FnOnce(),
    ) -> (Vec<(&'disk Disk, PendingFinalize)>, Duration) {
        let mut meanwhile = Some(meanwhile);
        let disks: Vec<&Disk> = switches.iter().map(|switch| switch.disk).collect();
        let began = Instant::now();
        with_all_quiesced(&disks, &mut || {
            for switch in &mut switches {
                switch.disk.put_layers(switch.after.0.take().expect("a change is made once"));
            }
            meanwhile.take().into_iter().for_each(|meanwhile| meanwhile());
        });
        let pause = began.elapsed();
        (switches.into_iter().map(|switch| (switch.disk, switch.pending)).collect(), pause)
    }
}

fn with_all_quiesced<T>(disks: &[&Disk], change: &mut dyn FnMut() -> T) -> T {
    match disks {
        [] => change(),
        [disk, others @ ..] => disk.write_gate.quiesce(|| with_all_quiesced(others, change)),
    }
}

impl Disk {
    /// The layers after the change, ready for use.
    fn layers_over(&self, before: &Arc<Layers>, names: NewNames<'_>) -> Result<Unpublished> {
        let depth = before.frozen.as_ref().map_or(0, |map| map.layers().len()) + 1;
        if depth >= MAX_LAYERS {
            return Err(Error::from(ErrorKind::TooLong).in_file(self.path()));
        }
        let opener = &**self.resources.files().opener();
        let role = Role::Active(self.home().options.cache);
        let mut overlay =
            open_layer(names.overlay, role, Some(Format::Qcow2), &Gate::unrestricted(), opener)?;
        if overlay.size != before.size {
            let kind = ErrorKind::OverlaySize { overlay: overlay.size, disk: before.size };
            return Err(Error::from(kind).in_file(names.overlay));
        }
        overlay.path = names.path.to_owned();
        let newest = provisional(before, names.frozen)?;
        let map = Arc::new(FrozenMap::over(
            Arc::clone(before) as Arc<dyn Before>,
            newest,
            self.resources.new_pages()?,
            Arc::clone(self.resources.files()),
        )?);
        let place = (index_of(depth), Unflushed::Keep);
        let top = open_top(overlay, place, &self.resources)?;
        let mut after = Layers::new(before.size, top, Some(map), &self.resources);
        after.before = Some(Arc::clone(before));
        let after = Unpublished(Some(after));
        make_ready(&after).map_err(|error| error.in_file(names.overlay))?;
        Ok(after)
    }

    /// Brings what was active to stable storage, and lets others read it as a file that was closed.
    ///
    /// # Errors
    /// A host that cannot flush or write: the disk has failed.
    pub(super) fn commit_frozen(&self, pending: &PendingFinalize) -> Result<()> {
        self.try_commit_frozen(pending).map_err(|error| self.fail(error))
    }

    fn try_commit_frozen(&self, pending: &PendingFinalize) -> Result<()> {
        let PendingFinalize { before, path } = pending;
        before.commit()?;
        match &before.top {
            Top::Qcow2(active) => {
                // Housekeeping may be giving back clusters of it: nothing is written to it after this.
                let _tending = self.tending.lock();
                end_session(active, || self.epochs.synchronize())?;
                give_up(&*active.store, path)
            }
            Top::Raw(raw) => give_up(&*raw.store, path),
            Top::Frozen => Err(ErrorKind::ReadOnly.into()),
        }
    }
}

/// Brings a new overlay to stable storage, unless the beginning of a session on it has done so, and has its first clusters
/// claimed.
fn make_ready(after: &Unpublished) -> Result<()> {
    let Some(Layers { top: Top::Qcow2(active), .. }) = &after.0 else { return Ok(()) };
    if active.tables.version < FEATURES_SINCE {
        active.flusher.flush().while_trying("flush the overlay")?;
    }
    active.alloc.make_ready()
}

/// What was active, as a layer whose bytes are read through the file that is open for writing.
fn provisional(before: &Layers, path: &Path) -> Result<Arc<Layer>> {
    let (identity, tables, file) = match &before.top {
        Top::Qcow2(active) => (active.identity, Some(active.tables_now()), &active.file),
        Top::Raw(raw) => (raw.identity, None, &raw.file),
        Top::Frozen => return Err(ErrorKind::ReadOnly.into()),
    };
    // That its entries are sound, the layer itself sees to.
    let layer = Layer::new(path.to_owned(), identity, before.size, tables).growing();
    layer.put_file(Some(Arc::clone(file)));
    Ok(Arc::new(layer))
}

pub(super) fn give_up(store: &dyn Store, path: &Path) -> Result<()> {
    store
        .local()
        .map_or(Ok(()), LocalFile::give_up_writing)
        .while_trying("turn the writer's lock into a reader's")
        .map_err(|error| error.in_file(path))
}
