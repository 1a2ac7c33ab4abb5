//! Giving a running disk a new active layer: the engine's part of a snapshot.
//!
//! ```text
//!   open the overlay ─► publish its name ─► hold writers ─► swap ─► let them go ─► settle
//!        all I/O on new files               └── memory only ──┘     flush, tables, clean header
//! ```
//!
//! Writers wait only for those under way and for the swap; readers do not wait at all. What was active goes on to be
//! asked for its entries ([`crate::map::FrozenMap::over`]) until they are in its file. A flush of the guest meanwhile
//! brings both to stable storage, the older one first.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vmstrata_store::{FileIdentity, Gate, Store};
use vmstrata_types::MAX_LAYERS;

use super::Disk;
use super::durable::leave_clean;
use super::open::open_top;
use crate::chain::open_layer;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::{Format, Layer, Tables};
use crate::layers::{Layers, Top, index_of};
use crate::map::FrozenMap;
use crate::opener::Role;

/// The new files of a snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewNames<'a> {
    /// The overlay, under whatever name it has before it is published.
    pub(crate) overlay: &'a Path,
    /// What the file that is active now will be called.
    pub(crate) frozen: &'a Path,
}

impl Disk {
    /// Makes an empty overlay the active layer, and what is active now a frozen one, while the disk is in use. Returns for
    /// how long writers were held.
    ///
    /// The caller holds `changing`. `publish` gives the overlay the disk's name, durably; it is called when nothing but a failing host can go wrong any
    /// more, and before the first write to the overlay. Everything that completed before the call is in the frozen layer.
    ///
    /// # Errors
    /// A read-only or closed disk, an overlay that cannot be opened or is of another size, the error of `publish`: nothing
    /// has changed. Or a host that cannot flush or write what was active: the disk takes no more writes.
    pub(crate) fn switch_to(
        &self,
        names: NewNames<'_>,
        publish: impl FnOnce() -> Result<()>,
    ) -> Result<Duration> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::from(ErrorKind::Closed).in_file(&self.path));
        }
        self.check_writable()?;
        let before = arc_swap::Guard::into_inner(self.layers_now());
        let after = self.prepare(&before, names)?;
        publish()?;
        let began = Instant::now();
        let unsettled = self.writers.closed(|| self.put_layers(after));
        let pause = began.elapsed();
        self.settle(&before, &unsettled, names.frozen)?;
        Ok(pause)
    }

    /// The layers after the change, ready for use.
    fn prepare(&self, before: &Arc<Layers>, names: NewNames<'_>) -> Result<Layers> {
        let depth = before.frozen.as_ref().map_or(0, |map| map.layers().len()) + 1;
        if depth >= MAX_LAYERS {
            return Err(Error::from(ErrorKind::TooLong).in_file(&self.path));
        }
        let opener = &**self.resources.files().opener();
        let role = Role::Active(self.options.cache);
        let mut overlay =
            open_layer(names.overlay, role, Some(Format::Qcow2), &Gate::unrestricted(), opener)?;
        if overlay.size != self.size {
            let kind = ErrorKind::OverlaySize { overlay: overlay.size, disk: self.size };
            return Err(Error::from(kind).in_file(names.overlay));
        }
        overlay.path = self.path.clone();
        let newest = provisional(before, names.frozen);
        let map = FrozenMap::over(before, newest, self.resources.new_owner()?)?;
        let top = open_top(overlay, index_of(depth), &self.resources)?;
        let mut after = Layers::new(self.size, top, Some(Arc::new(map)), &self.resources);
        after.before = Some(Arc::clone(before));
        Ok(after)
    }

    /// Brings what was active to stable storage and ends the session on it; the disk then stands on a plain file.
    fn settle(&self, before: &Layers, unsettled: &Layers, path: &Path) -> Result<()> {
        let finish = || -> Result<(FileIdentity, Option<Tables>)> {
            before.commit()?;
            match &before.top {
                Top::Qcow2(active) => {
                    self.reclaim(active)?;
                    leave_clean(active)?;
                    give_up(&*active.store, path)?;
                    Ok((active.identity, Some(active.tables)))
                }
                Top::Raw(raw) => {
                    give_up(&*raw.store, path)?;
                    Ok((raw.identity, None))
                }
                Top::Frozen => unreachable!("a disk without an active layer takes no snapshots"),
            }
        };
        let (identity, tables) = finish().map_err(|error| self.latch(error))?;
        let index = self.index_newest(before, path);
        let opener = self.resources.files().opener();
        let now = opener.identity(path, &Gate::unrestricted())?;
        if now.file != identity.file {
            return Err(Error::from(ErrorKind::Changed).in_file(path));
        }
        let newest = self.resources.share_layer(Layer::new(path.to_owned(), now, before.size, tables));
        // Now, not in the first request for it.
        self.resources.files().store(&newest)?;
        let map = unsettled.frozen.as_ref().expect("made by `prepare`").settled(newest)?;
        let map = Arc::new(match index {
            Some(index) => map.with_index(index),
            None => map,
        });
        self.resources.offer_map(&map);
        let settled = self.put_layers(unsettled.settled(map));
        if let Some(indexed) = self.index_whole(&settled) {
            self.put_layers(indexed);
        }
        Ok(())
    }
}

/// What was active, as a layer whose bytes are read through the file that is open for writing.
fn provisional(before: &Layers, path: &Path) -> Arc<Layer> {
    let (identity, tables, file) = match &before.top {
        Top::Qcow2(active) => (active.identity, Some(active.tables), &active.file),
        Top::Raw(raw) => (raw.identity, None, &raw.file),
        Top::Frozen => unreachable!("a disk without an active layer takes no snapshots"),
    };
    // It may still grow; that its entries are sound, the layer itself sees to.
    let identity = FileIdentity { len: u64::MAX, ..identity };
    let layer = Layer::new(path.to_owned(), identity, before.size, tables);
    layer.put_file(Some(Arc::clone(file)));
    Arc::new(layer)
}

fn give_up(store: &dyn Store, path: &Path) -> Result<()> {
    store
        .give_up_writing()
        .while_trying("turn the writer's lock into a reader's")
        .map_err(|error| error.in_file(path))
}
