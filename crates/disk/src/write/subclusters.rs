//! Writing into clusters that have subclusters: a request writes its own bytes, and of the first and last subcluster what it does
//! not cover. Nothing else is copied up.
//!
//! The subclusters' bits are published once their bytes are written. Until then they are what they were for all others: one that
//! has no data yet may be written where it will lie.

use vmstrata_qcow2::{L2Entry, RawEntry, SubclusterState, Subclusters};
use vmstrata_store::{Segment, SegmentVec, copy_to_slice, slice, total_len};
use vmstrata_types::{GuestOffset, HostOffset};

use super::edges::Around;
use super::{Piece, Wait, ensure_table, lock_entry, new_clusters, with_scratch};
use crate::active::{Active, Change, EntryGuard, NewClusters};
use crate::error::{Error, IoContext as _, Result};
use crate::layers::Layers;

impl Layers {
    /// Writes what of the request lies in its first cluster; returns how many bytes, 0 when someone else was faster, `None` when
    /// that takes waiting and must not.
    pub(super) fn write_subclusters(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        wait: Wait,
    ) -> Result<Option<usize>> {
        let bits = active.tables.geometry.cluster_bits;
        let is_whole = at.is_aligned(bits) && total_len(from) as u64 >= bits.size();
        if is_whole && wait == Wait::May {
            let wrote = self.write_allocating(active, at, from, wait)?;
            if wrote > Some(0) {
                return Ok(wrote);
            }
        }
        let piece = Piece::first(active, at, total_len(from));
        let Some((guard, raw)) = lock_entry(active, piece.cluster, wait)? else { return Ok(None) };
        let from = slice(from, 0, piece.len);
        let entry = active.decode(piece.cluster, raw)?;
        if matches!(entry, L2Entry::Data { copied: true, .. }) {
            // It can be overwritten in place by now.
            return Ok((wait == Wait::May).then_some(0));
        }
        let old = Old { raw, host: entry.own_host(), states: entry.states() };
        // Copy on write.
        if old.states.allocated != 0 && old.host.is_none() {
            return match wait {
                Wait::MustNot => Ok(None),
                Wait::May => self.write_copy(active, piece, &from, old, &guard).map(Some),
            };
        }
        self.write_piece(active, piece, &from, old, wait, &guard)
    }

    /// Writes a piece into a cluster of the layer's own, or into a new one where nothing has to be copied but edges.
    fn write_piece(
        &self,
        active: &Active,
        piece: Piece,
        from: &[Segment<'_>],
        old: Old,
        wait: Wait,
        guard: &EntryGuard<'_>,
    ) -> Result<Option<usize>> {
        let unit = active.tables.geometry.unit().size() as usize;
        let has_data = |subcluster: usize| old.states.allocated >> subcluster & 1 == 1;
        let head = if has_data(piece.within / unit) { 0 } else { piece.within % unit };
        let last = (piece.end() - 1) / unit;
        let tail = if has_data(last) { 0 } else { (last + 1) * unit - piece.end() };
        let at = piece.start + piece.within as u64;
        let around = Around { head: (head, old.raw), tail: (tail, old.raw) };
        self.with_edges(active, (at, piece.len), around, wait, |before, behind| {
            let (host, new) = match old.host {
                Some(host) if ensure_table(active, piece.cluster, wait)? => (host, None),
                Some(_) => return Ok(None),
                None => match new_clusters(active, (piece.cluster, 1), wait)? {
                    Some(new) => (new.at, Some(new)),
                    None => return Ok(None),
                },
            };
            let place = host + (piece.within - head) as u64;
            let mut segments: SegmentVec<'_> = SegmentVec::new();
            segments.extend(before.into_segment(false));
            segments.extend_from_slice(from);
            segments.extend(behind.into_segment(false));
            let written = self.overwrite(&*active.store, &segments, place).while_trying("write");
            written.map_err(|error| error.at(place).in_file(&active.path))?;
            self.publish_subclusters(active, piece, (host, old), new, (guard, wait))?;
            Ok(Some(piece.len))
        })
    }

    /// Writes a piece into a new cluster, with all that has data in the old one, which others use, or which is compressed.
    fn write_copy(
        &self,
        active: &Active,
        piece: Piece,
        from: &[Segment<'_>],
        old: Old,
        guard: &EntryGuard<'_>,
    ) -> Result<usize> {
        let new = new_clusters(active, (piece.cluster, 1), Wait::May)?.expect("it may wait");
        let unit = active.tables.geometry.unit().size() as usize;
        let (host, needed) =
            (new.at, Subclusters { allocated: old.states.allocated | touched(active, piece), zero: 0 });
        with_scratch(active.tables.geometry.cluster_bits.size() as usize, |bytes| {
            let runs = || needed.runs().filter(|(.., state)| *state == SubclusterState::Allocated);
            let of_run =
                |(first, count, _): (u32, u32, _)| first as usize * unit..(first + count) as usize * unit;
            for run in runs().map(of_run) {
                self.copy_up(active, |_| old.raw, piece.start + run.start as u64, &mut bytes[run])?;
            }
            copy_to_slice(from, &mut bytes[piece.within..piece.end()]);
            for run in runs().map(of_run) {
                let place = host + run.start as u64;
                let part = Segment::from_mut(&mut bytes[run]);
                let written = self.overwrite(&*active.store, &[part], place).while_trying("write");
                written.map_err(|error| error.at(place).in_file(&active.path))?;
            }
            Ok::<(), Error>(())
        })?;
        self.publish_subclusters(active, piece, (host, old), Some(new), (guard, Wait::May))?;
        Ok(piece.len)
    }

    /// Publishes a piece whose bytes are written in the cluster at `host`.
    fn publish_subclusters(
        &self,
        active: &Active,
        piece: Piece,
        (host, old): (HostOffset, Old),
        new: Option<NewClusters<'_>>,
        (guard, wait): (&EntryGuard<'_>, Wait),
    ) -> Result<()> {
        let allocated = old.states.allocated | touched(active, piece);
        let states = Subclusters { allocated, zero: old.states.zero & !allocated };
        let entry = active.encode(L2Entry::of_subclusters(Some(host), true, states));
        let freed = if new.is_some() { active.clusters_of(piece.cluster, old.raw)? } else { None };
        if entry != old.raw {
            let change = Change { cluster: piece.cluster, old: old.raw, new: entry };
            active
                .publish_recorded(&[change], freed.as_slice(), guard, wait.recorded())
                .map_err(|error| error.in_file(&active.path))?;
        }
        new.into_iter().for_each(NewClusters::keep);
        Ok(())
    }
}

/// What a cluster was before a write.
#[derive(Clone, Copy, Debug)]
struct Old {
    raw: RawEntry,
    /// The cluster, if it is the layer's alone.
    host: Option<HostOffset>,
    states: Subclusters,
}

/// The subclusters that a piece touches, a bit each.
fn touched(active: &Active, piece: Piece) -> u32 {
    let unit = active.tables.geometry.unit().size() as usize;
    let (first, last) = (piece.within / unit, (piece.end() - 1) / unit);
    (u32::MAX >> (31 - (last - first))) << first
}
