//! Writing into new clusters.
//!
//! A new cluster is written whole, in one write, before any entry leads to it: old bytes, the request's, old bytes.
//! Runs of clusters that need space are allocated, written and published together.

use vmstrata_qcow2::{L2Entry, RawEntry};
use vmstrata_store::{Segment, SegmentVec, slice, total_len};
use vmstrata_types::GuestOffset;

use super::edges::{Around, Edge};
use super::{Wait, ensure_table, new_clusters};
use crate::active::{Active, Change, EntryGuard, NewClusters};
use crate::alloc::Allocated;
use crate::changes::Freed;
use crate::error::{IoContext as _, Result};
use crate::layers::Layers;

/// Most bytes allocated, written and published at once.
const RUN_BYTES: u64 = 2 << 20;

impl Layers {
    /// Allocates, writes and publishes a run of clusters at the start of the request; returns how many of its bytes
    /// were written, 0 when someone else was faster, `None` when that takes waiting and must not.
    pub(super) fn write_allocating(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        wait: Wait,
    ) -> Result<Option<usize>> {
        let bits = active.tables.geometry.cluster_bits;
        let first = active.cluster_of(at);
        let guard = match wait {
            Wait::May => Some(active.lock_page(first)),
            Wait::MustNot => active.try_lock_cluster(first),
        };
        let Some(guard) = guard else { return Ok(None) };
        let len = (total_len(from) as u64).min(RUN_BYTES);
        let clusters = match (wait, active.has_subclusters()) {
            (Wait::MustNot, _) => 1,
            // Of others a part is written.
            (Wait::May, true) => len / bits.size(),
            (Wait::May, false) => (at.within(bits) + len).div_ceil(bits.size()),
        };
        let wanted = clusters.min(active.run_limit(first));
        let old = self.entries_to_allocate(active, first, wanted, &guard)?;
        let (Some(&first_old), Some(&last_old)) = (old.first(), old.last()) else {
            return Ok((wait == Wait::May).then_some(0));
        };
        let head = at.within(bits) as usize;
        let bytes = total_len(from).min((old.len() << bits.get()) - head);
        let tail = (old.len() << bits.get()) - head - bytes;
        let around = Around { head: (head, first_old), tail: (tail, last_old) };
        self.with_edges(active, (at, bytes), around, wait, |before, behind| {
            let Some(space) = self.space_for(active, first, &old, wait)? else { return Ok(None) };
            let old = &old[..space.at().clusters as usize];
            // What lies behind belongs to the last of them.
            let bytes = bytes.min((old.len() << bits.get()) - head);
            let behind = Some(behind).filter(|_| old.len() << bits.get() > head + bytes);
            write_new(active, &slice(from, 0, bytes), space.at(), (head, before, behind))?;
            publish_new(active, first, &space, old, (&guard, wait))?;
            space.keep();
            Ok(Some(bytes))
        })
    }

    /// The raw entries of clusters from `first` on, up to the first that may be overwritten in place, or in part.
    fn entries_to_allocate(
        &self,
        active: &Active,
        first: u64,
        count: u64,
        guard: &EntryGuard<'_>,
    ) -> Result<SmallRaws> {
        let mut old = SmallRaws::new();
        for cluster in first..first + count {
            let raw = active.entry_locked(cluster, guard)?;
            let is_own = matches!(
                active.decode(cluster, raw)?,
                L2Entry::Data { copied: true, .. } | L2Entry::Subclusters { host: Some(_), copied: true, .. }
            );
            if is_own {
                break;
            }
            old.push(raw);
        }
        Ok(old)
    }

    /// Where clusters with these entries go: to the cluster that a zero entry keeps for just this, or to new ones, perhaps fewer.
    fn space_for<'a>(
        &self,
        active: &'a Active,
        first: u64,
        old: &[RawEntry],
        wait: Wait,
    ) -> Result<Option<Space<'a>>> {
        if let L2Entry::Zero { host: Some(at), copied: true } = active.decode(first, old[0])? {
            let kept = Allocated { at, clusters: 1, zeroed: false };
            return Ok(ensure_table(active, first, wait)?.then_some(Space::Kept(kept)));
        }
        Ok(new_clusters(active, (first, old.len() as u64), wait)?.map(Space::New))
    }
}

/// Clusters to be written whole.
enum Space<'a> {
    Kept(Allocated),
    New(NewClusters<'a>),
}

impl Space<'_> {
    fn at(&self) -> Allocated {
        match self {
            Self::Kept(space) => *space,
            Self::New(space) => **space,
        }
    }

    /// Entries lead to all of them now.
    fn keep(self) {
        if let Self::New(space) = self {
            space.keep();
        }
    }
}

/// Raw entries of the clusters of a run.
type SmallRaws = smallvec::SmallVec<[RawEntry; 32]>;

/// Writes `part`, which begins `head` bytes into `space`, with what lies around it.
fn write_new(
    active: &Active,
    part: &[Segment<'_>],
    space: Allocated,
    (head, before, behind): (usize, Edge<'_>, Option<Edge<'_>>),
) -> Result<()> {
    let before = before.into_segment(space.zeroed);
    let host = if before.is_some() { space.at } else { space.at + head as u64 };
    let mut segments: SegmentVec<'_> = SegmentVec::new();
    segments.extend(before);
    segments.extend_from_slice(part);
    segments.extend(behind.and_then(|behind| behind.into_segment(space.zeroed)));
    let written = active.store.write_segments(&segments, host).while_trying("write");
    written.map_err(|error| error.at(host).in_file(&active.path))
}

/// Publishes clusters in `space` in place of what the `old` entries lead to.
fn publish_new(
    active: &Active,
    first: u64,
    space: &Space<'_>,
    old: &[RawEntry],
    (guard, wait): (&EntryGuard<'_>, Wait),
) -> Result<()> {
    let mut changed: smallvec::SmallVec<[Change; 4]> = smallvec::SmallVec::new();
    let mut freed: Vec<Freed> = Vec::new();
    for (cluster, &old) in (first..).zip(old) {
        let host = space.at().at + ((cluster - first) << active.tables.geometry.cluster_bits.get());
        let new = active.encode(L2Entry::Data { host, copied: true });
        changed.push(Change { cluster, old, new });
        if matches!(space, Space::New(_)) {
            freed.extend(active.clusters_of(cluster, old)?);
        }
    }
    let published = active.publish_recorded(&changed, &freed, guard, wait.recorded());
    published.map_err(|error| error.in_file(&active.path))
}
