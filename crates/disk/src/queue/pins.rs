//! The files of layers that a queue's ring has pinned.
//!
//! With a thousand layers almost every request meets another file. This table is all that the fast road looks at to get
//! from a layer to its file: four bytes a layer, and neither the layer nor its store is touched.
//!
//! Only frozen layers are pinned. The kernel takes a killed process's ring apart when it gets round to it, and until then
//! a pinned file keeps its lock: a writer's would stand in the way of the next process that opens the disk.

use vmstrata_store::{OpenStore, PinnedFile, Ring};
use vmstrata_types::LayerIndex;

/// Pinned files by layer.
#[derive(Debug, Default)]
pub(super) struct Pins {
    by_layer: Vec<Option<PinnedFile>>,
    /// Whether the ring takes no more files.
    full: bool,
}

impl Pins {
    #[inline]
    pub(super) fn get(&self, layer: LayerIndex) -> Option<PinnedFile> {
        self.by_layer.get(layer.index()).copied().flatten()
    }

    /// Pins a frozen layer's file, unless it is, for the requests that follow.
    pub(super) fn add(&mut self, ring: &mut Ring, layer: LayerIndex, store: &OpenStore) {
        if self.full || self.get(layer).is_some() || !store.may_be_pinned() {
            return;
        }
        let pinned = ring.pin(store);
        self.full = pinned.is_none();
        if self.by_layer.len() <= layer.index() {
            self.by_layer.resize(layer.index() + 1, None);
        }
        self.by_layer[layer.index()] = pinned;
    }
}
