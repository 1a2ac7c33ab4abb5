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

mod claims;
mod commit;
mod finish;
mod grow;

use std::sync::Arc;

use vmstrata_store::FileId;
use vmstrata_types::{GuestOffset, GuestRange};

use super::state::Changing;
use super::{Disk, Indexing};
use crate::chain::{OpenOptions, read_head};
use crate::error::{Error, IoContext as _, Result};
use crate::layers::{Layers, Top};
use crate::maintenance::Maintained;
use crate::map::FrozenMap;
use crate::merge::holes::Holes;
use crate::merge::plan::{below_of, map_up_to};
use crate::merge::relink::Relink;
use crate::merge::remove::refuse_overlooked;
use crate::merge::room::Room;
use crate::merge::stream::After;
use crate::merge::{Copier, MergeFault, MergeOptions, MergeRange, Way, cleanup};
use crate::refs::{ChainFile, LocalHolders, Users, chain_files};

/// Most bytes of the disk looked at before others get their turn.
const TURN: u64 = 256 << 10;
/// The same, where nothing is copied.
const MEASURED: u64 = 64 << 20;

/// A merge of a disk in use. Dropped, the disk may be merged again.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) disk: Arc<Disk>,
    range: MergeRange,
    /// Frozen layers that are written.
    claimed: Vec<FileId>,
    indexing: Option<Indexing>,
}

impl Disk {
    /// How the disk is opened again: a snapshot may have made a raw disk qcow2.
    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions { format: Some(self.format()), format_is_exact: true, ..self.options.clone() }
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
        self.with_local_holders(|here| cleanup::sweep(&self.path, &self.options(), here));
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
        if disk.state.set_merging(true) {
            return Err(Error::from(MergeFault::Busy).in_file(&disk.path));
        }
        let mut running = Self { disk: Arc::clone(disk), range, claimed: Vec::new(), indexing: None };
        // What the last snapshot left to do is done then: from there on the frozen layers' files say what is in them.
        drop(disk.change());
        disk.check_changeable()?;
        disk.sweep_merged();
        let chain = chain_files(&disk.path, &disk.options(), &**disk.resources.files().opener())?;
        range.check(&chain, options).map_err(|fault| Error::from(fault).in_file(&disk.path))?;
        let users = Users::standing_on(&chain[range.first.index()..], &disk.path, &disk.options());
        refuse_overlooked(&chain, range, options, &users)
            .map_err(|fault| Error::from(fault).in_file(&disk.path))?;
        let is_active = range.target().index() + 1 == chain.len();
        let copier = match running.begin_commit(&chain, options)? {
            Some(copier) => copier,
            None if is_active => running.promise(&chain)?,
            None => running.let_grow(&chain, &users)?,
        };
        Ok((running, chain, copier))
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
        Err(Error::from(MergeFault::LayersChanged).in_file(&self.disk.path))
    }

    fn after(&self, chain: &[ChainFile]) -> Result<Option<Arc<FrozenMap>>> {
        let disk = &self.disk;
        let stays = self.range.first.index().checked_sub(1);
        stays.map(|layer| map_up_to(&disk.path, chain, layer, &disk.options(), &disk.resources)).transpose()
    }

    /// Begins to copy into the active layer.
    fn promise(&self, chain: &[ChainFile]) -> Result<Copier> {
        let after = self.after(chain)?;
        let room = self.room(chain, after.as_deref())?;
        let (_changing, layers) = self.hold_layers(chain)?;
        let Top::Qcow2(active) = &layers.top else {
            return Err(Error::from(MergeFault::LayersChanged).in_file(&self.disk.path));
        };
        let plan = || -> Result<Relink> {
            let len = active.store.len().while_trying("read the file's length")?;
            let head = read_head(&*active.store, len)?;
            Relink::plan(&*active.store, &head.header, below_of(chain, self.range)?.as_ref())
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

    /// Copies into the active layer.
    ///
    /// # Errors
    /// As [`Layers::stream_range`]; a disk that takes no more writes, or has another active layer.
    pub(crate) fn stream_range(&self, copier: &Copier, range: GuestRange) -> Result<u64> {
        let mut copied = 0;
        let turn = TURN.max(copier.target.tables.geometry.cluster_bits.size());
        let mut done = 0;
        while done < range.len {
            let part = GuestRange::new(range.start + done, turn.min(range.len - done));
            copied += self.stream_part(copier, part)?;
            done += part.len;
        }
        Ok(copied)
    }

    fn stream_part(&self, copier: &Copier, part: GuestRange) -> Result<u64> {
        let disk = &self.disk;
        let _guard = disk.epochs.guard();
        let _inside = disk.write_gate.enter();
        disk.check_changeable()?;
        let layers = disk.layers_now();
        self.check_top(&layers, copier)?;
        layers.stream_range(part, copier.after()).map_err(|error| disk.fail_if_fatal(error))
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
