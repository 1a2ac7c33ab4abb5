//! Writing down what layers above hold.
//!
//! ```text
//!   map of the chain up to the layer that stays ──► whose is it?
//!        a layer's above the one written into ──► data: written over, or into new clusters; zeros, holes: let go of
//!        its own, or of one below it ───────────► nothing to do
//! ```

use vmstrata_qcow2::L2Entry;
use vmstrata_store::{AlignedBuf, Segment, is_zero};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset, LayerIndex};

use super::holes::Holes;
use crate::error::Result;
use crate::layers::{Layers, Top};
use crate::map::{FrozenMap, Run, Source};
use crate::zero::Purpose;

/// Most bytes written at once, but for clusters that are larger.
const RUN_BYTES: u64 = 256 << 10;

/// Bytes that each direction would copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Costs {
    pub(crate) up: u64,
    pub(crate) down: u64,
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
                costs.down += if layer > first { run.len } else { 0 };
                costs.up += if layer >= first && layer.index() < target { run.len } else { 0 };
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
    /// All of these have clusters of one size. Returns the bytes written.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write: part of it may have been written.
    ///
    /// # Panics
    /// Without an active layer that has clusters.
    pub(super) fn push_down(&self, range: GuestRange, state: &Self, holes: &Holes) -> Result<u64> {
        let Top::Qcow2(active) = &self.top else { unreachable!("what is written into has clusters") };
        let cluster = active.tables.geometry.cluster_bits.size();
        let mut buffer =
            AlignedBuf::zeroed(RUN_BYTES.max(cluster).min(range.len.next_multiple_of(cluster)) as usize);
        let end = range.end().get().min(self.size);
        let (mut at, mut written) = (range.start, 0);
        while at.get() < end {
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
                    let part = run.len.min(buffer.len() as u64);
                    written += self.push_clusters(at, part, &mut buffer, state)?;
                    part
                }
            };
            at = at + part;
        }
        Ok(written)
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

    /// Bytes that the active layer's file grows by when all of `state` is written down.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(super) fn push_demand(&self, state: &Self, holes: &Holes) -> Result<u64> {
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
    fn push_clusters(&self, at: GuestOffset, len: u64, buffer: &mut AlignedBuf, state: &Self) -> Result<u64> {
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
