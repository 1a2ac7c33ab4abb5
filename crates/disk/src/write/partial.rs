//! Writing a part of a new cluster, and deferring the copy-up of the rest.
//!
//! ```text
//!   first write ──┬──► what lies below is in the page cache ──► new cluster written ──► complete
//!                 └──► it is not ──► partial ──┬──► the guest writes all parts ──────► complete
//!                      reads: own parts,       └──► a flush, a snapshot: copy up what is missing ──► complete
//!                      else from below
//! ```
//!
//! Without this, every first write to a cluster after a snapshot would read and write all of the cluster before it is answered.
//! A cluster of ordinary size is written all at once, whatever is known of it. If the host has in memory what lies below, filling
//! it from there costs one read that does not wait, and nothing has to be written again. Else the write brings its own bytes, and
//! zeros that are not read; what the guest writes itself before it flushes is never copied.
//!
//! A flush makes clusters complete first. Until then a power failure would undo the write anyway, and a killed process leaves the
//! word in the journal ([`crate::changes`]).
//!
//! Invariants: a partial cluster had no entry, in memory and in the image, and lies within the disk whole. A part counts as
//! written once its bytes are. Parts become written, and a cluster complete, under the cluster's lock.

use vmstrata_qcow2::RawEntry;
use vmstrata_store::{PADDING_MAX, Segment, copy_to_slice, slice, total_len};
use vmstrata_types::{GuestOffset, HostOffset};

use super::{Piece, Wait, with_scratch};
use crate::active::{Active, Change, EntryGuard, NewClusters};
use crate::changes::Noted;
use crate::error::{IoContext as _, Result};
use crate::layers::Layers;
use crate::map::Source;
use crate::partial::{Partial, Parts};

/// New clusters of up to this many bytes are written all at once, zeros for what is not known yet: the host's page cache then
/// holds them in one piece, and writes them back as one.
const PADDED_MAX: u64 = PADDING_MAX as u64;

impl Layers {
    /// Writes whole parts of one cluster at the start of the request; returns how many bytes, 0 when the cluster cannot be
    /// partial, `None` when that takes waiting and must not.
    pub(super) fn write_partial(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        wait: Wait,
    ) -> Result<Option<usize>> {
        let Some((piece, parts)) = self.piece_of(active, at, total_len(from)) else { return Ok(Some(0)) };
        let Some((guard, raw)) = lock_entry(active, piece.cluster, wait)? else { return Ok(None) };
        let from = slice(from, 0, piece.len);
        let (partial, new) = match active.partial(raw) {
            Some(partial) => {
                let place = partial.host + piece.within as u64;
                let written = active.store.write_segments(&from, place).while_trying("write");
                written.map_err(|error| error.at(place).in_file(&active.path))?;
                (partial.with(parts), None)
            }
            None if raw.is_empty() && self.may_begin(active, piece) => {
                let Some(new) = new_cluster(active, piece.cluster, wait)? else { return Ok(None) };
                let partial = Partial::new(new.at, active.tables.geometry.cluster_bits);
                let is_complete = self.write_new_cluster(active, piece, &from, &new)?;
                (if is_complete { partial.filled() } else { partial.with(parts) }, Some(new))
            }
            None => return Ok(Some(0)),
        };
        let is_written = self.put_partial(active, piece.cluster, (raw, partial, new), &guard)?;
        Ok(Some(if is_written { piece.len } else { 0 }))
    }

    /// What of `len` bytes at `at` lies in the first cluster, and its parts; `None` when those are not whole, or the cluster lies past
    /// the disk's end in part.
    fn piece_of(&self, active: &Active, at: GuestOffset, len: usize) -> Option<(Piece, Parts)> {
        let bits = active.tables.geometry.cluster_bits;
        let piece = Piece::first(active, at, len);
        let parts = Parts::of(bits, piece.within as u64, piece.len as u64)?;
        let is_inside = piece.start.get() + bits.size() <= self.size;
        (is_inside && self.blocks.is_none()).then_some((piece, parts))
    }

    /// Whether a write to the first cluster of `len` bytes at `at`, if that is new, leaves what it does not cover for later.
    pub(crate) fn defers_copy_up(&self, active: &Active, at: GuestOffset, len: u64) -> bool {
        self.piece_of(active, at, len as usize).is_some_and(|(piece, _)| self.may_begin(active, piece))
    }

    /// Whether a cluster without an entry should become partial. One that is written whole needs no copying; the one of
    /// which the image has an entry, while another is pending, would be left to that entry by a commit.
    fn may_begin(&self, active: &Active, piece: Piece) -> bool {
        piece.len < active.tables.geometry.cluster_bits.size() as usize
            && active.changes.welcomes_partials()
            && !active.changes.is_pending(piece.cluster)
    }

    /// Writes a piece to a new cluster; true when all of the cluster is what it should be.
    fn write_new_cluster(
        &self,
        active: &Active,
        piece: Piece,
        from: &[Segment<'_>],
        new: &NewClusters<'_>,
    ) -> Result<bool> {
        let size = active.tables.geometry.cluster_bits.size();
        let below = self.below(piece.start, size);
        let is_zero_below = below.is_some_and(|run| run.source.is_zero() && run.len == size);
        let pads = size <= PADDED_MAX && !(is_zero_below && new.zeroed);
        if pads && !is_zero_below && self.write_copied_up(active, piece, from, new.at)? {
            return Ok(true);
        }
        let place = new.at + piece.within as u64;
        let written = if pads {
            active.store.write_padded(from, new.at, piece.within, size as usize)
        } else {
            active.store.write_segments(from, place)
        };
        written.while_trying("write").map_err(|error| error.at(place).in_file(&active.path))?;
        Ok(is_zero_below && (pads || new.zeroed))
    }

    /// Writes a piece to a new cluster at `host`, and around it what lies below. False, and nothing is written, when that takes
    /// waiting. A read that finds nothing is not free, as the host begins to fetch the bytes: after misses it is tried less often.
    ///
    /// # Errors
    /// The active layer's file cannot be written.
    fn write_copied_up(
        &self,
        active: &Active,
        piece: Piece,
        from: &[Segment<'_>],
        host: HostOffset,
    ) -> Result<bool> {
        if !active.copy_up_backoff.tries() {
            return Ok(false);
        }
        with_scratch(active.tables.geometry.cluster_bits.size() as usize, |bytes| {
            let is_there = self.read_below_now(piece.start, bytes);
            is_there.iter().for_each(|is_there| active.copy_up_backoff.found(*is_there));
            if is_there != Some(true) {
                return Ok(false);
            }
            copy_to_slice(from, &mut bytes[piece.within..piece.end()]);
            let written = active.store.write_all(bytes, host).while_trying("write");
            written.map(|()| true).map_err(|error| error.at(host).in_file(&active.path))
        })
    }

    /// Fills `into` with what lies below, from memory; false when the host does not have all of it there, `None` when it need
    /// not be asked, as more than bytes is missing.
    fn read_below_now(&self, at: GuestOffset, into: &mut [u8]) -> Option<bool> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let run = self.below(at + done as u64, rest.len() as u64)?;
            let bytes = &mut rest[..run.len as usize];
            match run.source {
                Source::Hole | Source::Zero(_) => bytes.fill(0),
                Source::Data(layer, host) => {
                    if !self.open_file_of(layer)?.local().is_some_and(|file| file.read_now(bytes, host)) {
                        return Some(false);
                    }
                }
                Source::Compressed(_) | Source::Damaged(_) => return None,
            }
            done += run.len as usize;
        }
        Some(true)
    }

    /// Publishes a cluster whose bytes are written, in place of the entry `raw`; false when it cannot be partial now.
    fn put_partial(
        &self,
        active: &Active,
        cluster: u64,
        (raw, partial, new): (RawEntry, Partial, Option<NewClusters<'_>>),
        guard: &EntryGuard<'_>,
    ) -> Result<bool> {
        if partial.is_complete() {
            let change = Change { cluster, old: raw, new: partial.complete() };
            active.publish(&[change], &[], guard).map_err(|error| error.in_file(&active.path))?;
            new.into_iter().for_each(NewClusters::keep);
            return Ok(true);
        }
        let noted = active.note(&[Change { cluster, old: raw, new: partial.raw() }], &[], guard);
        if matches!(noted, Noted::Refused | Noted::NoRoom) {
            return Ok(false);
        }
        new.into_iter().for_each(NewClusters::keep);
        if noted == Noted::MustCommit {
            // A commit writes no word of this kind.
            self.complete_entry(active, cluster, guard)?;
        } else if raw.is_empty() {
            self.resources.maintenance().cluster_is_partial();
        }
        Ok(true)
    }
}

/// Locks a cluster and returns its entry; `None` when that takes waiting and must not.
pub(super) fn lock_entry(
    active: &Active,
    cluster: u64,
    wait: Wait,
) -> Result<Option<(EntryGuard<'_>, RawEntry)>> {
    if wait == Wait::MustNot {
        return Ok(active.try_lock_cluster(cluster).and_then(|guard| Some((guard, active.lookup(cluster)?))));
    }
    let guard = active.lock_cluster(cluster)?;
    let raw = active.entry_locked(cluster, &guard)?;
    Ok(Some((guard, raw)))
}

/// Allocates a cluster, with a table for its entry; `None` when that takes waiting and must not.
pub(super) fn new_cluster(active: &Active, cluster: u64, wait: Wait) -> Result<Option<NewClusters<'_>>> {
    if wait == Wait::MustNot {
        return Ok(active.try_ensure_table(cluster).and_then(|()| active.try_allocate()));
    }
    active.ensure_table(cluster).map_err(|error| error.in_file(&active.path))?;
    active.allocate(1).map(Some)
}
