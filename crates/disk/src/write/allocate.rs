//! Writing into new clusters.
//!
//! A new cluster is written whole, in one write, before any entry leads to it: old bytes, the request's, old bytes.
//! Runs of clusters that need space are allocated, written and published together.

use vmstrata_qcow2::{L2Entry, RawEntry};
use vmstrata_store::{Segment, slice, total_len};
use vmstrata_types::{GuestOffset, HostOffset};

use super::Edges;
use crate::active::{Active, Change, EntryGuard};
use crate::alloc::Allocated;
use crate::changes::Freed;
use crate::error::{IoContext as _, Result};
use crate::layers::Layers;

/// Most bytes allocated, written and published at once.
const RUN_BYTES: u64 = 2 << 20;

impl Layers {
    /// Allocates, writes and publishes a run of clusters at the start of the request; returns how many of its bytes
    /// were written, 0 when someone else was faster.
    pub(super) fn write_allocating(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
    ) -> Result<usize> {
        let bits = active.tables.geometry.cluster_bits;
        let first = active.cluster_of(at);
        let page = active.lock_page(first);
        let len = (total_len(from) as u64).min(RUN_BYTES);
        let clusters = match active.has_subclusters() {
            // Of others a part is written.
            true => len / bits.size(),
            false => (at.within(bits) + len).div_ceil(bits.size()),
        };
        let wanted = clusters.min(active.run_limit(first));
        let mut old = self.entries_to_allocate(active, first, wanted, &page)?;
        if old.is_empty() {
            return Ok(0);
        }
        active.ensure_table(first).map_err(|error| error.in_file(&active.path))?;
        let kept = self.kept_cluster(active, old[0])?;
        let new = if kept.is_none() { Some(active.allocate(old.len() as u64)?) } else { None };
        let space = kept.or(new.as_deref().copied()).expect("the one or the other");
        old.truncate(space.clusters as usize);
        let bytes = self.write_new(active, at, from, space, &old)?;
        publish_new(active, first, space.at, &old, kept.is_none(), &page)
            .map_err(|error| error.in_file(&active.path))?;
        if let Some(new) = new {
            new.keep();
        }
        Ok(bytes)
    }

    /// The raw entries of clusters from `first` on, up to the first that may be overwritten in place, or in part.
    fn entries_to_allocate(
        &self,
        active: &Active,
        first: u64,
        count: u64,
        page: &EntryGuard<'_>,
    ) -> Result<SmallRaws> {
        let mut old = SmallRaws::new();
        for cluster in first..first + count {
            let raw = if cluster == first {
                self.complete_entry(active, cluster, page)?
            } else {
                active.entry_locked(cluster, page)?
            };
            if active.partial(raw).is_some() {
                break;
            }
            let is_own = matches!(
                active.decode(raw)?,
                L2Entry::Data { copied: true, .. } | L2Entry::Subclusters { host: Some(_), copied: true, .. }
            );
            if is_own {
                break;
            }
            old.push(raw);
        }
        Ok(old)
    }

    /// A cluster that a zero entry keeps for just this.
    fn kept_cluster(&self, active: &Active, raw: RawEntry) -> Result<Option<Allocated>> {
        Ok(match active.decode(raw)? {
            L2Entry::Zero { host: Some(at), copied: true } => {
                Some(Allocated { at, clusters: 1, zeroed: false })
            }
            _ => None,
        })
    }

    /// Writes new clusters whole; returns how many of the request's bytes are in them.
    fn write_new(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        space: Allocated,
        old: &[RawEntry],
    ) -> Result<usize> {
        let bits = active.tables.geometry.cluster_bits;
        let cluster = bits.size() as usize;
        let head = at.within(bits) as usize;
        let bytes = total_len(from).min(old.len() * cluster - head);
        let tail = old.len() * cluster - head - bytes;
        let mut edges = Edges { head, tail };
        if space.zeroed {
            // Nothing to copy up, nothing to write: the new clusters read as zeros already.
            if head > 0 && self.was_zero(active, old[0], at.align_down(bits), head)? {
                edges.head = 0;
            }
            if tail > 0 && self.was_zero(active, old[old.len() - 1], at + bytes as u64, tail)? {
                edges.tail = 0;
            }
        }
        let skipped = (head - edges.head) as u64;
        let part = slice(from, 0, bytes);
        let host = space.at + skipped;
        self.write_with_edges(active, (at, &part), edges, (old[0], old[old.len() - 1]), |segments| {
            let written = active.store.write_segments(segments, host).while_trying("write");
            written.map_err(|error| error.at(host).in_file(&active.path))
        })?;
        Ok(bytes)
    }

    /// Reads what a cluster held before; past the end of the disk there are zeros.
    pub(crate) fn copy_up(
        &self,
        active: &Active,
        raw: RawEntry,
        at: GuestOffset,
        into: &mut [u8],
    ) -> Result<()> {
        let there = self.size.saturating_sub(at.get()).min(into.len() as u64) as usize;
        into[there..].fill(0);
        if there == 0 {
            return Ok(());
        }
        self.read_old(active, raw, at, &[Segment::from_mut(&mut into[..there])])
    }

    /// Whether a part of a cluster is known to have been zeros.
    pub(crate) fn was_zero(
        &self,
        active: &Active,
        raw: RawEntry,
        at: GuestOffset,
        len: usize,
    ) -> Result<bool> {
        match active.decode(raw)? {
            L2Entry::Zero { .. } => Ok(true),
            L2Entry::Unallocated => {
                let len = self.size.saturating_sub(at.get()).min(len as u64);
                self.is_zero_below(at, len)
            }
            _ => Ok(false),
        }
    }
}

/// Raw entries of the clusters of a run.
type SmallRaws = smallvec::SmallVec<[RawEntry; 32]>;

/// Publishes new clusters from `host` on in place of what the `old` entries lead to.
fn publish_new(
    active: &Active,
    first: u64,
    host: HostOffset,
    old: &[RawEntry],
    frees_old: bool,
    page: &EntryGuard<'_>,
) -> Result<()> {
    let mut changed: smallvec::SmallVec<[Change; 4]> = smallvec::SmallVec::new();
    let mut freed: Vec<Freed> = Vec::new();
    for (number, &raw) in old.iter().enumerate() {
        let host = host + ((number as u64) << active.tables.geometry.cluster_bits.get());
        let new = active.encode(L2Entry::Data { host, copied: true });
        changed.push(Change { cluster: first + number as u64, old: raw, new });
        if frees_old {
            freed.extend(active.clusters_of(raw)?);
        }
    }
    active.publish(&changed, &freed, page)
}
