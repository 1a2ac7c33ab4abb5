//! Letting a frozen layer grow for as long as it is copied into.

use std::sync::Arc;

use vmstrata_qcow2::Header;
use vmstrata_store::{Gate, OpenStore};

use super::Running;
use crate::chain::Top as OpenTop;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Growth, Layer, Tables};
use crate::layers::{Layers, Top};
use crate::map::FrozenMap;
use crate::merge::plan::{below_of, map_up_to};
use crate::merge::relink::Relink;
use crate::merge::{Copier, MergeFault, let_go, target};
use crate::opener::Role;
use crate::refs::{ChainFile, Users, holder_among, open_twice};

impl Running {
    /// Begins to copy into a frozen layer.
    pub(super) fn let_grow(&mut self, chain: &[ChainFile], users: &Users) -> Result<Copier> {
        let after = self.after(chain)?;
        let (disk, index) = (Arc::clone(&self.disk), self.range.target());
        let (link, resources) = (&chain[index.index()], &disk.resources);
        self.claim(link)?;
        // Before it is open a second time, which hides the locks of others.
        self.refuse_users(chain, users)?;
        let below = map_up_to(&disk.path, chain, self.range.last.index(), &disk.options(), resources)?;
        let top = link.open(Role::CopiedInto, &**resources.files().opener())?;
        let header = &top.head.as_ref().ok_or(ErrorKind::Changed)?.header;
        let relink = Relink::plan(&*top.opened.store, header, below_of(chain, self.range)?.as_ref())
            .map_err(|error| error.in_layer(index).in_file(&link.path))?;
        self.put_growing(chain, &top, header)?;
        let active = target::open(&top, index, resources)?;
        // A disk that is opened from here on looks at the file, and finds it locked.
        self.refuse_users(chain, users).inspect_err(|_| target::give_back(&top, &active))?;
        let layers = Layers::new(header.size, Top::Qcow2(Arc::clone(&active)), Some(below), resources);
        Copier::of_frozen(Arc::clone(&active), layers, after, relink)
            .inspect_err(|_| target::give_back(&top, &active))
    }

    /// Lets requests know that the target grows.
    fn put_growing(&self, chain: &[ChainFile], top: &OpenTop, header: &Header) -> Result<()> {
        let (disk, index) = (&self.disk, self.range.target());
        let (_changing, layers) = self.hold_layers(chain)?;
        let map = layers.frozen.as_ref().expect("a frozen target is in it");
        let path = map.layer(index).path.to_path_buf();
        let growing = Layer::new(path, top.opened.identity, header.size, Some(Tables::of(header))).growing();
        growing.put_file(Some(OpenStore::new(Arc::clone(&top.opened.store))));
        let map = map.with_layers(index.index(), [Arc::new(growing)]);
        disk.put_layers_and_call(Layers { frozen: Some(Arc::new(map)), ..Layers::clone(&layers) });
        disk.epochs.synchronize();
        Ok(())
    }

    /// Refuses a target that another process uses, or a disk of another process that stands on it.
    fn refuse_users(&self, chain: &[ChainFile], users: &Users) -> Result<()> {
        let above = &chain[self.range.target().index()..];
        let in_use = self.disk.with_local_holders(|here| {
            // A queue without requests may have the target as it was before, and so has a merge of it.
            let but = open_twice(&above[..1], &here);
            holder_among(&but).or_else(|| users.in_use(above, &here, &but))
        });
        match in_use {
            Some(by) => Err(Error::from(MergeFault::TargetInUse { by }).in_file(&above[0].path)),
            None => Ok(()),
        }
    }

    /// Lets the layers that were written, or kept open meanwhile, be like others again.
    pub(super) fn grow_no_more(&self, layers: &Layers) {
        let Some(map) = &layers.frozen else { return };
        let grows = |(_, layer): &(usize, &Arc<Layer>)| layer.growth == Growth::Growing;
        let mut finalized: Option<FrozenMap> = None;
        for (index, layer) in map.layers().enumerate().filter(grows) {
            match self.finalized(layer) {
                Ok(layer) => {
                    let now = finalized.as_ref().unwrap_or(map).with_layers(index, [layer]);
                    finalized = Some(now);
                }
                // It is still open, as it was.
                Err(error) => {
                    tracing::warn!(file = %layer.path.display(), %error, "a merged layer cannot be examined")
                }
            }
        }
        if let Some(map) = finalized {
            self.disk.put_layers_and_call(Layers { frozen: Some(Arc::new(map)), ..layers.clone() });
        }
    }

    /// The same layer as one that does not grow.
    fn finalized(&self, layer: &Layer) -> Result<Arc<Layer>> {
        let resources = &self.disk.resources;
        let identity = resources.files().opener().identity(&layer.path, &Gate::unrestricted())?;
        if identity.file != layer.identity.file {
            return Err(ErrorKind::Changed.into());
        }
        // Requests that still have this object keep its file open, with a writer's lock. The lock would refuse the layer to readers
        // that open it.
        if let Some(file) = layer.open_file() {
            let_go(&**file, &layer.path);
        }
        let layer = Layer::new(layer.path.to_path_buf(), identity, layer.size, layer.tables);
        Ok(resources.share_layer(layer))
    }
}
