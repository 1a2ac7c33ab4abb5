//! Keeping the index on disk up to date as layers are frozen.
//!
//! Nothing here is an error: a disk without an index works, and opens slower.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use crate::chain::open_layer;
use crate::error::{ErrorKind, Result};
use crate::index::{self, Found, Index, IndexBuilder, IndexOptions, IndexedFile, Looks};
use crate::layer::Format;
use crate::layers::{Layers, Top};
use crate::map::FrozenMap;
use crate::names::is_published;
use crate::opener::Role;

/// How long to do without an index before one is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

impl Disk {
    /// Adds an index to the layer at `path`, which was frozen just now on top of `before`'s frozen layers: writes the
    /// pages in which the layer differs from them.
    pub(super) fn index_newest(&self, before: &Layers, path: &Path) -> Option<Arc<Index>> {
        let below = before.frozen.as_ref()?.index()?;
        let extend = || -> Result<Index> {
            let gate = self.home().options.gate(self.path())?;
            let opener = self.resources.files().opener();
            let index = index::extend(path, Format::Qcow2, below.layers(), Some(below), &gate, opener)?;
            tracing::debug!(layer = %path.display(), kind = ?index.kind(), bytes = index.bytes(), "index written");
            Ok(index)
        };
        let missing = |error: &crate::Error| {
            self.finalizing.failures.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, "the new layer gets no index");
        };
        extend().inspect_err(missing).ok().map(Arc::new)
    }

    /// Makes the indices of a chain that has none, and goes on with them. It reads the tables of every layer, which no snapshot
    /// should wait for again and again: where that was in vain, a full host or a locked layer, it is tried again later.
    pub(super) fn index_whole(&self) {
        let is_indexed = |map: &FrozenMap| map.index().is_some();
        if self.layers_now().frozen.as_deref().is_none_or(is_indexed)
            || self.finalizing.unindexed_since.lock().is_some_and(|since| since.elapsed() < AGAIN_AFTER)
        {
            return;
        }
        if let Err(error) = index::build(self.path(), &self.index_options()) {
            tracing::warn!(disk = %self.path().display(), %error, "making the chain's indices ended early");
        }
        self.use_index();
    }

    fn index_options(&self) -> IndexOptions {
        IndexOptions::of_disk(&self.options(), Some(self.resources.files().opener()))
    }

    /// Goes on with the index that the newest frozen layer has, if it answers for all of them. The caller keeps the layers
    /// from changing.
    pub(super) fn use_index(&self) {
        let layers = self.layers_now();
        let (Some(map), Top::Qcow2(_)) = (&layers.frozen, &layers.top) else { return };
        let why = match self.indexed(map) {
            Ok(Some(indexed)) => {
                let indexed = Arc::new(indexed);
                self.resources.offer_map(&indexed);
                self.put_layers_and_call(Layers { frozen: Some(indexed), ..Layers::clone(&layers) });
                *self.finalizing.unindexed_since.lock() = None;
                return;
            }
            // Where it is read past the host's cache: nothing is written beside it.
            Ok(None) if map.layers().last().is_some_and(|newest| is_published(&newest.path)) => return,
            Ok(None) => "a layer cannot have one".to_owned(),
            Err(error) => error.to_string(),
        };
        let disk = self.path().display();
        tracing::warn!(%disk, why, "the chain gets no index: it opens slower; see `vmstrata index build`");
        *self.finalizing.unindexed_since.lock() = Some(Instant::now());
    }

    fn indexed(&self, map: &FrozenMap) -> Result<Option<FrozenMap>> {
        let newest = map.layers().last().expect("a frozen chain has a layer");
        if newest.window.is_some() {
            return Ok(None);
        }
        let (gate, opener) = (self.home().options.gate(self.path())?, self.resources.files().opener());
        let top = open_layer(&newest.path, Role::Frozen, Some(newest.format()), &gate, &**opener)?;
        let Found::Whole(index) = index::load(&top, &gate, opener, &mut Looks::default()) else {
            return Ok(None);
        };
        let files = index.layers().iter().map(|layer| layer.identity.file);
        if !files.eq(map.layers().map(|layer| layer.identity.file)) {
            return Err(ErrorKind::Changed.into());
        }
        Ok(Some(map.indexed(Arc::from(index))).filter(|map| map.index().is_some()))
    }

    /// Whether its chain had an index, when it was read last, that did not hold any more, or not for all layers, and has
    /// none yet that does: making it anew ([`Indexing`]) spares the next one who opens it the tables of all layers.
    pub fn lost_its_index(&self) -> bool {
        let lacks = |map: &Arc<FrozenMap>| map.index().is_none();
        self.lost_index && !self.is_read_only() && self.layers_now().frozen.as_ref().is_some_and(lacks)
    }
}

/// The indices of a disk in use, made a layer at a time.
#[derive(Debug)]
pub struct Indexing {
    disk: Arc<Disk>,
    builder: IndexBuilder,
}

impl Indexing {
    /// Reads the chain's headers. The disk's own file is left alone, unless it is frozen, too. `keep_unread` as in
    /// [`IndexOptions`].
    ///
    /// # Errors
    /// A chain that cannot be read.
    pub fn of_disk(disk: &Arc<Disk>, keep_unread: bool) -> Result<Self> {
        let builder = IndexBuilder::new(disk.path(), &IndexOptions { keep_unread, ..disk.index_options() })?;
        Ok(Self { disk: Arc::clone(disk), builder })
    }

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.builder.layers()
    }

    /// Whether all are done.
    pub fn is_done(&self) -> bool {
        self.builder.is_done()
    }

    /// Makes the index of the next layer from the base up, if it lacks one; `None` when all are done. From the last
    /// one on the disk uses them. Other changes of the disk's layers wait for the step.
    ///
    /// # Errors
    /// A disk that is closed.
    pub fn step(&mut self) -> Result<Option<IndexedFile>> {
        let disk = &self.disk;
        let _changing = disk.change();
        disk.check_range(GuestRange::new(GuestOffset::ZERO, 0))?;
        let step = self.builder.step();
        if step.is_some() && self.is_done() {
            disk.use_index();
        }
        Ok(step)
    }
}
