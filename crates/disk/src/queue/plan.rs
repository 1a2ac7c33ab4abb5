//! Deciding whether the ring can carry a request out, and in which pieces.

use std::sync::Arc;

use smallvec::SmallVec;
use vmstrata_store::{OpenStore, RingFile, fill_zero, slice};
use vmstrata_types::{HostOffset, LayerIndex};

use super::pins::Pins;
use crate::layers::{Layers, Top};
use crate::map::Source;
use crate::request::Request;
use crate::stats::Counters;

/// Pieces a request may fall into on the fast road, which bounds the time that it keeps others waiting; those of more, as 4 MiB in
/// pieces of 4 KiB, go to a worker.
const PARTS_MAX: usize = 1024;

/// A piece of a request that lies in one file.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) layer: LayerIndex,
    pub(super) file: RingFile,
    pub(super) at: HostOffset,
    pub(super) skip: usize,
    pub(super) len: usize,
}

pub(super) type Parts = SmallVec<[Part; 2]>;

impl Layers {
    /// The pieces a read falls into, if the ring can do all of it; `None` if a worker must. Ranges that read as zeros
    /// are filled here.
    #[inline]
    pub(super) fn plan_read(&self, request: &Request, pins: &Pins, counters: &Counters) -> Option<Parts> {
        let mut parts = Parts::new();
        let len = request.range.len;
        let mut done = 0;
        while done < len {
            let run = counters.looked_up(self.lookup(request.range.start + done, len - done))?;
            match run.source {
                Source::Hole | Source::Zero(_) => {
                    fill_zero(&slice(&request.segments, done as usize, run.len as usize));
                }
                Source::Data(layer, at) => {
                    let file = match pins.get(layer) {
                        Some(file) => RingFile::Pinned(file),
                        None => open_part(self.open_file_of(layer)?, at, done, run.len, request)?,
                    };
                    parts.push(Part { layer, file, at, skip: done as usize, len: run.len as usize });
                }
                Source::Compressed(_) | Source::Damaged(_) => return None,
            }
            done += run.len;
            if parts.len() > PARTS_MAX {
                return None;
            }
        }
        Some(parts)
    }

    /// The pieces a write falls into, if the active layer's file can simply be overwritten; `None` if a worker must do it.
    pub(super) fn plan_write(&self, request: &Request, counters: &Counters) -> Option<Parts> {
        let mut parts = Parts::new();
        let len = request.range.len;
        let mut done = 0;
        while done < len {
            let here = request.range.start + done;
            let (layer, store, at, found) = match &self.top {
                Top::Qcow2(active) => {
                    let in_place = self.lookup_in_place(active, here, len - done);
                    let (at, found) = counters.looked_up(in_place)?;
                    (self.top_index(), &active.file, at, found)
                }
                Top::Raw(raw) if raw.guards(here) => return None,
                Top::Raw(raw) => (LayerIndex::BASE, &raw.file, HostOffset::new(here.get()), len - done),
                Top::Frozen => return None,
            };
            if found == 0 || parts.len() == PARTS_MAX {
                return None;
            }
            let file = open_part(Arc::clone(store), at, done, found, request)?;
            parts.push(Part { layer, file, at, skip: done as usize, len: found as usize });
            done += found;
        }
        // Last, because the ring now will carry it out; a partial write under way sends it to a worker instead.
        let may_start = parts.is_empty() || self.blocks.as_ref().is_none_or(|order| order.try_enter());
        may_start.then_some(parts)
    }
}

/// A file for the ring; `None` when it cannot be used so, or not with this alignment.
#[inline]
fn open_part(
    store: Arc<OpenStore>,
    at: HostOffset,
    skip: u64,
    len: u64,
    request: &Request,
) -> Option<RingFile> {
    let alignment = store.ring_alignment()?;
    if alignment > 1 {
        let aligned = (at.get() | skip | len) & (alignment as u64 - 1) == 0;
        if !aligned || !request.segments.iter().all(|segment| segment.is_aligned(alignment)) {
            return None;
        }
    }
    Some(RingFile::Open(store))
}
