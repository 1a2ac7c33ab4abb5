//! Commit: what the layers above the base, the lowest dropped layer, hold is written into the base, which then takes the place of
//! the layer that stays.
//!
//! ```text
//!   before   base ◄── 1 ◄── 2 ◄── 3 ◄── disk          drop 1 and 2
//!   mark     base ◄── 1*◄── 2*◄── 3 ◄── disk          1 and 2 are no states any more
//!   write    base ◄── 1'◄── 2*◄── 3 ◄── disk          1' = 1, and what 2 and 3 have: hidden by these
//!   rename   base ◄────────────── 1'◄── disk          under the name of 3, whose file is gone; its mark is true now, and goes
//!   remove                                            the file of 2
//! ```
//!
//! ```text
//!   map of the chain up to the layer that stays ──► whose is it?
//!        a layer's above the base ───────► data: written over, or into new clusters; zeros, holes: let go of
//!        the base's, or one's below it ──► nothing to do
//! ```
//!
//! The layer above, and every other image on the one that stays, find it under the name that they know: none of their headers
//! is written.
//!
//! Invariants:
//! - Only what a layer above hides is written over. A new cluster of the base holds, around that, a copy of what shows there. A
//!   cluster with data that shows stays where it is, as readers may know its place: a chain in which it cannot is streamed.
//! - All that is written is on stable storage before the rename, and that is before a file is removed.
//! - Before the first write, nobody else stands on a dropped layer or uses one, and each is marked ([`super::deleting`]) and locked.

use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_qcow2::{SubclusterState, Subclusters};
use vmstrata_store::{Access, AlignedBuf, OpenStore, Place, Segment, is_zero};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset, LayerIndex};

use super::copier::{Way, let_go};
use super::deleting::DeletingFlag;
use super::direction::{Asked, CommitPlan};
use super::holes::Holes;
use super::plan::map_up_to;
use super::room::Room;
use super::stream::Progress;
use super::{Copier, target};
use crate::access;
use crate::active::Active;
use crate::chain::Top as OpenTop;
use crate::error::{Error, IoContext as _, Result};
use crate::index::forget_sidecar;
use crate::layer::Layer;
use crate::layers::{Layers, Top};
use crate::map::{FrozenMap, Run, Source};
use crate::opener::Role;
use crate::refs::{ChainFile, back_refs};
use crate::zero::Purpose;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Commit {
    /// The chain up to the layer that stays, with the dropped ones as they are now.
    state: Layers,
    /// The base's file, and the one whose place it takes.
    from: PathBuf,
    to: PathBuf,
    /// The chain up to the base, for its header.
    chain: Vec<ChainFile>,
    /// The other dropped layers, locked.
    others: Vec<OpenTop>,
}

/// The dropped layers' files, the base first: open, and as objects that allow for their being written.
pub(crate) struct OpenDropped {
    tops: Vec<OpenTop>,
    pub(crate) layers: Vec<Arc<Layer>>,
}

impl OpenDropped {
    /// Objects for the dropped layers of `found` whose files are not open yet; it reads through them from then on.
    fn of(found: &mut CommitPlan, first: usize) -> Self {
        let dropped: Vec<Arc<Layer>> = found.state.layers().skip(first).cloned().collect();
        let (_, dropped) = dropped.split_last().expect("the one that stays");
        let layers: Vec<Arc<Layer>> = dropped.iter().map(|layer| Arc::new(layer.growing())).collect();
        found.state = Arc::new(found.state.with_layers(first, layers.iter().cloned()));
        Self { tops: Vec::new(), layers }
    }

    fn open(&mut self, asked: &Asked<'_>, role: Role) -> Result<()> {
        let opener = &**asked.resources.files().opener();
        for (number, layer) in self.layers.iter().enumerate() {
            let top = asked.chain[asked.range.first.index() + number].open(role, opener)?;
            layer.put_file(Some(OpenStore::new(Arc::clone(&top.opened.store))));
            self.tops.push(top);
        }
        Ok(())
    }
}

/// Why nothing can be committed.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether the dropped layers are marked already, or some of them.
    pub(crate) is_marked: bool,
}

/// Makes everything ready to write into the base, and marks the dropped ones. `tell` is given the objects that
/// allow for that before anything is written.
///
/// # Errors
/// A layer that is in use, or cannot be opened, read or written.
pub(crate) fn open(
    asked: &Asked<'_>,
    found: CommitPlan,
    role: Role,
    tell: impl FnOnce(&OpenDropped) -> Result<()>,
) -> std::result::Result<Copier, Failed> {
    let mut is_marked = false;
    open_and_mark(asked, found, role, tell, &mut is_marked).map_err(|error| Failed { error, is_marked })
}

fn open_and_mark(
    asked: &Asked<'_>,
    mut found: CommitPlan,
    role: Role,
    tell: impl FnOnce(&OpenDropped) -> Result<()>,
    is_marked: &mut bool,
) -> Result<Copier> {
    let (first, chain) = (asked.range.first.index(), asked.chain);
    let below = first.checked_sub(1);
    let below = below
        .map(|layer| map_up_to(asked.disk, chain, layer, &asked.options.open, asked.resources))
        .transpose()?;
    let mut held = OpenDropped::of(&mut found, first);
    held.open(asked, role)?;
    tell(&held)?;
    let mut tops = held.tops;
    let others = tops.split_off(1);
    let base = tops.pop().expect("a layer is dropped");
    let lock = held.layers[0].growing.clone();
    let active = target::open(&base, asked.range.first, lock, asked.resources)?;
    let size = active.size();
    let layers = Layers::new(size, Top::Qcow2(Arc::clone(&active)), below.clone(), asked.resources);
    let state = Layers::new(size, Top::Frozen, Some(Arc::clone(&found.state)), asked.resources);
    let mut ready = || -> Result<Room> {
        let room = Room::find(&base.path, layers.commit_demand(&state, &Holes::default())?)?;
        let locked: Vec<_> = held.layers.iter().map(|layer| layer.identity.file).collect();
        asked
            .check_unused(&found.users, &locked)
            .map_err(|reason| Error::from(super::MergeFault::NoCommit { reason }).in_file(&base.path))?;
        *is_marked = true;
        for (number, top) in [&base].into_iter().chain(&others).enumerate() {
            let mark = DeletingFlag::plan(top, chain, first + number, asked.new_name())?;
            mark.write(&*top.opened.store).map_err(|error| error.in_file(&top.path))?;
        }
        Ok(room)
    };
    let room = ready().inspect_err(|_| target::give_back(&base, &active))?;
    let to = chain[asked.range.target().index()].path.clone();
    let commit = Commit { state, from: base.path, to, chain: chain[..=first].to_vec(), others };
    Ok(Copier::new(active, Some(layers), below, Way::Commit(Box::new(commit)), room))
}

impl Commit {
    /// Writes what lies in `range` into the base, until `most` bytes are written.
    ///
    /// # Errors
    /// As [`Layers::commit_range`].
    pub(super) fn copy(
        &self,
        into: &Layers,
        range: GuestRange,
        holes: &Holes,
        most: u64,
    ) -> Result<Progress> {
        into.commit_range(range, &self.state, holes, most)
    }

    /// The file's path once the merge is done.
    pub(crate) fn path(&self) -> &PathBuf {
        &self.to
    }

    /// The chain's file that is gone after that.
    pub(crate) fn old_path(&self) -> &PathBuf {
        &self.from
    }

    /// Lets others read the dropped layers above the base, whose states are lost.
    pub(super) fn let_go(&self) {
        self.others.iter().for_each(|top| let_go(&*top.opened.store, &top.path));
    }

    /// Lets the base, all of which is on stable storage, take the place of the one that stays.
    ///
    /// # Errors
    /// A host that cannot rename or flush: the one or the other is there.
    pub(super) fn take_place(&self, base: &Active) -> Result<()> {
        // Whoever may read the one that stays, and nobody else, may read what takes its place.
        let places = || Ok((Place::of(&self.from)?, Place::of(&self.to)?));
        let (from, to) =
            places().while_trying("find its directory").map_err(|error: Error| error.in_file(&self.from))?;
        let file = from.open(Access::ReadOnly).while_trying("open it to set its owner");
        file.and_then(|file| access::copy(&self.to, &file)).map_err(|error| error.in_file(&self.from))?;
        // They speak of files that these names do not lead to any more.
        for file in [&self.from, &self.to] {
            forget_sidecar(file);
        }
        let renamed = from
            .rename(&to)
            .and_then(|()| to.directory().sync())
            .while_trying("give it the name of the layer above");
        renamed.map_err(|error| error.in_file(&self.from))?;
        back_refs::remove_all(&self.from);
        self.unmark(base).or_else(|error| {
            // It is true, and so in nobody's way.
            tracing::warn!(file = %self.to.display(), %error, "a merged layer keeps a mark that it does not need");
            Ok(())
        })
    }

    fn unmark(&self, base: &Active) -> Result<()> {
        let layer = self.chain.len() - 1;
        let mark = DeletingFlag::plan_removal(&*base.store, &self.chain, layer)?;
        base.alloc.exclusively(|| mark.write(&*base.store))
    }
}

/// Most bytes written at once, but for units that are larger.
const RUN_BYTES: u64 = 256 << 10;

/// Bytes that each direction would copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Costs {
    pub(crate) stream: u64,
    pub(crate) commit: u64,
}

impl Costs {
    /// What dropping the layers from `first` up to the newest of `state` but one costs, by what of each is seen from the newest.
    /// `extent` is as for [`Holes::cut`], for these layers.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn of(
        state: &FrozenMap,
        first: LayerIndex,
        extent: impl Fn(LayerIndex, HostOffset) -> Option<(bool, HostOffset)>,
    ) -> Result<Self> {
        let target = state.layers().len() - 1;
        let (mut costs, holes) = (Self::default(), Holes::default());
        let mut at = GuestOffset::ZERO;
        while at.get() < state.size() {
            let mut run = state.locate(at, state.size() - at.get())?;
            if is_from(run, first) {
                run = holes.cut(run, &extent);
            }
            if let Source::Data(layer, _) | Source::Compressed(layer) = run.source {
                costs.commit += if layer > first { run.len } else { 0 };
                costs.stream += if layer >= first && layer.index() < target { run.len } else { 0 };
            }
            at = at + run.len;
        }
        Ok(costs)
    }
}

/// Whether a layer from `first` up has the run as data.
fn is_from(run: Run, first: LayerIndex) -> bool {
    matches!(run.source, Source::Data(layer, _) if layer >= first)
}

impl Layers {
    /// Writes into the active layer what `state`, the layers up to the one that stays, has in `range` from layers above it. Ends
    /// early when `most` bytes are written, after one unit at least.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write: part of it may have been written.
    ///
    /// # Panics
    /// Without an active layer that has clusters.
    pub(super) fn commit_range(
        &self,
        range: GuestRange,
        state: &Self,
        holes: &Holes,
        most: u64,
    ) -> Result<Progress> {
        let active = self.target();
        let unit = active.tables.geometry.unit();
        let whole = |bytes: u64| (bytes >> unit.get()).max(1) << unit.get();
        let mut buffer =
            AlignedBuf::zeroed(whole(RUN_BYTES).min(range.len.next_multiple_of(unit.size())) as usize);
        let end = range.end().get().min(self.size);
        let (mut at, mut bytes) = (range.start, 0);
        while at.get() < end {
            if bytes >= most {
                return Ok(Progress { bytes, to: at });
            }
            let run = self.run_above(state, at, end, holes)?;
            let part = match run.source {
                _ if !is_above(run, active.index) => run.len,
                Source::Hole | Source::Zero(_) => {
                    self.clear(GuestRange::new(at, run.len), Purpose::ZeroAndFree)?;
                    run.len
                }
                Source::Data(..) | Source::Compressed(_) | Source::Damaged(_) => {
                    // A part of a unit, or whole ones.
                    let most = (buffer.len() as u64).min(whole(most - bytes));
                    let rest = unit.size() - at.within(unit);
                    let is_part = !at.is_aligned(unit) || run.len < rest;
                    let part = if is_part { run.len.min(rest) } else { whole(run.len.min(most)) };
                    bytes += self.commit_units(at, &mut buffer[..part as usize], state)?;
                    part
                }
            };
            at = at + part;
        }
        Ok(Progress { bytes, to: range.end() })
    }

    /// The next run of `state`; units from above the active layer that are holes of their file are zeros.
    fn run_above(&self, state: &Self, at: GuestOffset, end: u64, holes: &Holes) -> Result<Run> {
        let active = self.target();
        let run = state.locate(at, end - at.get())?;
        if !is_above(run, active.index) {
            return Ok(run);
        }
        let found = state.cut(run, holes);
        if found.len == run.len {
            return Ok(found);
        }
        let unit = active.tables.geometry.unit();
        let whole = (at + found.len).align_down(unit);
        if whole > at {
            return Ok(Run { len: whole - at, ..found });
        }
        Ok(Run { len: run.len.min(unit.size() - at.within(unit)), ..run })
    }

    /// Bytes that the active layer's file grows by when all of `state` is committed.
    ///
    /// # Errors
    /// [`MergeFault::NoCommit`]: a cluster cannot be written in place of which a part shows. Tables that cannot be read.
    pub(super) fn commit_demand(&self, state: &Self, holes: &Holes) -> Result<u64> {
        let active = self.target();
        let unit = active.tables.geometry.unit();
        let (mut at, mut counted, mut demand) = (GuestOffset::ZERO, GuestOffset::ZERO, 0);
        while at.get() < self.size {
            let run = self.run_above(state, at, self.size, holes)?;
            let end = at + run.len;
            if is_above(run, active.index) {
                let last = GuestOffset::new(end.get() - 1).align_down(unit);
                let mut here = at.align_down(unit).max(counted);
                while here <= last {
                    self.check_movable(active, here, state)?;
                    let next = here + unit.size();
                    let is_whole = here >= at && next.get().min(self.size) <= end.get();
                    // Of whole ones that are zeros, an entry says so.
                    let is_said = is_whole && run.source.is_zero();
                    let is_written = !is_said && !self.is_in_place(active, here)?;
                    demand += if is_written { unit.size() } else { 0 };
                    here = if run.source.is_zero() { next.max(last) } else { next };
                }
                counted = last + unit.size();
            }
            at = end;
        }
        Ok(demand)
    }

    /// Whether the active layer has data at `at` and may write over it.
    fn is_in_place(&self, active: &Active, at: GuestOffset) -> Result<bool> {
        let entry = active.decode(active.cluster_of(at), active.entry(active.cluster_of(at))?)?;
        let geometry = active.tables.geometry;
        let part =
            (at.within(geometry.cluster_bits) * u64::from(Subclusters::COUNT)) >> geometry.cluster_bits.get();
        Ok(entry.own_host().is_some() && entry.states().state(part as u32) == SubclusterState::Allocated)
    }

    /// Makes sure that the cluster at `at` may be exchanged for another, if it is to be: nothing of it shows in `state`.
    fn check_movable(&self, active: &Active, at: GuestOffset, state: &Self) -> Result<()> {
        let bits = active.tables.geometry.cluster_bits;
        let entry = active.decode(active.cluster_of(at), active.entry(active.cluster_of(at))?)?;
        if entry.own_host().is_some() || entry.states().allocated == 0 {
            return Ok(());
        }
        let mut here = at.align_down(bits);
        let end = (here + bits.size()).get().min(self.size);
        while here.get() < end {
            let run = state.locate(here, end - here.get())?;
            if let Source::Data(layer, _) | Source::Compressed(layer) = run.source
                && layer == active.index
            {
                let reason =
                    format!("a part of its compressed or shared cluster at {at} shows in the layer above");
                return Err(super::MergeFault::NoCommit { reason }.into());
            }
            here = here + run.len;
        }
        Ok(())
    }

    /// Writes a part of a unit, or whole ones, from `at` on; units of zeros are let go of. Returns the bytes written.
    fn commit_units(&self, at: GuestOffset, bytes: &mut [u8], state: &Self) -> Result<u64> {
        let active = self.target();
        let unit = active.tables.geometry.unit().size() as usize;
        state.read_runs(at, &[Segment::from_mut(bytes)], |at, len| state.locate(at, len))?;
        let zeros: Vec<bool> = bytes.chunks(unit).map(is_zero).collect();
        let (mut at, mut rest, mut written) = (at, bytes, 0);
        for run in zeros.chunk_by(|one, other| one == other) {
            let (part, later) = rest.split_at_mut((run.len() * unit).min(rest.len()));
            let len = part.len() as u64;
            if run[0] {
                self.clear(GuestRange::new(at, len), Purpose::ZeroAndFree)?;
            } else {
                // What is around a part of a unit is copied up.
                written +=
                    if self.is_in_place(active, at)? { len } else { len.next_multiple_of(unit as u64) };
                self.write(at, &[Segment::from_mut(part)])?;
            }
            (at, rest) = (at + len, later);
        }
        Ok(written)
    }
}

/// Whether the run is of a layer above `base`.
fn is_above(run: Run, base: LayerIndex) -> bool {
    match run.source {
        Source::Hole => false,
        Source::Zero(layer) | Source::Data(layer, _) | Source::Compressed(layer) | Source::Damaged(layer) => {
            layer > base
        }
    }
}
