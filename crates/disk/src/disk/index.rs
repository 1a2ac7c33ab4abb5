//! Keeping the index on disk up to date as layers are frozen.
//!
//! Nothing here is an error: a disk without an index works, and opens slower.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Disk;
use crate::error::Result;
use crate::index::{self, Found, Index, IndexOptions, Looks};
use crate::layer::Format;
use crate::layers::Layers;
use crate::map::FrozenMap;
use crate::opener::Role;

impl Disk {
    /// Adds an index to the layer at `path`, which was frozen just now on top of `before`'s frozen layers: writes the
    /// pages in which the layer differs from them.
    pub(super) fn index_newest(&self, before: &Layers, path: &Path) -> Option<Arc<Index>> {
        let below = before.frozen.as_ref()?.index()?;
        let extend = || -> Result<Index> {
            let gate = self.options.gate(&self.path)?;
            let opener = self.resources.files().opener();
            let (index, bytes) =
                index::extend(path, Format::Qcow2, below.layers(), Some(below), &gate, opener)?;
            tracing::debug!(layer = %path.display(), bytes, "index written");
            Ok(index)
        };
        let missing = |error: &crate::Error| {
            self.settling.failures.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, "the new layer gets no index");
        };
        extend().inspect_err(missing).ok().map(Arc::new)
    }

    /// Makes the indices of a chain that has none, and goes on with them. Tries once: it reads the tables of every layer,
    /// which no snapshot should wait for again and again.
    pub(super) fn index_whole(&self, layers: &Layers) -> Option<Layers> {
        let map = layers.frozen.as_ref()?;
        if map.index().is_some() || self.settling.unindexed.load(Ordering::Relaxed) {
            return None;
        }
        let make = || -> Result<Option<Arc<FrozenMap>>> {
            let opener = self.resources.files().opener();
            let options = IndexOptions {
                allow_backing: self.options.allow_backing.clone(),
                format: self.options.format,
                opener: Some(Arc::clone(opener)),
                ..IndexOptions::default()
            };
            index::build(&self.path, &options)?;
            let newest = map.layers().last().expect("a frozen chain has a layer");
            let gate = self.options.gate(&self.path)?;
            let top = crate::chain::open_layer(
                &newest.path,
                Role::Frozen,
                Some(newest.format()),
                &gate,
                &**opener,
            )?;
            match index::load(&top, &gate, opener, &mut Looks::default()) {
                Found::Whole(index) => Ok(Some(Arc::new(map.indexed(Arc::from(index))))),
                _ => Ok(None),
            }
        };
        let disk = self.path.display();
        let why = match make() {
            Ok(Some(map)) => return Some(layers.settled(map)),
            Ok(None) => "a layer cannot have one".to_owned(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(%disk, why, "the chain gets no index: it opens slower; see `vmstrata index build`");
        self.settling.unindexed.store(true, Ordering::Relaxed);
        None
    }
}
