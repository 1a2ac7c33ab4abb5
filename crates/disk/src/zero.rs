//! Writing zeros and discarding: whole clusters, or subclusters, by changing their entries, the rest by writing zeros.
//!
//! A discarded range reads as zeros, never as what a layer below has there. The space of its clusters goes back to
//! the host as soon as the change is on stable storage.

use std::ops::Range;

use vmstrata_qcow2::{L2Entry, RawEntry, Subclusters};
use vmstrata_store::{AlignedBuf, Segment};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use crate::active::{Active, Change};
use crate::error::{ErrorKind, Result};
use crate::layers::{Layers, Top};
use crate::map::Source;

/// What to do with whole clusters and subclusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// They must read as zeros; keep their space.
    Zero,
    /// They must read as zeros; give their space back.
    ZeroAndFree,
    /// Give their space back; they read as zeros where the image can say so.
    Discard,
    /// The disk is about to end before them: as a discard, in every version.
    Cut,
}

/// Bytes of zeros written at once.
pub(crate) const ZERO_CHUNK: usize = 256 << 10;

impl Layers {
    /// As [`crate::Disk::write_zeroes`] and [`crate::Disk::discard`], checked and entered.
    pub(crate) fn clear(&self, range: GuestRange, purpose: Purpose) -> Result<()> {
        match &self.top {
            Top::Qcow2(active) => self.clear_clusters(active, range, purpose),
            Top::Raw(raw) => {
                let at = HostOffset::new(range.start.get());
                let may_punch = purpose != Purpose::Zero && !raw.guards_rest_of(range);
                let punched = may_punch && raw.store.punch_hole(at, range.len).is_ok();
                if punched || purpose == Purpose::Discard { Ok(()) } else { self.write_zero_bytes(range) }
            }
            Top::Frozen => Err(ErrorKind::ReadOnly.into()),
        }
    }

    fn clear_clusters(&self, active: &Active, range: GuestRange, purpose: Purpose) -> Result<()> {
        let (bits, unit) = (active.tables.geometry.cluster_bits, active.tables.geometry.unit());
        // The disk's last cluster is whole when it is covered up to the end of the disk.
        let end = range.end();
        let whole_end = if end.get() == self.size { end.align_up(bits) } else { end.align_down(unit) };
        let whole_start = range.start.align_up(unit);
        if whole_start >= whole_end {
            return self.clear_part(range, purpose);
        }
        self.clear_part(GuestRange::new(range.start, whole_start - range.start), purpose)?;
        let whole = GuestRange::new(whole_start, whole_end - whole_start);
        let mut cluster = active.cluster_of(whole_start);
        let last = whole_end.get().div_ceil(bits.size());
        while cluster < last {
            let count = active.run_limit(cluster).min(last - cluster);
            if purpose != Purpose::Cut || active.has_table(cluster) {
                self.clear_run(active, cluster..cluster + count, whole, purpose)?;
            }
            cluster += count;
        }
        let rest = end.get().saturating_sub(whole_end.get());
        self.clear_part(GuestRange::new(whole_end, rest), purpose)
    }

    fn clear_part(&self, part: GuestRange, purpose: Purpose) -> Result<()> {
        if part.len == 0 || purpose == Purpose::Discard { Ok(()) } else { self.write_zero_bytes(part) }
    }

    /// Writes zeros where there are none yet.
    fn write_zero_bytes(&self, range: GuestRange) -> Result<()> {
        let mut zeros = AlignedBuf::zeroed(ZERO_CHUNK.min(range.len as usize));
        let mut done = 0;
        while done < range.len {
            let at = range.start + done;
            let run = self.locate(at, (range.len - done).min(zeros.len() as u64))?;
            if !matches!(run.source, Source::Hole | Source::Zero(_)) {
                self.write(at, &[Segment::from_mut(&mut zeros[..run.len as usize])])?;
            }
            done += run.len;
        }
        Ok(())
    }

    /// Clears what of `whole` lies in clusters whose entries lie in one page and one L2 table.
    fn clear_run(
        &self,
        active: &Active,
        clusters: Range<u64>,
        whole: GuestRange,
        purpose: Purpose,
    ) -> Result<()> {
        let (first, bits) = (clusters.start, active.tables.geometry.cluster_bits);
        let page = active.lock_page(first);
        let mut changed = Vec::new();
        let mut freed = Vec::new();
        let mut must_write = Vec::new();
        for cluster in clusters {
            let old = active.entry_locked(cluster, &page)?;
            let start = GuestOffset::new(cluster << bits.get());
            let from = start.max(whole.start);
            let part = GuestRange::new(from, whole.end().get().min(start.get() + bits.size()) - from.get());
            let cleared = match part.len == bits.size() {
                true => self.cleared(active, cluster, old, purpose)?,
                false => self.cleared_part(active, part, old, purpose)?,
            };
            match cleared {
                Cleared::Already => {}
                Cleared::Must(new) => {
                    changed.push(Change { cluster, old, new: active.encode(new) });
                    if new.host().is_none() {
                        freed.extend(active.clusters_of(cluster, old)?);
                    }
                }
                Cleared::Write => must_write.push(part),
            }
        }
        if !changed.is_empty() {
            active.ensure_table(first).map_err(|error| error.in_file(&active.path))?;
            active.publish(&changed, &freed, &page).map_err(|error| error.in_file(&active.path))?;
        }
        drop(page);
        for part in must_write {
            let len = part.len.min(self.size - part.start.get());
            self.write_zero_bytes(GuestRange::new(part.start, len))?;
        }
        Ok(())
    }

    /// The entry that makes some subclusters of a cluster read as zeros. Their space goes back with that of the last of them.
    fn cleared_part(
        &self,
        active: &Active,
        part: GuestRange,
        old: RawEntry,
        purpose: Purpose,
    ) -> Result<Cleared> {
        let (bits, unit) = (active.tables.geometry.cluster_bits, active.tables.geometry.unit());
        let entry = active.decode(active.cluster_of(part.start), old)?;
        if matches!(entry, L2Entry::Compressed { .. }) {
            return Ok(Cleared::Write);
        }
        let (copied, old) = (entry.own_host().is_some(), entry.states());
        let first = part.start.within(bits) >> unit.get();
        let count = part.len >> unit.get();
        let cleared = (u32::MAX >> (u64::from(Subclusters::COUNT) - count)) << first;
        let nothing_below = self.is_nothing_below(part.start, part.len)?;
        // As if the layer had never had them, or as zeros.
        let forgets = purpose == Purpose::Cut || nothing_below && purpose != Purpose::Zero;
        let zero = match (forgets, nothing_below) {
            (true, _) => old.zero & !cleared,
            // What says nothing reads as zeros already.
            (false, true) => old.zero | cleared & old.allocated,
            (false, false) => old.zero | cleared,
        };
        let states = Subclusters { allocated: old.allocated & !cleared, zero };
        if states == old {
            return Ok(Cleared::Already);
        }
        let host = entry.host().filter(|_| states.allocated != 0 || purpose == Purpose::Zero);
        Ok(Cleared::Must(L2Entry::of_subclusters(host, copied && host.is_some(), states)))
    }

    /// Whether what of a range is on the disk would read as zeros if the active layer had none of it.
    fn is_nothing_below(&self, at: GuestOffset, len: u64) -> Result<bool> {
        self.is_zero_below(at, len.min(self.size.saturating_sub(at.get())))
    }

    /// The entry that makes a cluster read as zeros.
    fn cleared(&self, active: &Active, cluster: u64, old: RawEntry, purpose: Purpose) -> Result<Cleared> {
        let bits = active.tables.geometry.cluster_bits;
        let at = GuestOffset::new(cluster << bits.get());
        let has_zero_flag = active.tables.version >= 3;
        let entry = active.decode(cluster, old)?;
        let nothing_below = self.is_nothing_below(at, bits.size())?;
        if entry == L2Entry::Unallocated && nothing_below {
            return Ok(Cleared::Already);
        }
        Ok(match (entry, purpose) {
            (L2Entry::Zero { host: None, .. }, _) | (L2Entry::Unallocated, Purpose::Cut) => Cleared::Already,
            (L2Entry::Zero { host: Some(_), .. }, Purpose::Zero) => Cleared::Already,
            (L2Entry::Data { host, copied: true }, Purpose::Zero) if has_zero_flag => {
                Cleared::Must(L2Entry::Zero { host: Some(host), copied: true })
            }
            // As if the layer had never had it.
            (_, Purpose::ZeroAndFree | Purpose::Discard | Purpose::Cut) if nothing_below => {
                Cleared::Must(L2Entry::Unallocated)
            }
            _ if has_zero_flag => Cleared::Must(L2Entry::Zero { host: None, copied: false }),
            (_, Purpose::Discard) => Cleared::Already,
            // A later resize that makes the disk longer hides what would show.
            (_, Purpose::Cut) => Cleared::Must(L2Entry::Unallocated),
            _ => Cleared::Write,
        })
    }
}

/// How a cluster becomes zeros.
enum Cleared {
    /// It need not.
    Already,
    /// By this entry.
    Must(L2Entry),
    /// By writing zeros: the image has no other way to say it.
    Write,
}
