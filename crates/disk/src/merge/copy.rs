//! Copying up what the target would lose.
//!
//! ```text
//!   cluster of the target ──► has an entry of its own? ──yes──► nothing to do
//!            │ no
//!            ├──► map of all layers below ───────────────┐
//!            └──► map of those that stay ──► the same? ──┴─no──► copy what the first says
//! ```
//!
//! The two maps number the layers that stay alike, so "the same" is: the same place in the same layer, or zeros in both.

use vmstrata_qcow2::L2Entry;
use vmstrata_qcow2::entry::{COPIED, ZERO_FLAG};
use vmstrata_types::{GuestOffset, GuestRange};

use crate::active::{Active, Change};
use crate::error::Result;
use crate::layers::{Layers, Top};
use crate::map::{FrozenMap, Run, Source};

/// Most bytes copied while the target's page is locked.
const RUN_BYTES: u64 = 256 << 10;
/// Zero clusters exist since this version.
const ZEROS_SINCE: u32 = 3;

/// What the target must get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Zeros,
    Data,
}

impl Layers {
    /// Copies into the active layer what lies below its clusters in `range` and reads otherwise in `after`; `None` is no
    /// layers at all. Returns the bytes written.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write: part of it may have been copied.
    ///
    /// # Panics
    /// Without an active layer that has clusters.
    pub(crate) fn pull_up(&self, range: GuestRange, after: Option<&FrozenMap>) -> Result<u64> {
        let active = self.target();
        let mut at = range.start;
        let mut copied = 0;
        while let Some((first, count, need)) = self.next_run(active, at, range.end(), after)? {
            let (passed, bytes) = self.pull_run(active, first, count, need)?;
            copied += bytes;
            at = GuestOffset::new((first + passed) << active.tables.geometry.cluster_bits.get());
        }
        Ok(copied)
    }

    /// The bytes that [`Layers::pull_up`] would write now.
    ///
    /// # Errors
    /// A layer that cannot be read.
    ///
    /// # Panics
    /// As [`Layers::pull_up`].
    pub(crate) fn demand(&self, range: GuestRange, after: Option<&FrozenMap>) -> Result<u64> {
        let active = self.target();
        let bits = active.tables.geometry.cluster_bits;
        let mut at = range.start;
        let mut clusters = 0;
        while let Some((first, count, need)) = self.next_run(active, at, range.end(), after)? {
            if need == Need::Data {
                let page = active.lock_page(first);
                for cluster in first..first + count {
                    let raw = self.whole_entry(active, cluster, &page)?;
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
        after: Option<&FrozenMap>,
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
    fn both(&self, at: GuestOffset, len: u64, after: Option<&FrozenMap>) -> Result<(Run, Run)> {
        let before = self.locate_below(at, len)?;
        let after = match after {
            Some(map) => map.locate(at, before.len)?,
            None => Run { source: Source::Hole, len: before.len },
        };
        Ok((before, after))
    }

    /// The first place from `at` on where the maps differ.
    fn next_difference(
        &self,
        mut at: GuestOffset,
        end: u64,
        map: Option<&FrozenMap>,
    ) -> Result<Option<GuestOffset>> {
        while at.get() < end {
            let (before, after) = self.both(at, end - at.get(), map)?;
            if differ(before, after) {
                return Ok(Some(at));
            }
            at = at + before.len.min(after.len);
        }
        Ok(None)
    }

    fn need(&self, active: &Active, cluster: u64, map: Option<&FrozenMap>) -> Result<Need> {
        let bits = active.tables.geometry.cluster_bits;
        let mut at = GuestOffset::new(cluster << bits.get());
        let end = (at + bits.size()).get().min(self.size);
        let (mut differs, mut zeros) = (false, true);
        while at.get() < end {
            let (before, after) = self.both(at, end - at.get(), map)?;
            differs |= differ(before, after);
            zeros &= before.source.is_zero();
            at = at + before.len.min(after.len);
        }
        Ok(match (differs, zeros) {
            (false, _) => Need::Nothing,
            (true, true) if active.tables.version >= ZEROS_SINCE => Need::Zeros,
            (true, _) => Need::Data,
        })
    }

    /// Gives the first of `count` clusters that have no entry what they need; returns how many clusters are done with, and
    /// the bytes written.
    fn pull_run(&self, active: &Active, first: u64, count: u64, need: Need) -> Result<(u64, u64)> {
        let page = active.lock_page(first);
        let mut old: Vec<u64> = Vec::new();
        for cluster in first..first + count {
            let raw = self.whole_entry(active, cluster, &page)?;
            if active.decode(raw)? != L2Entry::Unallocated {
                break;
            }
            old.push(raw);
        }
        if old.is_empty() || need == Need::Nothing {
            return Ok((old.len().max(1) as u64, 0));
        }
        let in_file = |error: crate::Error| error.in_file(&active.path);
        active.ensure_table(first).map_err(in_file)?;
        let bits = active.tables.geometry.cluster_bits;
        let change =
            |number: usize, new: u64| Change { cluster: first + number as u64, old: old[number], new };
        if need == Need::Zeros {
            let changes: Vec<Change> = (0..old.len()).map(|number| change(number, ZERO_FLAG)).collect();
            active.publish(&changes, &[], &page).map_err(in_file)?;
            return Ok((old.len() as u64, 0));
        }
        let space = active.allocate(old.len() as u64)?;
        let (passed, bytes) = (space.clusters, space.clusters << bits.get());
        self.copy_below(active, GuestOffset::new(first << bits.get()), space.at, bytes)?;
        let place = |number: usize| (space.at + ((number as u64) << bits.get())).get() | COPIED;
        let changes: Vec<Change> =
            (0..space.clusters as usize).map(|number| change(number, place(number))).collect();
        active.publish(&changes, &[], &page).map_err(in_file)?;
        space.keep();
        Ok((passed, bytes))
    }
}

fn differ(before: Run, after: Run) -> bool {
    before.source != after.source && !(before.source.is_zero() && after.source.is_zero())
}
