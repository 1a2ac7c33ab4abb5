//! Where the bytes of a disk are: the active layer first, then the map of those below.

use std::path::Path;
use std::sync::Arc;

use vmstrata_qcow2::L2Entry;
use vmstrata_store::OpenStore;
use vmstrata_types::{GuestOffset, HostOffset, LayerIndex};

use super::{LayerRef, Layers, Top};
use crate::active::Active;
use crate::error::Result;
use crate::map::{Run, Source};

impl Layers {
    /// The run at `at`, at most `len` bytes, from memory alone; `None` when tables must be read first.
    ///
    /// Within the disk and `len > 0`, a run has at least one byte.
    #[inline]
    pub(crate) fn lookup(&self, at: GuestOffset, len: u64) -> Option<Run> {
        match &self.top {
            Top::Qcow2(active) => Run::of_steps(at, len, |at, len| self.step_over(active, at, len)),
            Top::Raw(_) => {
                Some(Run { source: Source::Data(LayerIndex::BASE, HostOffset::new(at.get())), len })
            }
            Top::Frozen => self.frozen.as_ref().expect("a disk has a layer").lookup(at, len),
        }
    }

    /// Has the processor fetch what [`Layers::lookup`] will look at.
    #[inline]
    pub(crate) fn prefetch(&self, at: GuestOffset) {
        if let Top::Qcow2(active) = &self.top {
            active.prefetch(active.cluster_of(at));
        }
        if let Some(map) = &self.frozen {
            map.prefetch(at);
        }
    }

    /// The part of a run that one cluster of the active layer answers for.
    #[inline]
    fn step_over(&self, active: &Active, at: GuestOffset, len: u64) -> Option<Run> {
        let bits = active.tables.geometry.cluster_bits;
        let within = at.within(bits);
        let len = len.min(bits.size() - within);
        let raw = active.lookup(active.cluster_of(at))?;
        let source = match active.tables.entries.l2(raw) {
            Ok(L2Entry::Data { host, .. }) => Source::Data(active.index, host + within),
            Ok(L2Entry::Unallocated) => return self.below(at, len),
            Ok(L2Entry::Zero { .. }) => Source::Zero(active.index),
            Ok(L2Entry::Compressed { .. }) => Source::Compressed(active.index),
            Err(_) => return self.step_over_partial(active, raw, at, len),
        };
        Some(Run { source, len })
    }

    /// The same where `raw` is no entry of the format: the cluster is written in part, or the entry damaged.
    #[cold]
    fn step_over_partial(&self, active: &Active, raw: u64, at: GuestOffset, len: u64) -> Option<Run> {
        let Some(partial) = active.partial(raw) else {
            return Some(Run { source: Source::Damaged(active.index), len });
        };
        let part = partial.run(at.within(active.tables.geometry.cluster_bits));
        let len = len.min(part.len);
        if part.is_written {
            Some(Run { source: Source::Data(active.index, partial.host + part.start), len })
        } else {
            self.below(at, len)
        }
    }

    /// What the frozen layers have.
    #[inline]
    pub(crate) fn below(&self, at: GuestOffset, len: u64) -> Option<Run> {
        match &self.frozen {
            Some(map) => map.lookup(at, len),
            None => Some(Run { source: Source::Hole, len }),
        }
    }

    /// As [`Layers::below`], reading tables where need be.
    pub(crate) fn locate_below(&self, at: GuestOffset, len: u64) -> Result<Run> {
        match &self.frozen {
            Some(map) => map.locate(at, len),
            None => Ok(Run { source: Source::Hole, len }),
        }
    }

    /// As [`Layers::lookup`], reading tables where need be.
    pub(crate) fn locate(&self, at: GuestOffset, len: u64) -> Result<Run> {
        loop {
            if let Some(run) = self.lookup(at, len) {
                return Ok(run);
            }
            match &self.top {
                Top::Qcow2(active) => {
                    let raw = active.entry(active.cluster_of(at))?;
                    if raw == 0 || active.partial(raw).is_some() {
                        self.locate_below(at, 1)?;
                    }
                }
                _ => {
                    self.locate_below(at, 1)?;
                }
            }
        }
    }

    /// The layer at `index`.
    ///
    /// # Panics
    /// When the disk has no such layer.
    #[inline]
    pub(crate) fn layer(&self, index: LayerIndex) -> LayerRef<'_> {
        match &self.top {
            Top::Qcow2(active) if index == active.index => LayerRef::Active(active),
            Top::Raw(raw) => LayerRef::Raw(raw),
            _ => LayerRef::Frozen(
                self.frozen.as_ref().expect("only the active layer is not frozen").layer(index),
            ),
        }
    }

    /// The file of a layer, opened now if need be.
    pub(crate) fn store_of(&self, layer: LayerIndex) -> Result<Arc<OpenStore>> {
        match self.layer(layer) {
            LayerRef::Active(active) => Ok(Arc::clone(&active.file)),
            LayerRef::Raw(raw) => Ok(Arc::clone(&raw.file)),
            LayerRef::Frozen(frozen) => {
                self.resources.files().store(frozen).map_err(|error| error.in_layer(layer))
            }
        }
    }

    /// Whether a layer takes no writes.
    pub(crate) fn is_frozen(&self, layer: LayerIndex) -> bool {
        matches!(self.layer(layer), LayerRef::Frozen(_))
    }

    /// The file of a layer if it is open.
    #[inline]
    pub(crate) fn open_store_of(&self, layer: LayerIndex) -> Option<Arc<OpenStore>> {
        match self.layer(layer) {
            LayerRef::Active(active) => Some(Arc::clone(&active.file)),
            LayerRef::Raw(raw) => Some(Arc::clone(&raw.file)),
            LayerRef::Frozen(frozen) => frozen.open_file(),
        }
    }

    /// The file of a layer, for messages.
    pub(crate) fn path_of(&self, layer: LayerIndex) -> &Path {
        match self.layer(layer) {
            LayerRef::Active(active) => &active.path,
            LayerRef::Raw(raw) => &raw.path,
            LayerRef::Frozen(frozen) => &frozen.path,
        }
    }
}
