//! The map of a chain in which one layer's file is being written: by a merge, which changes nothing that is read.

use std::sync::Arc;

use vmstrata_types::{GuestOffset, LayerIndex};

use super::FrozenMap;
use crate::cache::{PAGE_SHIFT, PAGE_WORDS};
use crate::error::Result;
use crate::layer::Layer;

impl FrozenMap {
    /// The same map, pages in memory and index included, with another object for the layer at `index`.
    pub(crate) fn with_layer(&self, index: LayerIndex, layer: Arc<Layer>) -> Self {
        let mut layers: Vec<Arc<Layer>> = self.layers().cloned().collect();
        layers[index.index()] = layer;
        Self { index: self.index.clone(), ..self.over_layers(layers) }
    }

    /// Makes the pages that `other`, of the same disk, has in memory: who asks for them next should not have to wait.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn warm_as(&self, other: &Self) -> Result<()> {
        if self.unit != other.unit {
            return Ok(());
        }
        for page in 0..self.size.min(other.size).div_ceil(self.unit.size()).div_ceil(PAGE_WORDS as u64) {
            if self.cache.contains(other.owner.key(page)) {
                self.fill(GuestOffset::new(page << PAGE_SHIFT << self.unit.get()))?;
            }
        }
        Ok(())
    }
}
