//! Dropping layers of a disk in use: the engine's part of [`crate::merge`].
//!
//! ```text
//!   target is frozen: let it grow ─► copy, beside the guest ─► relink ─► map of the shorter chain ─► swap ─► wait
//!   target is active: promise ─────► copy, as a writer ──────► relink ─► the map that was promised ─► swap ─► wait
//! ```
//!
//! **A frozen target** grows while it is copied into, and its tables change, though not in what they say together with
//! the layers below. Requests get an object of the layer that allows for that first. Other disks hold objects that do not, so
//! a target that any other disk in use stands on is refused, and one that is opened meanwhile is.
//!
//! **The active target** is written by the guest meanwhile. A cluster that was copied could be discarded again, and be let
//! go of because the layers below read as zeros; without the dropped ones they may not. So first a promise is made:
//! [`crate::layers::Layers::merging_to`] keeps clusters that do not read as zeros over both.
//!
//! A snapshot may be taken meanwhile. If it freezes the target, the merge ends with [`MergeFault::LayersChanged`]; begun
//! again, it finds what was copied.
//!
//! Lock order: `changing` is held for each change of layers, never while copying.

mod finish;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmstrata_store::{FileId, FileIdentity, Gate, OpenStore};
use vmstrata_types::{GuestOffset, GuestRange, LayerIndex};

use super::Disk;
use crate::active::Active;
use crate::chain::{OpenOptions, open_layer, read_head};
use crate::epoch::thread_shard;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::index::IndexBuilder;
use crate::layer::{Format, Layer, Tables};
use crate::layers::{Layers, Top, index_of};
use crate::map::FrozenMap;
use crate::merge::plan::{Link, below_of, links, map_up_to};
use crate::merge::relink::Relink;
use crate::merge::remove::{Locks, user_of};
use crate::merge::{Copier, MergeFault, MergeRange, leftovers, target};
use crate::opener::Role;

/// Most bytes of the disk looked at before others get their turn.
const TURN: u64 = 256 << 10;

/// A merge of a disk in use. Dropped, the disk may be merged again.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) disk: Arc<Disk>,
    range: MergeRange,
    /// A frozen target.
    target: Option<FileId>,
    indexing: Option<IndexBuilder>,
}

impl Disk {
    pub(crate) fn options(&self) -> &OpenOptions {
        &self.options
    }

    /// Whether one of its frozen layers is this file.
    fn stands_on(&self, file: FileId) -> bool {
        let layers = self.layers_now();
        layers.frozen.as_ref().is_some_and(|map| map.layers().any(|layer| layer.identity.file == file))
    }

    /// Refuses a disk that was just opened over a layer that is being copied into, and removes what a killed merge of it
    /// left.
    pub(super) fn enter_beside_merges(self: &Arc<Self>) -> Result<()> {
        // The merge that enters a file looks for disks after that, and this disk is known by now: one sees the other.
        let merging = self.resources.merging().lock().iter().any(|&file| self.stands_on(file));
        if merging {
            return Err(Error::from(MergeFault::Busy).in_file(&self.path));
        }
        if !self.is_read_only() {
            self.sweep_merged();
        }
        Ok(())
    }

    /// Removes what a killed merge left.
    fn sweep_merged(self: &Arc<Self>) {
        let needed = |file| others(self).any(|other| other.stands_on(file));
        leftovers::sweep(&self.path, &self.options, Locks::MayBeOurs, &needed);
    }

    /// Refuses to change the layers of a disk that is closed, read-only or latched.
    pub(super) fn check_changeable(&self) -> Result<()> {
        self.check_range(GuestRange::new(GuestOffset::ZERO, 0))?;
        self.check_writable()
    }
}

impl Running {
    /// Makes everything ready, and lets requests know that the target will be written.
    ///
    /// # Errors
    /// As [`crate::merge::Merge::of_disk`]. Nothing has changed for requests.
    pub(crate) fn begin(disk: &Arc<Disk>, range: MergeRange) -> Result<(Self, Vec<Link>, Copier)> {
        if disk.merging.swap(true, Ordering::AcqRel) {
            return Err(Error::from(MergeFault::Busy).in_file(&disk.path));
        }
        let mut running = Self { disk: Arc::clone(disk), range, target: None, indexing: None };
        let changing = disk.change();
        disk.check_changeable()?;
        disk.sweep_merged();
        let links = links(&disk.path, &disk.options, &**disk.resources.files().opener())?;
        range.check(&links).map_err(|fault| Error::from(fault).in_file(&disk.path))?;
        let layers = arc_swap::Guard::into_inner(disk.layers_now());
        running.check_links(&layers, &links)?;
        let copier = match &layers.top {
            Top::Qcow2(active) if range.target() == layers.top_index() => {
                running.promise(&layers, active, &links)?
            }
            _ => running.let_grow(&layers, &links)?,
        };
        drop(changing);
        Ok((running, links, copier))
    }

    /// Makes sure that the files lead to the layers that the disk has.
    fn check_links(&self, layers: &Layers, links: &[Link]) -> Result<()> {
        let frozen = layers.frozen.iter().flat_map(|map| map.layers());
        let same = frozen.zip(links).all(|(layer, link)| layer.identity.file == link.file);
        if same && links.len() == layers.top_index().index() + 1 && layers.before.is_none() {
            return Ok(());
        }
        Err(Error::from(MergeFault::LayersChanged).in_file(&self.disk.path))
    }

    fn after(&self, links: &[Link]) -> Result<Option<Arc<FrozenMap>>> {
        let disk = &self.disk;
        let stays = self.range.first.index().checked_sub(1);
        stays.map(|layer| map_up_to(&disk.path, links, layer, &disk.options, &disk.resources)).transpose()
    }

    /// Begins to copy into the active layer.
    fn promise(&self, layers: &Arc<Layers>, active: &Arc<Active>, links: &[Link]) -> Result<Copier> {
        let plan = || -> Result<Relink> {
            let len = active.store.len().while_trying("read the file's length")?;
            let head = read_head(&*active.store, len)?;
            Relink::plan(&*active.store, &head.header, below_of(links, self.range)?.as_ref())
        };
        let relink = plan().map_err(|error| error.in_file(&active.path))?;
        let after = self.after(links)?;
        let promised = layers.over(layers.frozen.clone(), after.clone());
        // No writer may be inside that does not know of the promise.
        self.disk.writers.closed(|| self.disk.put_layers(promised));
        Ok(Copier::new(Arc::clone(active), None, after, relink))
    }

    /// Begins to copy into a frozen layer.
    fn let_grow(&mut self, layers: &Arc<Layers>, links: &[Link]) -> Result<Copier> {
        let (disk, index) = (Arc::clone(&self.disk), self.range.target());
        let (link, resources) = (&links[index.index()], &disk.resources);
        self.claim(link)?;
        let opener = &**resources.files().opener();
        let gate = Gate::unrestricted();
        let top = open_layer(&link.path, Role::Indexed, Some(Format::Qcow2), &gate, opener)?;
        if top.opened.identity.file != link.file {
            return Err(Error::from(ErrorKind::Changed).in_file(&link.path));
        }
        let header = &top.head.as_ref().ok_or(ErrorKind::Changed)?.header;
        let relink = Relink::plan(&*top.opened.store, header, below_of(links, self.range)?.as_ref())
            .map_err(|error| error.in_layer(index).in_file(&link.path))?;
        let below = map_up_to(&disk.path, links, self.range.last.index(), &disk.options, resources)?;
        let after = self.after(links)?;
        let map = layers.frozen.as_ref().expect("a frozen target is in it");
        let identity = FileIdentity { len: u64::MAX, ..top.opened.identity };
        let size = header.size;
        let growing =
            Layer::new(map.layer(index).path.to_path_buf(), identity, size, Some(Tables::of(header)));
        growing.put_file(Some(OpenStore::new(Arc::clone(&top.opened.store))));
        let map = map.with_layer(index, Arc::new(growing));
        disk.put_layers(layers.over(Some(Arc::new(map)), None));
        disk.epochs.synchronize();
        let active = target::open(&top, index, resources)?;
        let layers = Layers::new(size, Top::Qcow2(Arc::clone(&active)), Some(below), resources);
        Ok(Copier::new(active, Some(layers), after, relink))
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
        let by = here.or_else(|| user_of(&link.path).map(|user| user.to_string()));
        by.map_or(Ok(()), |by| Err(Error::from(MergeFault::TargetInUse { by }).in_file(&link.path)))
    }

    /// Whether another disk of this process, or this one, stands on a file.
    pub(crate) fn others_stand_on(&self, file: FileId) -> bool {
        self.disk.stands_on(file) || others(&self.disk).any(|other| other.stands_on(file))
    }

    /// Copies into the active layer.
    ///
    /// # Errors
    /// As [`Layers::pull_up`]; a disk that takes no more writes, or has another active layer.
    pub(crate) fn pull_up(&self, copier: &Copier, range: GuestRange) -> Result<u64> {
        let mut copied = 0;
        let turn = TURN.max(copier.target.tables.geometry.cluster_bits.size());
        let mut done = 0;
        while done < range.len {
            let part = GuestRange::new(range.start + done, turn.min(range.len - done));
            copied += self.pull_up_part(copier, part)?;
            done += part.len;
        }
        Ok(copied)
    }

    fn pull_up_part(&self, copier: &Copier, part: GuestRange) -> Result<u64> {
        let disk = &self.disk;
        let _guard = disk.epochs.guard(thread_shard());
        let _inside = disk.writers.pass();
        disk.check_changeable()?;
        let layers = disk.layers_now();
        self.check_top(&layers, copier)?;
        layers.pull_up(part, copier.after.as_deref()).map_err(|error| disk.latch_if_lost(error))
    }

    fn check_top(&self, layers: &Layers, copier: &Copier) -> Result<()> {
        match &layers.top {
            Top::Qcow2(active) if Arc::ptr_eq(active, &copier.target) => Ok(()),
            _ => Err(Error::from(MergeFault::LayersChanged).in_file(&self.disk.path)),
        }
    }
}

impl Drop for Running {
    /// Takes the promise back, or lets the target grow no more. What is copied stays.
    fn drop(&mut self) {
        let disk = &self.disk;
        let changing = disk.change();
        let layers = disk.layers_now();
        if layers.merging_to.is_some() {
            disk.put_layers(layers.over(layers.frozen.clone(), None));
        } else if let (Some(file), Some(map)) = (self.target, &layers.frozen)
            && let Some(index) = growing_at(map, file)
        {
            let settled =
                self.disk.resources.files().opener().identity(&map.layer(index).path, &Gate::unrestricted());
            match settled {
                Ok(identity) if identity.file == file => {
                    let old = map.layer(index);
                    let layer = Layer::new(old.path.to_path_buf(), identity, old.size, old.tables);
                    let map = map.with_layer(index, disk.resources.share_layer(layer));
                    disk.put_layers(layers.over(Some(Arc::new(map)), None));
                }
                // It is still open, as it was.
                _ => {
                    tracing::warn!(file = %map.layer(index).path.display(), "a merged layer cannot be examined")
                }
            }
        }
        drop(changing);
        if let Some(file) = self.target {
            disk.resources.merging().lock().remove(&file);
        }
        disk.merging.store(false, Ordering::Release);
    }
}

/// The other disks of this process.
fn others(disk: &Arc<Disk>) -> impl Iterator<Item = Arc<Disk>> {
    disk.resources.upkeep().disks().into_iter().filter(|other| !Arc::ptr_eq(other, disk))
}

/// Where in the chain this layer is, if it is still allowed to grow.
fn growing_at(map: &FrozenMap, file: FileId) -> Option<LayerIndex> {
    let grows = |layer: &Arc<Layer>| layer.identity.file == file && layer.identity.len == u64::MAX;
    map.layers().position(grows).map(index_of)
}
