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
//! - Nothing is written into the base but clusters that a layer above it, up to the one that stays, has itself.
//! - All of them are on stable storage before the rename, and that is before a file is removed.
//! - Before the first write, nobody else stands on a dropped layer or uses one, and each is marked ([`super::deleting`]) and locked.

use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_qcow2::L2Entry;
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

/// Most bytes written at once, but for clusters that are larger.
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
    /// Writes into the active layer what `state`, the layers up to the one that stays, has in `range` from layers above it.
    /// All of these have clusters of one size. Ends early when `most` bytes are written, after one cluster at least.
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
        let Top::Qcow2(active) = &self.top else { unreachable!("what is written into has clusters") };
        let cluster = active.tables.geometry.cluster_bits.size();
        let whole = |bytes: u64| (bytes / cluster).max(1) * cluster;
        let mut buffer =
            AlignedBuf::zeroed(whole(RUN_BYTES).min(range.len.next_multiple_of(cluster)) as usize);
        let end = range.end().get().min(self.size);
        let (mut at, mut bytes) = (range.start, 0);
        while at.get() < end {
            if bytes >= most {
                return Ok(Progress { bytes, to: at });
            }
            let run = self.run_above(state, at, end, holes)?;
            let part = match run.source {
                Source::Hole => run.len,
                Source::Zero(layer)
                | Source::Data(layer, _)
                | Source::Compressed(layer)
                | Source::Damaged(layer)
                    if layer <= active.index =>
                {
                    run.len
                }
                Source::Zero(_) => {
                    self.clear(GuestRange::new(at, run.len), Purpose::ZeroAndFree)?;
                    run.len
                }
                Source::Data(..) | Source::Compressed(_) | Source::Damaged(_) => {
                    let part = run.len.min(buffer.len() as u64).min(whole(most - bytes));
                    bytes += self.commit_clusters(at, part, &mut buffer, state)?;
                    part
                }
            };
            at = at + part;
        }
        Ok(Progress { bytes, to: range.end() })
    }

    /// The next run of `state`; clusters from above the active layer that are holes of their file are zeros.
    fn run_above(&self, state: &Self, at: GuestOffset, end: u64, holes: &Holes) -> Result<Run> {
        let Top::Qcow2(active) = &self.top else { unreachable!("as for its caller") };
        let run = state.locate(at, end - at.get())?;
        if !is_from(run, active.index)
            || matches!(run.source, Source::Data(layer, _) if layer == active.index)
        {
            return Ok(run);
        }
        let found = state.cut(run, holes);
        // The disk's last cluster may be cut short.
        let whole = found.len - found.len % active.tables.geometry.cluster_bits.size();
        let len = if found.len == run.len { run.len } else { whole };
        Ok(if len > 0 { Run { len, ..found } } else { run })
    }

    /// Bytes that the active layer's file grows by when all of `state` is committed.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(super) fn commit_demand(&self, state: &Self, holes: &Holes) -> Result<u64> {
        let Top::Qcow2(active) = &self.top else { unreachable!("as for its caller") };
        let cluster = active.tables.geometry.cluster_bits.size();
        let (mut at, mut demand) = (GuestOffset::ZERO, 0);
        while at.get() < self.size {
            let run = self.run_above(state, at, self.size, holes)?;
            if let Source::Data(layer, _) | Source::Compressed(layer) = run.source
                && layer > active.index
            {
                for number in active.cluster_of(at)..(at + run.len).get().div_ceil(cluster) {
                    let has = active.decode(active.entry(number)?)?;
                    let in_place = matches!(has, L2Entry::Data { copied: true, .. });
                    demand += if in_place { 0 } else { cluster };
                }
            }
            at = at + run.len;
        }
        Ok(demand)
    }

    /// Writes whole clusters; what of the last one lies past the disk's end is zeros. Clusters of zeros are let go of. Returns
    /// the bytes written.
    fn commit_clusters(
        &self,
        at: GuestOffset,
        len: u64,
        buffer: &mut AlignedBuf,
        state: &Self,
    ) -> Result<u64> {
        let Top::Qcow2(active) = &self.top else { unreachable!("as for its caller") };
        let cluster = active.tables.geometry.cluster_bits.size() as usize;
        let whole = len.next_multiple_of(cluster as u64) as usize;
        let (bytes, rest) = buffer[..whole].split_at_mut(len as usize);
        state.read_runs(at, &[Segment::from_mut(bytes)], |at, len| state.locate(at, len))?;
        rest.fill(0);
        let zeros: Vec<bool> = buffer[..whole].chunks_exact(cluster).map(is_zero).collect();
        let (mut done, mut written) = (0, 0);
        for run in zeros.chunk_by(|one, other| one == other) {
            let (here, bytes) = (at + done as u64, &mut buffer[done..][..run.len() * cluster]);
            done += bytes.len();
            if run[0] {
                let there = (bytes.len() as u64).min(self.size - here.get());
                self.clear(GuestRange::new(here, there), Purpose::ZeroAndFree)?;
            } else {
                written += bytes.len() as u64;
                self.write(here, &[Segment::from_mut(bytes)])?;
            }
        }
        Ok(written)
    }
}
