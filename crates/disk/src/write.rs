//! Writing: in place where the active layer owns the cluster, else into a new cluster, with what the request does not
//! cover copied up.
//!
//! [`allocate`] writes new clusters whole, [`subclusters`] writes parts of clusters that have them; what either copies up,
//! [`edges`] reads. [`guarded`] keeps headers of images off raw disks.

mod allocate;
mod edges;
mod subclusters;

use std::cell::RefCell;

use vmstrata_qcow2::probe::PROBE_LEN;
use vmstrata_qcow2::{ImageFormat, L2Entry, RawEntry, SubclusterState};
use vmstrata_store::{AlignedBuf, LocalFile, Segment, Store, copy_to_slice, slice, total_len};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use crate::active::{Active, EntryGuard, NewClusters};
use crate::changes::Recorded;
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layers::{HeaderGuard, Layers, RawTop, Top};

thread_local! {
    /// Where a thread puts together what it writes to new clusters.
    static SCRATCH: RefCell<AlignedBuf> = RefCell::new(AlignedBuf::zeroed(0));
}

/// Runs `work` with `len` bytes of the thread's own; what is in them is left over. `work` must not ask for them again.
pub(crate) fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            *scratch = AlignedBuf::zeroed(len.next_power_of_two());
        }
        work(&mut scratch[..len])
    })
}

/// Whether a write may wait for metadata, for other writers of its cluster, or for a slow store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    May,
    MustNot,
}

impl Wait {
    /// When the journal is given the changes of a write: of those of a queue's thread, together with others.
    fn recorded(self) -> Recorded {
        match self {
            Self::May => Recorded::Now,
            Self::MustNot => Recorded::Later,
        }
    }
}

/// What of a request its first cluster takes.
#[derive(Clone, Copy, Debug)]
struct Piece {
    cluster: u64,
    /// Where the cluster begins.
    start: GuestOffset,
    within: usize,
    len: usize,
}

impl Piece {
    /// Of `len` bytes at `at`.
    fn first(active: &Active, at: GuestOffset, len: usize) -> Self {
        let bits = active.tables.geometry.cluster_bits;
        let within = at.within(bits) as usize;
        let len = len.min(bits.size() as usize - within);
        Self { cluster: active.cluster_of(at), start: at.align_down(bits), within, len }
    }

    /// In the cluster.
    fn end(self) -> usize {
        self.within + self.len
    }
}

impl Layers {
    /// As [`crate::Disk::write`], checked and entered.
    pub(crate) fn write(&self, at: GuestOffset, from: &[Segment<'_>]) -> Result<()> {
        match &self.top {
            Top::Qcow2(active) => {
                self.write_active(active, at, from, Wait::May)?;
                self.record()
            }
            Top::Raw(raw) => {
                let host = HostOffset::new(at.get());
                self.write_raw(raw, at, from).map_err(|error| error.at(host).in_file(&raw.path))
            }
            Top::Frozen => Err(ErrorKind::ReadOnly.into()),
        }
    }

    /// As [`Layers::write`], from memory and without waiting but for the host's page cache; false where that cannot be done:
    /// any part of the range may then have been written. It completes only after [`Layers::record`].
    pub(crate) fn try_write(&self, at: GuestOffset, from: &[Segment<'_>]) -> bool {
        let Top::Qcow2(active) = &self.top else { return false };
        // Around the page cache a write may wait for those beside it; one of whole clusters is allocated by a worker.
        let is_small = (total_len(from) as u64) < active.tables.geometry.cluster_bits.size();
        is_small
            && self.blocks.is_none()
            && self.write_active(active, at, from, Wait::MustNot).is_ok_and(|written| written)
    }

    /// Writes to the active layer: what it owns in place, else parts of clusters, else whole new clusters. False when the
    /// rest would have to wait and must not.
    fn write_active(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        wait: Wait,
    ) -> Result<bool> {
        let len = total_len(from);
        let mut done = 0;
        while done < len {
            let here = at + done as u64;
            let rest = slice(from, done, len - done);
            let Some(mut wrote) = self.write_in_place(active, here, &rest, wait)? else { return Ok(false) };
            if wrote == 0 {
                let part = match active.has_subclusters() {
                    true => self.write_subclusters(active, here, &rest, wait)?,
                    false => self.write_allocating(active, here, &rest, wait)?,
                };
                let Some(part) = part else { return Ok(false) };
                wrote = part;
            }
            done += wrote;
        }
        Ok(true)
    }

    fn write_raw(&self, raw: &RawTop, at: GuestOffset, from: &[Segment<'_>]) -> Result<()> {
        let done = match &raw.guard {
            Some(guard) if raw.guards(at) => self.write_guarded(raw, guard, at, from)?,
            _ => 0,
        };
        let rest = slice(from, done, total_len(from) - done);
        if rest.is_empty() {
            return Ok(());
        }
        self.overwrite(&*raw.store, &rest, HostOffset::new(at.get() + done as u64)).while_trying("write")
    }

    /// Writes bytes that other requests may be writing around: see [`crate::blocks`].
    pub(crate) fn overwrite(
        &self,
        store: &dyn Store,
        from: &[Segment<'_>],
        host: HostOffset,
    ) -> std::io::Result<()> {
        let write = || store.write_segments(from, host);
        match &self.blocks {
            None => write(),
            Some(order) => {
                let block = store.local().map_or(1, LocalFile::raw_alignment) as u64 - 1;
                let is_whole = (host.get() | total_len(from) as u64) & block == 0;
                if is_whole { order.whole(write) } else { order.partial(write) }
            }
        }
    }

    /// Where the bytes at `at` may be overwritten, and how many, from memory alone.
    ///
    /// `None` when the page is not in memory; a length of 0 when a cluster must be allocated first.
    #[inline]
    pub(crate) fn lookup_in_place(
        &self,
        active: &Active,
        at: GuestOffset,
        len: u64,
    ) -> Option<(HostOffset, u64)> {
        let bits = active.tables.geometry.cluster_bits;
        let mut place = HostOffset::ZERO;
        let mut found = 0;
        while found < len {
            let here = at + found;
            let within = here.within(bits);
            let raw = active.lookup(active.cluster_of(here))?;
            let (host, there) = match active.tables.entries.l2(raw) {
                Ok(L2Entry::Data { host, copied: true }) => (host, bits.size() - within),
                Ok(L2Entry::Subclusters { host: Some(host), copied: true, states }) => {
                    let unit = active.tables.geometry.unit();
                    let first = within >> unit.get();
                    match states.run(first as u32) {
                        (SubclusterState::Allocated, count) => {
                            (host, ((first + u64::from(count)) << unit.get()) - within)
                        }
                        _ => break,
                    }
                }
                _ => break,
            };
            let host = host + within;
            if found == 0 {
                place = host;
            } else if host != place + found {
                break;
            }
            found += there.min(len - found);
        }
        Some((place, found))
    }

    /// Overwrites what may be overwritten at the start of the request; returns how many bytes, `None` when that takes waiting
    /// and must not.
    fn write_in_place(
        &self,
        active: &Active,
        at: GuestOffset,
        from: &[Segment<'_>],
        wait: Wait,
    ) -> Result<Option<usize>> {
        let len = total_len(from) as u64;
        let (place, found) = loop {
            match self.lookup_in_place(active, at, len) {
                Some(found) => break found,
                // Locking the cluster reads the page, if that takes no waiting.
                None if wait == Wait::MustNot => break (HostOffset::ZERO, 0),
                None => {
                    // Some page of the range is missing: fill the first, then go on with what is there.
                    active.entry(active.cluster_of(at))?;
                    let first =
                        active.run_limit(active.cluster_of(at)) << active.tables.geometry.cluster_bits.get();
                    let first = first - at.within(active.tables.geometry.cluster_bits);
                    if let Some(found) = self.lookup_in_place(active, at, len.min(first)) {
                        break found;
                    }
                }
            }
        };
        // A store without a descriptor may block for any time.
        if found > 0 && wait == Wait::MustNot && active.file.ring_alignment().is_none() {
            return Ok(None);
        }
        if found > 0 {
            let part = slice(from, 0, found as usize);
            let written = self.overwrite(&*active.store, &part, place).while_trying("write");
            written.map_err(|error| error.at(place).in_file(&active.path))?;
        }
        Ok(Some(found as usize))
    }
}

/// Locks a cluster and returns its entry; `None` when that takes waiting and must not.
fn lock_entry(active: &Active, cluster: u64, wait: Wait) -> Result<Option<(EntryGuard<'_>, RawEntry)>> {
    if wait == Wait::MustNot {
        return Ok(active.try_lock_cluster(cluster).and_then(|guard| Some((guard, active.lookup(cluster)?))));
    }
    let guard = active.lock_cluster(cluster)?;
    let raw = active.entry_locked(cluster, &guard)?;
    Ok(Some((guard, raw)))
}

/// Makes sure of the table for a cluster's entry; false when that takes waiting and must not.
fn ensure_table(active: &Active, cluster: u64, wait: Wait) -> Result<bool> {
    match wait {
        Wait::May => active.ensure_table(cluster).map_err(|error| error.in_file(&active.path)).map(|()| true),
        Wait::MustNot => Ok(active.try_ensure_table(cluster).is_some()),
    }
}

/// Allocates up to `count` clusters, with a table for their entries; `None` when that takes waiting and must not.
fn new_clusters(active: &Active, (first, count): (u64, u64), wait: Wait) -> Result<Option<NewClusters<'_>>> {
    if !ensure_table(active, first, wait)? {
        return Ok(None);
    }
    match wait {
        Wait::May => active.allocate(count).map(Some),
        Wait::MustNot => Ok(active.try_allocate()),
    }
}

impl RawTop {
    /// Whether a write at `at` may bring a header.
    #[inline]
    pub(crate) fn guards(&self, at: GuestOffset) -> bool {
        self.guard.is_some() && at.get() < PROBE_LEN as u64
    }

    /// Whether clearing `range` leaves a part of what was guarded.
    pub(crate) fn guards_rest_of(&self, range: GuestRange) -> bool {
        self.guards(range.start) && (range.start.get() != 0 || range.len < PROBE_LEN as u64)
    }
}

impl Layers {
    /// Writes as much of `from` as lies in the first sector; returns how many bytes.
    ///
    /// # Errors
    /// [`ErrorKind::HeaderWrite`] where the sector would be the start of an image: nothing was written.
    pub(super) fn write_guarded(
        &self,
        raw: &RawTop,
        guard: &HeaderGuard,
        at: GuestOffset,
        from: &[Segment<'_>],
    ) -> Result<usize> {
        let mut is_logged = guard.lock();
        let mut sector = [0; PROBE_LEN];
        raw.store.read_padded(&mut sector, HostOffset::ZERO).while_trying("read the first sector")?;
        let start = usize::try_from(at.get()).expect("within the first sector");
        let end = PROBE_LEN.min(start + total_len(from));
        // A copy: the guest may change its memory after the look.
        copy_to_slice(from, &mut sector[start..end]);
        if let Some(format) = ImageFormat::of_start(&sector) {
            let refused = ErrorKind::HeaderWrite { format };
            if !std::mem::replace(&mut *is_logged, true) {
                tracing::warn!(disk = %raw.path.display(), "write refused: {refused}");
            }
            return Err(refused.into());
        }
        let written = self.overwrite(
            &*raw.store,
            &[Segment::from_mut(&mut sector[start..end])],
            HostOffset::new(at.get()),
        );
        written.while_trying("write")?;
        Ok(end - start)
    }
}
