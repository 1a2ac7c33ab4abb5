//! The end of a merge of a disk in use: the files first, then what requests see, then the index.

use std::sync::Arc;

use vmstrata_store::Gate;

use super::Running;
use crate::disk::Indexing;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Layer;
use crate::layers::Layers;
use crate::merge::{Copier, MergeFault};

impl Running {
    /// Lets the target stand on what is left, and requests use the shorter chain.
    ///
    /// # Errors
    /// A host that cannot write or flush; layers that changed meanwhile.
    pub(crate) fn relink(&mut self, copier: &mut Copier) -> Result<()> {
        if copier.layers.is_some() {
            self.relink_frozen(copier)?
        } else {
            self.relink_active(copier)?
        }
        // Whoever still reads the dropped layers has left after this.
        self.disk.epochs.synchronize();
        Ok(())
    }

    fn relink_active(&self, copier: &Copier) -> Result<()> {
        let disk = &self.disk;
        let _changing = disk.change();
        disk.check_changeable()?;
        let layers = disk.layers_now();
        self.check_top(&layers, copier)?;
        layers.commit().map_err(|error| disk.fail(error))?;
        copier.relink().map_err(|error| disk.fail_if_fatal(error))?;
        let frozen = copier.after.clone();
        disk.put_layers_and_call(Layers { frozen, merging_to: None, ..Layers::clone(&layers) });
        Ok(())
    }

    fn relink_frozen(&mut self, copier: &mut Copier) -> Result<()> {
        let (disk, target) = (Arc::clone(&self.disk), Arc::clone(&copier.target));
        // Before the files are changed: afterwards requests must get the shorter chain.
        self.finalized_layers()?;
        copier.finalize(|| disk.epochs.synchronize())?;
        copier.relink()?;
        copier.let_go();
        let layer = self.finalized_target(copier)?;
        loop {
            let before = self.finalized_layers()?;
            let old = before.frozen.as_ref().ok_or(MergeFault::LayersChanged)?;
            let (first, above) = (self.range.first.index(), self.range.target().index() + 1);
            let is_there = |layer: &Arc<Layer>| layer.identity.file == target.identity.file;
            if !old.layers().nth(target.index.index()).is_some_and(is_there) {
                return Err(Error::from(MergeFault::LayersChanged).in_file(&disk.path));
            }
            let kept = old.layers().take(first).cloned();
            let shorter = kept.chain([Arc::clone(&layer)]).chain(old.layers().skip(above).cloned()).collect();
            let index = copier.after.as_ref().and_then(|map| map.index().cloned());
            let below = copier.after.as_deref();
            let map = disk.resources.share_map_by(shorter, index, |map| map.take_over(old, below, first))?;
            let _changing = disk.change();
            disk.check_changeable()?;
            if Arc::ptr_eq(&before, &disk.layers_now()) {
                disk.put_layers_and_call(Layers { frozen: Some(map), ..Layers::clone(&before) });
                return Ok(());
            }
        }
    }

    /// The layers of now.
    ///
    /// # Errors
    /// [`MergeFault::LayersChanged`]: a snapshot that could not be finalized.
    fn finalized_layers(&self) -> Result<Arc<Layers>> {
        let _changing = self.disk.change();
        let layers = arc_swap::Guard::into_inner(self.disk.layers_now());
        if layers.before.is_some() {
            return Err(Error::from(MergeFault::LayersChanged).in_file(&self.disk.path));
        }
        Ok(layers)
    }

    /// The target as a layer that grows no more.
    fn finalized_target(&self, copier: &Copier) -> Result<Arc<Layer>> {
        let (target, resources) = (&copier.target, &self.disk.resources);
        let path = copier.path();
        let identity = resources.files().opener().identity(path, &Gate::unrestricted())?;
        if identity.file != target.identity.file {
            return Err(Error::from(ErrorKind::Changed).in_file(path));
        }
        let layer = Layer::new(path.to_owned(), identity, target.size(), Some(target.tables_now()));
        let layer = resources.share_layer(layer);
        resources.files().store(&layer)?;
        Ok(layer)
    }

    /// Makes the index of one more layer; when all have one, the disk uses them. Returns whether that is all.
    ///
    /// # Errors
    /// A chain that cannot be read; a disk that is closed.
    pub(crate) fn index(&mut self) -> Result<bool> {
        let indexing = match &mut self.indexing {
            Some(indexing) => indexing,
            none => none.insert(Indexing::of_disk(&self.disk, true)?),
        };
        Ok(indexing.step()?.is_none())
    }
}
