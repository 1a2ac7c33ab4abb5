//! Letting a frozen layer grow for as long as it is copied into.

use std::sync::Arc;

use vmstrata_qcow2::Header;
use vmstrata_store::{FileId, FileIdentity, Gate, OpenStore};
use vmstrata_types::LayerIndex;

use super::{Running, others};
use crate::chain::Top as OpenTop;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Layer, Tables};
use crate::layers::{Layers, Top, index_of};
use crate::map::FrozenMap;
use crate::merge::plan::{Link, below_of, map_up_to};
use crate::merge::relink::Relink;
use crate::merge::users::{Users, holder_of, opened_here};
use crate::merge::{Copier, MergeFault, target};
use crate::opener::Role;

impl Running {
    /// Begins to copy into a frozen layer.
    pub(super) fn let_grow(
        &mut self,
        links: &[Link],
        users: &Users,
        after: Option<Arc<FrozenMap>>,
    ) -> Result<Copier> {
        let (disk, index) = (Arc::clone(&self.disk), self.range.target());
        let (link, resources) = (&links[index.index()], &disk.resources);
        self.claim(link)?;
        // Before it is open a second time, which hides the locks of others.
        self.refuse_users(links, users)?;
        let below = map_up_to(&disk.path, links, self.range.last.index(), &disk.options, resources)?;
        let top = link.open(Role::CopiedInto, &**resources.files().opener())?;
        let header = &top.head.as_ref().ok_or(ErrorKind::Changed)?.header;
        let relink = Relink::plan(&*top.opened.store, header, below_of(links, self.range)?.as_ref())
            .map_err(|error| error.in_layer(index).in_file(&link.path))?;
        self.put_growing(links, &top, header)?;
        let active = target::open(&top, index, resources)?;
        // A disk that is opened from here on looks at the file, and finds it locked.
        self.refuse_users(links, users).inspect_err(|_| target::give_back(&top, &active))?;
        let layers = Layers::new(header.size, Top::Qcow2(Arc::clone(&active)), Some(below), resources);
        Copier::of_frozen(Arc::clone(&active), layers, after, relink)
            .inspect_err(|_| target::give_back(&top, &active))
    }

    /// Lets requests know that the target grows.
    fn put_growing(&self, links: &[Link], top: &OpenTop, header: &Header) -> Result<()> {
        let (disk, index) = (&self.disk, self.range.target());
        let (_changing, layers) = self.hold_layers(links)?;
        let map = layers.frozen.as_ref().expect("a frozen target is in it");
        let identity = FileIdentity { len: u64::MAX, ..top.opened.identity };
        let path = map.layer(index).path.to_path_buf();
        let growing = Layer::new(path, identity, header.size, Some(Tables::of(header)));
        growing.put_file(Some(OpenStore::new(Arc::clone(&top.opened.store))));
        let map = map.with_layer(index, Arc::new(growing));
        disk.put_layers_and_call(layers.over(Some(Arc::new(map)), None));
        disk.epochs.synchronize();
        Ok(())
    }

    /// Makes sure that no one else stands on the target, and that no disk of this process will.
    fn claim(&mut self, link: &Link) -> Result<()> {
        let disk = &self.disk;
        if !disk.resources.merging().lock().insert(link.file) {
            return Err(Error::from(MergeFault::Busy).in_file(&link.path));
        }
        self.target = Some(link.file);
        let here = others(&self.disk).find(|other| other.stands_on(link.file));
        let here = here.map(|other| format!("the disk {}", other.path.display()));
        here.map_or(Ok(()), |by| Err(Error::from(MergeFault::TargetInUse { by }).in_file(&link.path)))
    }

    /// Refuses a target that another process uses, or a disk of another process that stands on it.
    fn refuse_users(&self, links: &[Link], users: &Users) -> Result<()> {
        let (disk, above) = (&self.disk, &links[self.range.target().index()..]);
        let target = above[0].file;
        let in_use = disk.here(|here| {
            let own = usize::from((here.store)(target).is_some());
            // A file's locks are seen through each other open file, also of this process: a queue without requests may have
            // the target as it was before, and so has a merge of it.
            let but = (opened_here(target) > own).then_some(target);
            let by_process = but.and_then(holder_of);
            by_process.or_else(|| users.in_use(above, &here, but.as_slice()))
        });
        match in_use {
            Some(by) => Err(Error::from(MergeFault::TargetInUse { by }).in_file(&above[0].path)),
            None => Ok(()),
        }
    }

    /// Lets the target be a layer like others again.
    pub(super) fn grow_no_more(&self, file: FileId, layers: &Layers) {
        let resources = &self.disk.resources;
        let Some((map, index)) = layers.frozen.as_ref().and_then(|map| Some((map, growing_at(map, file)?)))
        else {
            return;
        };
        let settled = resources.files().opener().identity(&map.layer(index).path, &Gate::unrestricted());
        match settled {
            Ok(identity) if identity.file == file => {
                let old = map.layer(index);
                let layer = Layer::new(old.path.to_path_buf(), identity, old.size, old.tables);
                let map = map.with_layer(index, resources.share_layer(layer));
                self.disk.put_layers_and_call(layers.over(Some(Arc::new(map)), None));
            }
            // It is still open, as it was.
            _ => {
                tracing::warn!(file = %map.layer(index).path.display(), "a merged layer cannot be examined")
            }
        }
    }
}

/// Where in the chain this layer is, if it is still allowed to grow.
fn growing_at(map: &FrozenMap, file: FileId) -> Option<LayerIndex> {
    let grows = |layer: &Arc<Layer>| layer.identity.file == file && layer.identity.len == u64::MAX;
    map.layers().position(grows).map(index_of)
}
