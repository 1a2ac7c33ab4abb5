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
//! **A commit** writes into the base of the dropped layers:
//!
//! ```text
//!   requests ──► map of the whole chain ──► the layer that has the newest: never what is written over meanwhile
//!   job      ──► what layers above the base have ──► written into the base ──► rename ──► shorter map
//! ```
//!
//! What is written has a newer version in a layer above, and the map leads there: requests see nothing of it, and none waits.
//! They get growing objects of the dropped layers and of the layer that stays; all keep their files open, because after the rename
//! that last one's path leads to another file. The states of dropped layers are lost with the first write. So the merge
//! claims them: it refuses if another disk of this process needs one, and keeps such a disk from being opened; other vmstrata
//! processes find them locked ([`Role::CopiedInto`]). Stock tools may begin to read the layer that stays, or a disk on it, as what they read is not touched.
//!
//! **The active target** is written by the guest meanwhile. A cluster that was copied could be discarded again, and be let
//! go of because the layers below read as zeros; without the dropped ones they may not. So first a promise is made:
//! [`crate::layers::Layers::merging_to`] keeps clusters that do not read as zeros over both.
//!
//! A snapshot may be taken meanwhile. If it freezes the target, the merge ends with [`MergeFault::LayersChanged`]; begun
//! again, it finds what was copied.
//!
//! Lock order: `changing` is held for each change of layers, never while copying.

use std::sync::Arc;

use vmstrata_qcow2::Header;
use vmstrata_store::{FileId, Gate, OpenStore};
use vmstrata_types::{GuestOffset, GuestRange, LayerIndex};

use super::state::Changing;
use super::{Disk, Indexing};
use crate::active::Active;
use crate::chain::{OpenOptions, Top as OpenTop, read_head};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::{Layer, Tables, TablesLock};
use crate::layers::{Layers, Top};
use crate::maintenance::Maintained;
use crate::map::FrozenMap;
use crate::merging::commit::{self, OpenDropped};
use crate::merging::direction::Asked;
use crate::merging::holes::Holes;
use crate::merging::plan::{below_of, map_up_to};
use crate::merging::relink::{Below, Relink};
use crate::merging::remove::refuse_overlooked;
use crate::merging::room::Room;
use crate::merging::stream::{After, Progress};
use crate::merging::{Copier, MergeFault, MergeOptions, MergeRange, Way, cleanup, let_go, target};
use crate::opener::Role;
use crate::refs::{ChainFile, LocalHolders, Users, chain_files, holder_among, open_twice};
use crate::snapshots::interrupted;

/// Most bytes of the disk looked at before others get their turn.
const TURN: u64 = 256 << 10;
/// The same, where nothing is copied.
const MEASURED: u64 = 64 << 20;

/// A merge of a disk in use. Dropped, the disk may be merged again.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) disk: Arc<Disk>,
    pub(super) range: MergeRange,
    /// Frozen layers that are written.
    claimed: Vec<FileId>,
    indexing: Option<Indexing>,
}

impl Disk {
    /// How the disk is opened again: a snapshot may have made a raw disk qcow2.
    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions { format: Some(self.format()), format_is_exact: true, ..self.home().options.clone() }
    }

    /// Refuses a disk that was just opened over a layer that is being copied into, and removes what a killed merge of it
    /// left.
    pub(super) fn enter_beside_merges(self: &Arc<Self>) -> Result<()> {
        // The merge that enters a file looks for disks after that, and this disk is known by now: one sees the other.
        let merging = self.resources.merging().lock().iter().any(|&file| self.stands_on(file));
        if merging {
            return Err(Error::from(MergeFault::Busy).in_file(self.path()));
        }
        if !self.is_read_only() {
            self.sweep_merged();
        }
        Ok(())
    }

    /// Removes what a killed merge left.
    pub(super) fn sweep_merged(self: &Arc<Self>) {
        self.with_local_holders(|here| cleanup::sweep(self.path(), &self.options(), here));
    }

    /// Does something with what this process has to do with files.
    fn with_local_holders<T>(self: &Arc<Self>, work: impl FnOnce(LocalHolders<'_>) -> T) -> T {
        let needs = |file| self.stands_on(file) || others(self).any(|other| other.stands_on(file));
        let store = |file| {
            let layers = self.layers_now();
            match &layers.top {
                Top::Qcow2(active) if active.identity.file == file => Some(Arc::clone(&active.file)),
                // Of a snapshot that is not finalized, or a layer that grows, the disk alone has the file.
                _ => self.resources.files().open_store(file).or_else(|| {
                    let mut frozen = layers.frozen.iter().flat_map(|map| map.layers());
                    frozen.find(|layer| layer.identity.file == file)?.open_file()
                }),
            }
        };
        work(LocalHolders { needs: &needs, store: &store })
    }

    /// Refuses to change the layers of a disk that is closed, read-only or failed.
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
    pub(crate) fn begin(
        disk: &Arc<Disk>,
        range: MergeRange,
        options: &MergeOptions,
    ) -> Result<(Self, Vec<ChainFile>, Copier)> {
        let (mut running, chain) = Self::enter(disk, |chain| {
            range.check(chain, options)?;
            Ok(range)
        })?;
        let users = Users::standing_on(&chain[range.first.index()..], disk.path(), &disk.options());
        refuse_overlooked(&chain, range, options, &users)
            .map_err(|fault| Error::from(fault).in_file(disk.path()))?;
        let is_active = range.target().index() + 1 == chain.len();
        let copier = match running.begin_commit(&chain, options)? {
            Some(copier) => copier,
            None if is_active => {
                let (after, below) = (running.after(&chain)?, below_of(&chain, range)?);
                let room = running.room(&chain, after.as_deref())?;
                running.promise(&chain, after, below.as_ref(), room)?
            }
            None => running.let_grow(&chain, &users)?,
        };
        Ok((running, chain, copier))
    }

    /// Has all that is left to do with the disk's layers done, and no other merge begin.
    pub(super) fn enter(
        disk: &Arc<Disk>,
        range: impl FnOnce(&[ChainFile]) -> std::result::Result<MergeRange, MergeFault>,
    ) -> Result<(Self, Vec<ChainFile>)> {
        let in_disk = |fault| Error::from(fault).in_file(disk.path());
        if disk.state.set_merging(true) {
            return Err(in_disk(MergeFault::Busy));
        }
        let nothing = MergeRange { first: LayerIndex::BASE, last: LayerIndex::BASE };
        let mut running =
            Self { disk: Arc::clone(disk), range: nothing, claimed: Vec::new(), indexing: None };
        // What the last snapshot left to do is done then: from there on the frozen layers' files say what is in them.
        let changing = disk.change();
        disk.check_changeable()?;
        disk.sweep_merged();
        let chain = chain_files(disk.path(), &disk.options(), &**disk.resources.files().opener())?;
        interrupted::sweep(disk.path(), chain[chain.len() - 1].file, |_| {})?;
        drop(changing);
        running.range = range(&chain).map_err(in_disk)?;
        Ok((running, chain))
    }

    /// The layers of now, which go on being those while the guard is held.
    fn hold_layers(&self, chain: &[ChainFile]) -> Result<(Changing<'_>, Arc<Layers>)> {
        let changing = self.disk.change();
        self.disk.check_changeable()?;
        let layers = arc_swap::Guard::into_inner(self.disk.layers_now());
        self.check_chain(&layers, chain)?;
        Ok((changing, layers))
    }

    /// Makes sure that the files lead to the layers that the disk has.
    fn check_chain(&self, layers: &Layers, chain: &[ChainFile]) -> Result<()> {
        let frozen = layers.frozen.iter().flat_map(|map| map.layers());
        let same = frozen.zip(chain).all(|(layer, link)| layer.identity.file == link.file);
        if same && chain.len() == layers.top_index().index() + 1 && layers.before.is_none() {
            return Ok(());
        }
        Err(Error::from(MergeFault::LayersChanged).in_file(self.disk.path()))
    }

    fn after(&self, chain: &[ChainFile]) -> Result<Option<Arc<FrozenMap>>> {
        let disk = &self.disk;
        let stays = self.range.first.index().checked_sub(1);
        stays.map(|layer| map_up_to(disk.path(), chain, layer, &disk.options(), &disk.resources)).transpose()
    }

    /// Begins to copy into the active layer. The merge makes `below`, whose chain is `after`, its backing file.
    pub(super) fn promise(
        &self,
        chain: &[ChainFile],
        after: Option<Arc<FrozenMap>>,
        below: Option<&Below>,
        room: Room,
    ) -> Result<Copier> {
        let (_changing, layers) = self.hold_layers(chain)?;
        let Top::Qcow2(active) = &layers.top else {
            return Err(Error::from(MergeFault::LayersChanged).in_file(self.disk.path()));
        };
        let plan = || -> Result<Relink> {
            let len = active.store.len().while_trying("read the file's length")?;
            let head = read_head(&*active.store, len)?;
            Relink::plan(&*active.store, &head.header, below)
        };
        let relink = plan().map_err(|error| error.in_file(&active.path))?;
        let promised = Layers { merging_to: after.clone(), ..Layers::clone(&layers) };
        // No writer may be inside that does not know of the promise.
        self.disk.write_gate.quiesce(|| self.disk.put_layers_and_call(promised));
        Ok(Copier::new(Arc::clone(active), None, after, Way::Stream(relink), room))
    }

    /// The room for what the active layer will need, as it is now.
    fn room(&self, chain: &[ChainFile], after: Option<&FrozenMap>) -> Result<Room> {
        let disk = &self.disk;
        let (mut at, mut demand) = (0, 0);
        let after = After { map: after, holes: &Holes::default() };
        while at < disk.size() {
            let _guard = disk.epochs.guard();
            let layers = disk.layers_now();
            self.check_chain(&layers, chain)?;
            let part = GuestRange::new(GuestOffset::new(at), MEASURED.min(disk.size() - at));
            demand += layers.demand(part, after)?;
            at += part.len;
        }
        Room::find(&chain[self.range.target().index()].path, demand)
    }

    /// As [`Disk::with_local_holders`].
    pub(crate) fn with_local_holders<T>(&self, work: impl FnOnce(LocalHolders<'_>) -> T) -> T {
        self.disk.with_local_holders(work)
    }

    /// Copies into the active layer, until `most` bytes are written.
    ///
    /// # Errors
    /// As [`Layers::stream_range`]; a disk that takes no more writes, or has another active layer.
    pub(crate) fn stream_range(&self, copier: &Copier, range: GuestRange, most: u64) -> Result<Progress> {
        let turn = TURN.max(copier.target.tables.geometry.cluster_bits.size());
        let mut done = Progress { bytes: 0, to: range.start };
        while done.to < range.end() && done.bytes < most {
            let part = GuestRange::new(done.to, turn.min(range.end() - done.to));
            let Progress { bytes, to } = self.stream_part(copier, part, most - done.bytes)?;
            done = Progress { bytes: done.bytes + bytes, to };
        }
        Ok(done)
    }

    fn stream_part(&self, copier: &Copier, part: GuestRange, most: u64) -> Result<Progress> {
        let disk = &self.disk;
        let _guard = disk.epochs.guard();
        let _inside = disk.write_gate.enter();
        disk.check_changeable()?;
        let layers = disk.layers_now();
        self.check_top(&layers, copier)?;
        layers.stream_range(part, copier.after(), most).map_err(|error| disk.fail_if_fatal(error))
    }

    fn check_top(&self, layers: &Layers, copier: &Copier) -> Result<()> {
        match &layers.top {
            Top::Qcow2(active) if Arc::ptr_eq(active, &copier.target) => Ok(()),
            _ => Err(Error::from(MergeFault::LayersChanged).in_file(self.disk.path())),
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
            disk.put_layers_and_call(Layers { merging_to: None, ..Layers::clone(&layers) });
        } else if !self.claimed.is_empty() {
            self.grow_no_more(&layers);
        }
        drop(changing);
        self.give_up_claims();
        self.disk.state.set_merging(false);
    }
}

/// The other disks of this process.
fn others(disk: &Arc<Disk>) -> impl Iterator<Item = Arc<dyn Maintained>> {
    let is_it = std::ptr::from_ref::<Disk>(disk).cast::<()>();
    let disks = disk.resources.maintenance().disks().into_iter();
    disks.filter(move |other| !std::ptr::addr_eq(Arc::as_ptr(other), is_it))
}

impl Running {
    /// Claims layers: refuses if another disk of this process needs one, and keeps such a disk from being opened.
    ///
    /// # Errors
    /// [`MergeFault::Busy`], [`MergeFault::TargetInUse`].
    pub(super) fn claim(&mut self, link: &ChainFile) -> Result<()> {
        let disk = &self.disk;
        if !disk.resources.merging().lock().insert(link.file) {
            return Err(Error::from(MergeFault::Busy).in_file(&link.path));
        }
        self.claimed.push(link.file);
        let here = others(disk).find(|other| other.stands_on(link.file));
        let here = here.map(|other| format!("the disk {}", other.path().display()));
        here.map_or(Ok(()), |by| Err(Error::from(MergeFault::TargetInUse { by }).in_file(&link.path)))
    }

    /// Lets disks be opened again that stand on what was claimed.
    pub(super) fn give_up_claims(&mut self) {
        let mut merging = self.disk.resources.merging().lock();
        for file in self.claimed.drain(..) {
            merging.remove(&file);
        }
    }

    /// Begins to commit into the base of the dropped layers, if that is the way to take.
    ///
    /// # Errors
    /// [`crate::merging::MergeFault::NoCommit`]; a layer that cannot be opened, read or written.
    pub(super) fn begin_commit(
        &mut self,
        chain: &[ChainFile],
        options: &MergeOptions,
    ) -> Result<Option<Copier>> {
        let disk = Arc::clone(&self.disk);
        disk.with_local_holders(|here| self.begin_commit_beside(here, chain, options))
    }

    fn begin_commit_beside(
        &mut self,
        here: LocalHolders<'_>,
        chain: &[ChainFile],
        options: &MergeOptions,
    ) -> Result<Option<Copier>> {
        let (disk, range) = (Arc::clone(&self.disk), self.range);
        let above = &chain[range.first.index()..];
        let ours = |layers: &[ChainFile]| open_twice(layers, &here);
        let (path, resources) = (disk.path(), &disk.resources);
        let asked = Asked { disk: path, chain, range, options, resources, here, ours: &ours };
        let Some(found) = asked.choose()? else { return Ok(None) };
        let dropped = &above[..=range.last.index() - range.first.index()];
        if let Err(reason) = self.claim_all(dropped) {
            return asked.or_stream(reason);
        }
        let opened = commit::open(&asked, found, Role::CopiedInto, |held| self.put_held(chain, held));
        opened.map(Some).or_else(|failed| {
            if !failed.is_marked {
                self.put_back();
            }
            asked.or_stream_after(failed)
        })
    }

    /// Lets the dropped layers be like others again.
    fn put_back(&mut self) {
        let changing = self.disk.change();
        self.grow_no_more(&self.disk.layers_now());
        drop(changing);
        self.give_up_claims();
    }

    /// Makes sure that no disk of this process stands on one of the dropped layers, or will.
    fn claim_all(&mut self, dropped: &[ChainFile]) -> std::result::Result<(), String> {
        let claimed = dropped.iter().try_for_each(|link| self.claim(link));
        claimed.map_err(|error| {
            self.give_up_claims();
            error.to_string()
        })
    }

    /// Gives requests the objects of the dropped layers that allow for their growing.
    fn put_held(&self, chain: &[ChainFile], held: &OpenDropped) -> Result<()> {
        let (disk, first) = (&self.disk, self.range.first.index());
        let (_changing, layers) = self.hold_layers(chain)?;
        let map = layers.frozen.as_ref().expect("the dropped layers are in it");
        let stays = map.layer(self.range.target());
        let pinned = stays.growing();
        pinned.put_file(Some(disk.resources.files().store(stays)?));
        let map = map.with_layers(first, held.layers.iter().cloned().chain([Arc::new(pinned)]));
        disk.put_layers_and_call(Layers { frozen: Some(Arc::new(map)), ..Layers::clone(&layers) });
        disk.epochs.synchronize();
        Ok(())
    }

    /// Begins to copy into a frozen layer.
    pub(super) fn let_grow(&mut self, chain: &[ChainFile], users: &Users) -> Result<Copier> {
        let (after, below) = (self.after(chain)?, below_of(chain, self.range)?);
        let (top, target, layers, relink) = self.grow(chain, users, below.as_ref())?;
        Copier::of_frozen(Arc::clone(&target), layers, after, relink)
            .inspect_err(|_| target::give_back(&top, &target))
    }

    /// Opens a frozen layer for writing, to make `below` its backing file.
    pub(super) fn grow(
        &mut self,
        chain: &[ChainFile],
        users: &Users,
        below: Option<&Below>,
    ) -> Result<(OpenTop, Arc<Active>, Layers, Relink)> {
        let (disk, index) = (Arc::clone(&self.disk), self.range.target());
        let (link, resources) = (&chain[index.index()], &disk.resources);
        self.claim(link)?;
        // Before it is open a second time, which hides the locks of others.
        self.refuse_users(chain, users)?;
        let beneath = map_up_to(disk.path(), chain, self.range.last.index(), &disk.options(), resources)?;
        let top = link.open(Role::CopiedInto, &**resources.files().opener())?;
        let header = &top.head.as_ref().ok_or(ErrorKind::Changed)?.header;
        let relink = Relink::plan(&*top.opened.store, header, below)
            .map_err(|error| error.in_layer(index).in_file(&link.path))?;
        let lock = self.put_growing(chain, &top, header)?;
        let active = target::open(&top, index, Some(lock), resources)?;
        // A disk that is opened from here on looks at the file, and finds it locked.
        self.refuse_users(chain, users).inspect_err(|_| target::give_back(&top, &active))?;
        let layers = Layers::new(header.size, Top::Qcow2(Arc::clone(&active)), Some(beneath), resources);
        Ok((top, active, layers, relink))
    }

    /// Lets requests know that the target grows; returns what they lock to read its tables.
    fn put_growing(&self, chain: &[ChainFile], top: &OpenTop, header: &Header) -> Result<TablesLock> {
        let (disk, index) = (&self.disk, self.range.target());
        let (_changing, layers) = self.hold_layers(chain)?;
        let map = layers.frozen.as_ref().expect("a frozen target is in it");
        let path = map.layer(index).path.to_path_buf();
        let growing = Layer::new(path, top.opened.identity, header.size, Some(Tables::of(header))).growing();
        growing.put_file(Some(OpenStore::new(Arc::clone(&top.opened.store))));
        let lock = growing.growing.clone().expect("it grows");
        let map = map.with_layers(index.index(), [Arc::new(growing)]);
        disk.put_layers_and_call(Layers { frozen: Some(Arc::new(map)), ..Layers::clone(&layers) });
        disk.epochs.synchronize();
        Ok(lock)
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
        let grows = |(_, layer): &(usize, &Arc<Layer>)| layer.growing.is_some();
        let mut finalized: Option<FrozenMap> = None;
        for (index, layer) in map.layers().enumerate().filter(grows) {
            match self.finalized(layer) {
                Ok(layer) => {
                    let now = finalized.as_ref().unwrap_or(map).with_layers(index, [layer]);
                    finalized = Some(now);
                }
                // It stays open.
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
        // Readers of the dropped layers have left after this.
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

    /// Returns once no request can still see what the target let go of.
    ///
    /// # Errors
    /// [`MergeFault::LayersChanged`]: requests may see it.
    pub(crate) fn wait(&self, way: &Way) -> Result<()> {
        if let Way::Stream(_) = way {
            self.forget_places()?;
        }
        self.disk.epochs.synchronize();
        Ok(())
    }

    /// Lets requests look up anew where everything lies: clusters of the target that others use, too, have been copied.
    fn forget_places(&self) -> Result<()> {
        let (disk, before) = (&self.disk, self.finalized_layers()?);
        let layers = before.frozen.iter().flat_map(|map| map.layers()).cloned().collect();
        let map = disk.resources.new_map(layers)?;
        let _changing = disk.change();
        if !Arc::ptr_eq(&before, &disk.layers_now()) {
            return Err(Error::from(MergeFault::LayersChanged).in_file(disk.path()));
        }
        disk.put_layers_and_call(Layers { frozen: Some(Arc::new(map)), ..Layers::clone(&before) });
        Ok(())
    }

    fn relink_frozen(&mut self, copier: &mut Copier) -> Result<()> {
        let (disk, target) = (Arc::clone(&self.disk), Arc::clone(&copier.target));
        // Before the files are changed: afterwards requests must get the shorter chain.
        self.finalized_layers()?;
        copier.finalize(|way| self.wait(way))?;
        copier.relink()?;
        copier.let_go();
        let layer = self.finalized_target(copier)?;
        loop {
            let before = self.finalized_layers()?;
            let old = before.frozen.as_ref().ok_or(MergeFault::LayersChanged)?;
            let above = self.range.target().index() + 1;
            let is_there = |layer: &Arc<Layer>| layer.identity.file == target.identity.file;
            if !old.layers().nth(target.index.index()).is_some_and(is_there) {
                return Err(Error::from(MergeFault::LayersChanged).in_file(disk.path()));
            }
            let below = copier.after.as_deref();
            let kept = below.into_iter().flat_map(FrozenMap::layers).cloned();
            let shorter = kept.chain([Arc::clone(&layer)]).chain(old.layers().skip(above).cloned()).collect();
            let index = below.and_then(|map| map.index().cloned());
            let map = disk.resources.share_map_by(shorter, index, |map| map.take_over(old, below))?;
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
            return Err(Error::from(MergeFault::LayersChanged).in_file(self.disk.path()));
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
