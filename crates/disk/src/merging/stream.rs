//! Copying up what the target would lose.
//!
//! ```text
//!   cluster of the target ──► has an entry of its own? ──yes──► nothing to do
//!            │ no
//!            ├──► map of all layers below ───────────────┐
//!            └──► map of those that stay ──► the same? ──┴─no──► copy what the first says
//! ```
//!
//! The two maps number the layers that stay alike, so "the same" is: the same place in the same layer, or zeros in both. Holes
//! of layers' files count as zeros ([`super::holes`]), and so do clusters that turn out to be zeros when they are read.

use vmstrata_qcow2::{L2Entry, RawEntry};
use vmstrata_store::is_zero;
use vmstrata_types::{GuestOffset, GuestRange};

use super::holes::Holes;
use crate::active::{Active, Change, NewClusters};
use crate::error::{IoContext as _, Result};
use crate::layers::{Layers, Top};
use crate::map::{FrozenMap, Run, Source};
use crate::write::with_scratch;

/// Most bytes copied while the target's page is locked.
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

/// What the target must get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Zeros,
    Data,
}

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
        while let Some((first, count, need)) = self.next_run(active, at, range.end(), after)? {
            let room = ((most - bytes) >> bits.get()).max(1);
            let count = if need == Need::Data { count.min(room) } else { count };
            let (passed, copied) = self.stream_run(active, first, count, need, after)?;
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
        let mut at = range.start;
        let mut clusters = 0;
        while let Some((first, count, need)) = self.next_run(active, at, range.end(), after)? {
            if need == Need::Data {
                let page = active.lock_page(first);
                for cluster in first..first + count {
                    let raw = active.entry_locked(cluster, &page)?;
                    clusters += u64::from(active.decode(raw)? == L2Entry::Unallocated);
                }
            }
            at = GuestOffset::new((first + count) << bits.get());
        }
        Ok(clusters << bits.get())
    }

    fn target(&self) -> &Active {
        let Top::Qcow2(active) = &self.top else { unreachable!("only qcow2 files have layers below them") };
        active
    }

    /// The next clusters from `at` on that differ and need one thing: the first, how many, and what.
    fn next_run(
        &self,
        active: &Active,
        at: GuestOffset,
        end: GuestOffset,
        after: After<'_>,
    ) -> Result<Option<(u64, u64, Need)>> {
        let bits = active.tables.geometry.cluster_bits;
        let end = end.get().min(self.size);
        let most = (RUN_BYTES >> bits.get()).max(1);
        let Some(differs) = self.next_difference(at, end, after)? else { return Ok(None) };
        let first = active.cluster_of(differs);
        let last = end.div_ceil(bits.size()).min(first + active.run_limit(first).min(most));
        let need = self.need(active, first, after)?;
        let mut count = 1;
        while first + count < last && self.need(active, first + count, after)? == need {
            count += 1;
        }
        Ok(Some((first, count, need)))
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

    /// Whether a cluster reads as zeros without an entry of the target.
    fn is_zero_after(&self, active: &Active, cluster: u64, after: After<'_>) -> Result<bool> {
        let bits = active.tables.geometry.cluster_bits;
        let mut at = GuestOffset::new(cluster << bits.get());
        let end = (at + bits.size()).get().min(self.size);
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

    fn need(&self, active: &Active, cluster: u64, after: After<'_>) -> Result<Need> {
        let bits = active.tables.geometry.cluster_bits;
        let mut at = GuestOffset::new(cluster << bits.get());
        let end = (at + bits.size()).get().min(self.size);
        let (mut differs, mut zeros) = (false, true);
        while at.get() < end {
            let (before, later) = self.both(at, end - at.get(), after)?;
            differs |= differ(before, later);
            zeros &= before.source.is_zero();
            at = at + before.len.min(later.len);
        }
        Ok(match (differs, zeros) {
            (false, _) => Need::Nothing,
            (true, true) if active.tables.version >= ZEROS_SINCE => Need::Zeros,
            (true, _) => Need::Data,
        })
    }

    /// Gives the first of `count` clusters that have no entry what they need; returns how many clusters are done with, and
    /// the bytes written.
    fn stream_run(
        &self,
        active: &Active,
        first: u64,
        count: u64,
        need: Need,
        after: After<'_>,
    ) -> Result<(u64, u64)> {
        let page = active.lock_page(first);
        let mut old: Vec<RawEntry> = Vec::new();
        for cluster in first..first + count {
            let raw = active.entry_locked(cluster, &page)?;
            if active.decode(raw)? != L2Entry::Unallocated {
                break;
            }
            old.push(raw);
        }
        if old.is_empty() || need == Need::Nothing {
            return Ok((old.len().max(1) as u64, 0));
        }
        let mut copied = Copied::default();
        match need {
            Need::Zeros => copied.zeros(active, first, &old),
            _ => self.copy_run(active, first, &old, after, &mut copied)?,
        }
        if !copied.changes.is_empty() {
            let in_file = |error: crate::Error| error.in_file(&active.path);
            active.ensure_table(first).map_err(in_file)?;
            active.publish(&copied.changes, &[], &page).map_err(in_file)?;
        }
        copied.space.into_iter().for_each(NewClusters::keep);
        Ok((old.len() as u64, copied.bytes))
    }

    /// Writes what lies below the clusters from `first` on, whose entries are `old`, into new ones; those that are zeros get
    /// none.
    fn copy_run<'a>(
        &self,
        active: &'a Active,
        first: u64,
        old: &[RawEntry],
        after: After<'_>,
        copied: &mut Copied<'a>,
    ) -> Result<()> {
        let bits = active.tables.geometry.cluster_bits;
        let size = bits.size() as usize;
        with_scratch(old.len() * size, |bytes| {
            self.copy_up(active, |_| RawEntry::EMPTY, GuestOffset::new(first << bits.get()), bytes)?;
            // `[cluster]`: how it becomes zeros, if it does.
            let mut zeros = Vec::with_capacity(old.len());
            for (number, cluster) in bytes.chunks_exact(size).enumerate() {
                let cluster = is_zero(cluster).then_some(first + number as u64);
                zeros.push(
                    cluster.map(|cluster| self.zeros_for(active, cluster, after)).transpose()?.flatten(),
                );
            }
            let mut at = 0;
            for run in zeros.chunk_by(|one, other| one == other) {
                let (cluster, old) = (first + at as u64, &old[at..at + run.len()]);
                match run[0] {
                    Some(Zeros::Unsaid) => {}
                    Some(Zeros::Entry) => copied.zeros(active, cluster, old),
                    None => copied.data(active, cluster, old, &bytes[at * size..][..run.len() * size])?,
                }
                at += run.len();
            }
            Ok(())
        })
    }

    /// How a cluster of zeros is said; `None` where it has to be written, as version 2 has no other way.
    fn zeros_for(&self, active: &Active, cluster: u64, after: After<'_>) -> Result<Option<Zeros>> {
        if self.is_zero_after(active, cluster, after)? {
            return Ok(Some(Zeros::Unsaid));
        }
        Ok((active.tables.version >= ZEROS_SINCE).then_some(Zeros::Entry))
    }
}

/// How a cluster comes to read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zeros {
    /// Nothing lies below it.
    Unsaid,
    /// By an entry.
    Entry,
}

/// What a run of clusters gets, until entries lead to it.
#[derive(Debug, Default)]
struct Copied<'a> {
    changes: Vec<Change>,
    space: Vec<NewClusters<'a>>,
    bytes: u64,
}

impl<'a> Copied<'a> {
    fn zeros(&mut self, active: &Active, first: u64, old: &[RawEntry]) {
        let new = active.encode(L2Entry::Zero { host: None, copied: false });
        let zeros = (first..).zip(old).map(|(cluster, &old)| Change { cluster, old, new });
        self.changes.extend(zeros);
    }

    fn data(
        &mut self,
        active: &'a Active,
        mut first: u64,
        mut old: &[RawEntry],
        mut bytes: &[u8],
    ) -> Result<()> {
        let bits = active.tables.geometry.cluster_bits;
        while !old.is_empty() {
            let space = active.allocate(old.len() as u64)?;
            let (at, count) = (space.at, space.clusters);
            self.space.push(space);
            let (now, later) = bytes.split_at((count << bits.get()) as usize);
            let written = active.store.write_all(now, at).while_trying("write");
            written.map_err(|error| error.at(at).in_file(&active.path))?;
            let change = |(number, &old): (u64, &RawEntry)| {
                let host = at + (number << bits.get());
                let new = active.encode(L2Entry::Data { host, copied: true });
                Change { cluster: first + number, old, new }
            };
            self.changes.extend((0..).zip(&old[..count as usize]).map(change));
            self.bytes += now.len() as u64;
            (first, old, bytes) = (first + count, &old[count as usize..], later);
        }
        Ok(())
    }
}

fn differ(before: Run, after: Run) -> bool {
    before.source != after.source && !(before.source.is_zero() && after.source.is_zero())
}
