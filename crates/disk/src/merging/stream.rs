//! Copying up what the target would lose.
//!
//! ```text
//!   unit of the target ──► says something itself? ──yes──► nothing to do
//!            │ no
//!            ├──► map of all layers below ───────────────┐
//!            └──► map of those that stay ──► the same? ──┴─no──► copy what the first says
//! ```
//!
//! The two maps number the layers that stay alike, so "the same" is: the same place in the same layer, or zeros in both. Holes
//! of layers' files count as zeros ([`super::holes`]), and so do units that turn out to be zeros when they are read.
//!
//! A unit is a subcluster, or a cluster of a target without subclusters. What units need is said by [`Subclusters`], a bit for
//! each thirty-second of a cluster: a unit is one of them, or all.

use std::ops::Range;

use smallvec::SmallVec;
use vmstrata_qcow2::{L2Entry, RawEntry, SubclusterState, Subclusters};
use vmstrata_store::{Segment, is_zero};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use super::holes::Holes;
use crate::active::{Active, Change, NewClusters};
use crate::error::{IoContext as _, Result};
use crate::layers::{Layers, Top};
use crate::map::{FrozenMap, Run, Source};
use crate::write::with_scratch;

/// Most bytes copied while the target's page is locked, but for clusters that are larger.
const RUN_BYTES: u64 = 256 << 10;
/// Zero clusters exist since this version.
const ZEROS_SINCE: u32 = 3;

/// What will lie below the target, and the holes of what does now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct After<'a> {
    /// `None` is no layers at all.
    pub(crate) map: Option<&'a FrozenMap>,
    pub(crate) holes: &'a Holes,
}

impl After<'_> {
    fn locate(self, at: GuestOffset, len: u64) -> Result<Run> {
        self.map.map_or(Ok(Run { source: Source::Hole, len }), |map| map.locate(at, len))
    }
}

/// What clusters would get if they had nothing themselves: data, or zero bits.
type Needs = SmallVec<[Subclusters; 8]>;

/// How far a range was copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// Bytes written.
    pub(crate) bytes: u64,
    /// All before this is done with.
    pub(crate) to: GuestOffset,
}

impl Layers {
    /// Copies into the active layer what lies below its clusters in `range` and reads otherwise in `after`. Ends
    /// early when `most` bytes are written, after one cluster at least.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write: part of it may have been copied.
    ///
    /// # Panics
    /// Without an active layer that has clusters.
    pub(crate) fn stream_range(&self, range: GuestRange, after: After<'_>, most: u64) -> Result<Progress> {
        let active = self.target();
        let bits = active.tables.geometry.cluster_bits;
        let (mut at, mut bytes) = (range.start, 0);
        while let Some((first, needs)) = self.next_run(active, at, range.end(), after)? {
            let (passed, copied) = self.stream_run(active, first, &needs, after, most - bytes)?;
            bytes += copied;
            at = GuestOffset::new((first + passed) << bits.get());
            if bytes >= most && at < range.end() {
                return Ok(Progress { bytes, to: at });
            }
        }
        Ok(Progress { bytes, to: range.end() })
    }

    /// The bytes that [`Layers::stream_range`] would write now.
    ///
    /// # Errors
    /// A layer that cannot be read.
    ///
    /// # Panics
    /// As [`Layers::stream_range`].
    pub(crate) fn demand(&self, range: GuestRange, after: After<'_>) -> Result<u64> {
        let active = self.target();
        let bits = active.tables.geometry.cluster_bits;
        let (mut at, mut bytes) = (range.start, 0);
        while let Some((first, needs)) = self.next_run(active, at, range.end(), after)? {
            let page = active.lock_page(first);
            for (cluster, &need) in (first..).zip(&needs) {
                let raw = active.entry_locked(cluster, &page)?;
                bytes += Fill::new(raw, active.decode(cluster, raw)?, need).bytes(active);
            }
            at = GuestOffset::new((first + needs.len() as u64) << bits.get());
        }
        Ok(bytes)
    }

    pub(super) fn target(&self) -> &Active {
        let Top::Qcow2(active) = &self.top else { unreachable!("only qcow2 files have layers below them") };
        active
    }

    /// The next clusters from `at` on of which a part differs: the first, and what each needs.
    fn next_run(
        &self,
        active: &Active,
        at: GuestOffset,
        end: GuestOffset,
        after: After<'_>,
    ) -> Result<Option<(u64, Needs)>> {
        let bits = active.tables.geometry.cluster_bits;
        let end = end.get().min(self.size);
        let most = (RUN_BYTES >> bits.get()).max(1);
        let Some(differs) = self.next_difference(at, end, after)? else { return Ok(None) };
        let first = active.cluster_of(differs);
        let last = end.div_ceil(bits.size()).min(first + active.run_limit(first).min(most));
        let mut needs =
            (first..last).map(|cluster| self.need(active, cluster, after)).collect::<Result<Needs>>()?;
        while needs.last() == Some(&Subclusters::NOTHING) {
            needs.pop();
        }
        Ok(Some((first, needs)))
    }

    /// Whether the layers below read as zeros, also when those that are being dropped are gone.
    pub(crate) fn is_zero_below(&self, mut at: GuestOffset, len: u64) -> Result<bool> {
        let end = at + len;
        while at < end {
            let run = self.locate_below(at, end - at)?;
            let later =
                self.merging_to.as_ref().map(|map| map.locate(at, run.len)).transpose()?.unwrap_or(run);
            if !run.source.is_zero() || !later.source.is_zero() {
                return Ok(false);
            }
            at = at + run.len.min(later.len);
        }
        Ok(true)
    }

    /// What both maps say of the bytes at `at`, as far as each says one thing.
    fn both(&self, at: GuestOffset, len: u64, after: After<'_>) -> Result<(Run, Run)> {
        let before = self.locate_below(at, len)?;
        let later = after.locate(at, before.len)?;
        if before.source == later.source {
            return Ok((before, later));
        }
        Ok((self.cut(before, after.holes), self.cut(later, after.holes)))
    }

    /// `run`, cut where data and holes of its file meet.
    pub(super) fn cut(&self, run: Run, holes: &Holes) -> Run {
        holes.cut(run, |layer, host| self.file_of(layer).ok()?.extent(host).ok())
    }

    /// Whether `len` bytes at `at` read as zeros where the target says nothing.
    fn is_zero_after(&self, mut at: GuestOffset, len: u64, after: After<'_>) -> Result<bool> {
        let end = (at + len).get().min(self.size);
        while at.get() < end {
            let run = after.locate(at, end - at.get())?;
            if !run.source.is_zero() {
                return Ok(false);
            }
            at = at + run.len;
        }
        Ok(true)
    }

    /// The first place from `at` on where the maps differ.
    fn next_difference(
        &self,
        mut at: GuestOffset,
        end: u64,
        after: After<'_>,
    ) -> Result<Option<GuestOffset>> {
        while at.get() < end {
            let (before, later) = self.both(at, end - at.get(), after)?;
            if differ(before, later) {
                return Ok(Some(at));
            }
            at = at + before.len.min(later.len);
        }
        Ok(None)
    }

    /// What the units of a cluster need.
    fn need(&self, active: &Active, cluster: u64, after: After<'_>) -> Result<Subclusters> {
        let start = GuestOffset::new(cluster << active.tables.geometry.cluster_bits.get());
        let mut need = Subclusters::NOTHING;
        for unit in units(active) {
            let (mut differs, mut zeros) = (false, true);
            let mut at = start + unit.bytes.start as u64;
            let end = (start + unit.bytes.end as u64).get().min(self.size);
            while at.get() < end {
                let (before, later) = self.both(at, end - at.get(), after)?;
                differs |= differ(before, later);
                zeros &= before.source.is_zero();
                at = at + before.len.min(later.len);
            }
            match (differs, zeros) {
                (false, _) => {}
                (true, true) if active.tables.version >= ZEROS_SINCE => need.zero |= unit.bits,
                (true, _) => need.allocated |= unit.bits,
            }
        }
        Ok(need)
    }

    /// Gives clusters from `first` on what they need and do not have, until `most` bytes are written, after one cluster at least;
    /// returns how many clusters are done with, and the bytes written.
    fn stream_run(
        &self,
        active: &Active,
        first: u64,
        needs: &[Subclusters],
        after: After<'_>,
        most: u64,
    ) -> Result<(u64, u64)> {
        let page = active.lock_page(first);
        let (mut fills, mut bytes) = (Vec::with_capacity(needs.len()), 0);
        for (cluster, &need) in (first..).zip(needs) {
            let raw = active.entry_locked(cluster, &page)?;
            let fill = Fill::new(raw, active.decode(cluster, raw)?, need);
            bytes += fill.bytes(active);
            if bytes > most && !fills.is_empty() {
                break;
            }
            fills.push(fill);
        }
        let mut space = Vec::new();
        let bytes = self.fill(active, first, &mut fills, after, &mut space)?;
        let (mut changes, mut freed) = (Vec::new(), Vec::new());
        for (cluster, fill) in (first..).zip(&fills).filter(|(_, fill)| fill.need != Subclusters::NOTHING) {
            changes.push(Change { cluster, old: fill.old, new: active.encode(fill.entry_now()) });
            freed.extend(if fill.moved.is_some() { active.clusters_of(cluster, fill.old)? } else { None });
        }
        if !changes.is_empty() {
            let in_file = |error: crate::Error| error.in_file(&active.path);
            active.ensure_table(first).map_err(in_file)?;
            active.publish(&changes, &freed, &page).map_err(in_file)?;
        }
        space.into_iter().for_each(NewClusters::keep);
        Ok((fills.len() as u64, bytes))
    }

    /// Copies the data that clusters from `first` on need to where it will lie, which `space` has if that is new; what turns out to
    /// be zeros is not written. Returns the bytes written.
    fn fill<'a>(
        &self,
        active: &'a Active,
        first: u64,
        fills: &mut [Fill],
        after: After<'_>,
        space: &mut Vec<NewClusters<'a>>,
    ) -> Result<u64> {
        let bits = active.tables.geometry.cluster_bits;
        let (start, size) = (GuestOffset::new(first << bits.get()), bits.size() as usize);
        with_scratch(fills.len() * size, |bytes| {
            for (run, _) in runs(fills, size, |number, _| HostOffset::new((number * size) as u64)) {
                let old = |cluster| fills[(cluster - first) as usize].old;
                self.copy_up(active, old, start + run.start as u64, &mut bytes[run])?;
            }
            for (number, fill) in fills.iter_mut().enumerate() {
                let copied = fill.need.allocated;
                for unit in units(active).filter(|unit| copied & unit.bits != 0) {
                    let at = number * size + unit.bytes.start;
                    if is_zero(&bytes[at..at + unit.bytes.len()]) {
                        let len = unit.bytes.len() as u64;
                        let unsaid = self.is_zero_after(start + at as u64, len, after)?;
                        fill.reads_as_zeros(unit.bits, unsaid, active.tables.version);
                    }
                }
            }
            let mut wanted = fills.iter().filter(|fill| fill.moves()).count() as u64;
            while wanted > 0 {
                let new = active.allocate(wanted)?;
                wanted -= new.clusters;
                space.push(new);
            }
            let new =
                space.iter().flat_map(|new| (0..new.clusters).map(|number| new.at + (number << bits.get())));
            for (fill, host) in fills.iter_mut().filter(|fill| fill.moves()).zip(new) {
                fill.moved = Some(host);
            }
            let mut written = 0;
            for (run, host) in runs(fills, size, |_, fill| fill.host_now()) {
                written += run.len() as u64;
                let from = Segment::from_mut(&mut bytes[run]);
                let wrote = self.overwrite(&*active.store, &[from], host).while_trying("write");
                wrote.map_err(|error| error.at(host).in_file(&active.path))?;
            }
            Ok(written)
        })
    }
}

/// A subcluster, or a cluster without any.
struct Unit {
    /// Its bits in [`Subclusters`].
    bits: u32,
    /// Its bytes in the cluster.
    bytes: Range<usize>,
}

/// The units of each cluster.
fn units(active: &Active) -> impl Iterator<Item = Unit> {
    let geometry = active.tables.geometry;
    let (count, size) =
        (geometry.cluster_bits.size() / geometry.unit().size(), geometry.unit().size() as usize);
    (0..count as usize).map(move |number| Unit {
        bits: if count == 1 { u32::MAX } else { 1 << number },
        bytes: number * size..(number + 1) * size,
    })
}

/// What a cluster of the target was, and what it gets.
#[derive(Debug)]
struct Fill {
    old: RawEntry,
    entry: L2Entry,
    /// What it has nothing of itself: data, or zero bits.
    need: Subclusters,
    /// Where the cluster lies from now on, if that is new.
    moved: Option<HostOffset>,
}

impl Fill {
    fn new(old: RawEntry, entry: L2Entry, need: Subclusters) -> Self {
        let has = entry.states();
        let lacks = !(has.allocated | has.zero);
        let need = Subclusters { allocated: need.allocated & lacks, zero: need.zero & lacks };
        Self { old, entry, need, moved: None }
    }

    /// Whether it needs a new cluster: it has none, or others use its cluster.
    fn moves(&self) -> bool {
        self.need.allocated != 0 && self.entry.own_host().is_none()
    }

    /// What is written: with what it needs, all that it has, if it moves.
    fn written(&self) -> u32 {
        self.need.allocated | if self.moves() { self.entry.states().allocated } else { 0 }
    }

    /// Bytes that are written, if nothing turns out to be zeros.
    fn bytes(&self, active: &Active) -> u64 {
        let part = active.tables.geometry.cluster_bits.size() / u64::from(Subclusters::COUNT);
        u64::from(self.written().count_ones()) * part
    }

    /// A unit is zeros: it gets a zero bit, unless it reads so without. Version 2 has to write them.
    fn reads_as_zeros(&mut self, unit: u32, unsaid: bool, version: u32) {
        if unsaid || version >= ZEROS_SINCE {
            self.need.allocated &= !unit;
            self.need.zero |= if unsaid { 0 } else { unit };
        }
    }

    /// Where its data lies now.
    fn host_now(&self) -> HostOffset {
        self.moved.or(self.entry.host()).expect("data lies in a cluster")
    }

    fn entry_now(&self) -> L2Entry {
        let (has, need) = (self.entry.states(), self.need);
        let states = Subclusters { allocated: has.allocated | need.allocated, zero: has.zero | need.zero };
        let is_own = self.moved.is_some() || self.entry.own_host().is_some();
        L2Entry::of_subclusters(self.moved.or(self.entry.host()), is_own, states)
    }
}

/// The runs of bytes that are written, in clusters of `size` bytes, and where each lies by what `host` says of its clusters.
fn runs(
    fills: &[Fill],
    size: usize,
    host: impl Fn(usize, &Fill) -> HostOffset,
) -> Vec<(Range<usize>, HostOffset)> {
    let part = size / Subclusters::COUNT as usize;
    let mut runs: Vec<(Range<usize>, HostOffset)> = Vec::new();
    for (number, fill) in fills.iter().enumerate() {
        let written = Subclusters { allocated: fill.written(), zero: 0 };
        for (first, count, state) in written.runs() {
            if state != SubclusterState::Allocated {
                continue;
            }
            let (within, len) = (first as usize * part, count as usize * part);
            let (start, at) = (number * size + within, host(number, fill) + within as u64);
            match runs.last_mut() {
                Some((last, host)) if last.end == start && *host + last.len() as u64 == at => last.end += len,
                _ => runs.push((start..start + len, at)),
            }
        }
    }
    runs
}

fn differ(before: Run, after: Run) -> bool {
    before.source != after.source && !(before.source.is_zero() && after.source.is_zero())
}
