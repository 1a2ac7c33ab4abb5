//! Writing a part of a new cluster, and putting the copying of the rest off.
//!
//! ```text
//!   no entry ──► written in part ──┬──► all parts written by the guest ──► whole
//!                reads: own parts, │
//!                else from below   └──► flush, snapshot, whoever needs it whole: copy up what is missing ──► whole
//! ```
//!
//! After a snapshot every first write to a cluster had to read and write all of the cluster before it was answered. Where that
//! would mean waiting for what lies below (else see [`super::cached`]) it writes its own bytes, and zeros that nobody reads;
//! what the guest writes itself before it flushes is never copied. Nothing is promised by that which was not before: until a
//! flush, all of it would be gone after a power failure anyway, and a killed process leaves the word in the journal
//! ([`crate::changes`]).
//!
//! Invariants: a cluster in part had no entry, in memory and in the image, and lies within the disk whole. A part counts as written once its bytes are.
//! Parts become written, and a cluster whole, under the cluster's lock.

use vmstrata_store::{PADDING_MAX, Segment, slice, total_len};
use vmstrata_types::{GuestOffset, HostOffset};

use super::Wait;
use crate::active::{Active, Change, EntryGuard, NewClusters};
use crate::changes::Noted;
use crate::error::{IoContext as _, Result};
use crate::layers::Layers;
use crate::partial::{Partial, Parts};

/// New clusters of up to this many bytes are written all at once, zeros for what is not known yet: the host's page cache then
/// holds them in one piece, and writes them back as one.
const PADDED_MAX: u64 = PADDING_MAX as u64;

/// What of a request one cluster takes.
#[derive(Clone, Copy, Debug)]
struct Piece {
    cluster: u64,
    within: u64,
    len: u64,
    parts: Parts,
}

/// What happened to a piece.
enum Put {
    Done,
    /// The cluster cannot be written in part now.
    Refused,
}

/// What a piece's cluster is like where it is written.
#[derive(Clone, Copy, Debug)]
struct Place {
    host: HostOffset,
    /// The whole cluster is to be written: what is there is nobody's.
    pads: bool,
    /// So should be what the piece does not cover.
    should_be_zeros: bool,
}

impl Layers {
    /// Writes whole parts of one cluster at the start of the request; returns how many bytes, 0 when the cluster cannot be
    /// written in part, `None` when that takes waiting and must not.
    pub(super) fn write_part(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        wait: Wait,
    ) -> Result<Option<usize>> {
        let Some(piece) = self.piece_of(active, at, total_len(from) as u64) else { return Ok(Some(0)) };
        let Some((guard, raw)) = lock_entry(active, piece.cluster, wait)? else { return Ok(None) };
        let space = match active.partial(raw) {
            Some(_) => None,
            None if raw == 0 && self.may_begin(active, piece) => {
                let Some(new) = new_cluster(active, piece.cluster, wait)? else { return Ok(None) };
                Some(new)
            }
            None => return Ok(Some(0)),
        };
        let part = slice(from, 0, piece.len as usize);
        Ok(Some(match self.put(active, piece, &part, (raw, space), &guard)? {
            Put::Done => piece.len as usize,
            Put::Refused => 0,
        }))
    }

    /// What of `len` bytes at `at` lies in the first cluster; `None` when that are no whole parts, or the cluster lies past
    /// the disk's end in part.
    fn piece_of(&self, active: &Active, at: GuestOffset, len: u64) -> Option<Piece> {
        let bits = active.tables.geometry.cluster_bits;
        let within = at.within(bits);
        let len = len.min(bits.size() - within);
        let parts = Parts::of(bits, within, len)?;
        let is_inside = at.align_down(bits).get() + bits.size() <= self.size;
        (is_inside && self.blocks.is_none()).then(|| Piece {
            cluster: active.cluster_of(at),
            within,
            len,
            parts,
        })
    }

    /// Whether a cluster without an entry should be written in part. One that is written whole needs no copying; the one of
    /// which the image has an entry, while another is pending, would be left to that entry by a commit.
    fn may_begin(&self, active: &Active, piece: Piece) -> bool {
        piece.len < active.tables.geometry.cluster_bits.size()
            && active.changes.welcomes_partials()
            && !active.changes.is_pending(piece.cluster)
    }

    /// Writes the bytes, and says so.
    fn put(
        &self,
        active: &Active,
        piece: Piece,
        from: &[Segment<'_>],
        (raw, space): (u64, Option<NewClusters<'_>>),
        guard: &EntryGuard<'_>,
    ) -> Result<Put> {
        let bits = active.tables.geometry.cluster_bits;
        let start = GuestOffset::new(piece.cluster << bits.get());
        let (partial, should_be_zeros) = match (active.partial(raw), &space) {
            (Some(partial), _) => (partial, false),
            (None, Some(space)) => (Partial::new(space.at, bits), self.is_zero(start, bits.size())),
            (None, None) => unreachable!("a cluster lies somewhere"),
        };
        let in_zeros = space.as_ref().is_some_and(|space| space.zeroed);
        let pads = space.is_some() && !(in_zeros && should_be_zeros) && bits.size() <= PADDED_MAX;
        let place = Place { host: partial.host, pads, should_be_zeros };
        let is_filled = self.write_piece(active, piece, from, place)?;
        let partial = partial.with(piece.parts);
        let is_whole = is_filled || partial.is_whole() || in_zeros && should_be_zeros;
        let new = if is_whole { partial.whole() } else { partial.word() };
        let change = Change { cluster: piece.cluster, old: raw, new };
        if is_whole {
            active.publish(&[change], &[], guard).map_err(|error| error.in_file(&active.path))?;
            if let Some(new) = space {
                new.keep();
            }
            return Ok(Put::Done);
        }
        let noted = active.note(&[change], &[], guard);
        if let (Noted::Safe | Noted::MustCommit, Some(new)) = (noted, space) {
            new.keep();
        }
        match noted {
            Noted::Safe => {
                if raw == 0 {
                    self.resources.maintenance().cluster_is_partial();
                }
                Ok(Put::Done)
            }
            Noted::Refused | Noted::NoRoom => Ok(Put::Refused),
            // A commit writes no word of this kind: whole first.
            Noted::MustCommit => Ok(self.whole_entry(active, piece.cluster, guard).map(|_| Put::Done)?),
        }
    }

    /// Writes a piece; true when all of its cluster is what it should be.
    fn write_piece(&self, active: &Active, piece: Piece, from: &[Segment<'_>], place: Place) -> Result<bool> {
        let Place { host, pads, should_be_zeros } = place;
        let (bits, within) = (active.tables.geometry.cluster_bits, piece.within as usize);
        let start = GuestOffset::new(piece.cluster << bits.get());
        if pads && !should_be_zeros && self.write_copied_up(active, start, host, (within, from))? {
            return Ok(true);
        }
        let written = if pads {
            active.store.write_padded(from, host, within, bits.size() as usize)
        } else {
            active.store.write_segments(from, host + piece.within)
        };
        let written = written.while_trying("write");
        written.map_err(|error| error.at(host + piece.within).in_file(&active.path))?;
        Ok(pads && should_be_zeros)
    }

    /// Whether these bytes read as zeros below, as far as memory knows.
    fn is_zero(&self, at: GuestOffset, len: u64) -> bool {
        self.below(at, len).is_some_and(|run| run.source.is_zero() && run.len == len)
    }
}

/// Locks a cluster and returns its entry; `None` when that takes waiting and must not.
fn lock_entry(active: &Active, cluster: u64, wait: Wait) -> Result<Option<(EntryGuard<'_>, u64)>> {
    if wait == Wait::MustNot {
        return Ok(active.try_lock_cluster(cluster).and_then(|guard| Some((guard, active.lookup(cluster)?))));
    }
    let guard = active.lock_cluster(cluster)?;
    let raw = active.entry_locked(cluster, &guard)?;
    Ok(Some((guard, raw)))
}

/// Allocates a cluster, with a table for its entry; `None` when that takes waiting and must not.
fn new_cluster(active: &Active, cluster: u64, wait: Wait) -> Result<Option<NewClusters<'_>>> {
    if wait == Wait::MustNot {
        return Ok(active.try_ensure_table(cluster).and_then(|()| active.try_allocate()));
    }
    active.ensure_table(cluster).map_err(|error| error.in_file(&active.path))?;
    active.allocate(1).map(Some)
}
