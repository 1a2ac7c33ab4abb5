//! From what the two states' layers say of a region to what changed in it.

use std::sync::Arc;

use vmstrata_disk::{Disk, Result};
use vmstrata_types::{GuestOffset, GuestRange};

use super::region::{Reader, Said, region_end};
use super::{Diff, DiffExtent, DiffKind, Found, Search};

/// Runs of the common part asked for at a time.
const BATCH: usize = 1024;

/// What may have changed, in order; ends with the first error.
pub struct DiffExtents {
    diff: Diff,
    old: Reader,
    new: Reader,
    /// Guest offsets at which a layer ends, sorted.
    ends: Vec<u64>,
    at: GuestOffset,
    found: Found,
    /// The common part as a disk, once something depends on what it holds.
    below: Option<Arc<Disk>>,
}

impl std::fmt::Debug for DiffExtents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiffExtents")
            .field("at", &self.at)
            .field("found", &self.found)
            .finish_non_exhaustive()
    }
}

impl DiffExtents {
    pub(super) fn new(diff: Diff) -> Self {
        let states = &diff.states;
        let mut ends = vec![states.new.size];
        for side in [&states.old, &states.new] {
            ends.push(side.common_end);
            ends.extend(side.layers.iter().map(|visible| visible.end));
        }
        ends.sort_unstable();
        ends.dedup();
        Self {
            old: Reader::new(&states.old),
            new: Reader::new(&states.new),
            diff,
            ends,
            at: GuestOffset::ZERO,
            found: Found::default(),
            below: None,
        }
    }

    /// Finds what changed in a region that no layer's end divides; `shows` says for which state the common part counts.
    fn look(&mut self, region: GuestRange, shows: [bool; 2]) -> Result<()> {
        let unit = self.diff.states.unit;
        let (old, new) = (self.old.read(region, unit)?, self.new.read(region, unit)?);
        let mut runs: Vec<(u64, Said, Said)> = Vec::new();
        let first = region.start.align_down(unit);
        for (number, (&old, &new)) in old.iter().zip(new).enumerate() {
            if runs.last().is_none_or(|&(_, o, n)| (o, n) != (old, new)) {
                runs.push((first.get() + ((number as u64) << unit.get()), old, new));
            }
        }
        let ends: Vec<u64> = runs.iter().skip(1).map(|run| run.0).chain([region.end().get()]).collect();
        for ((start, old, new), end) in runs.into_iter().zip(ends) {
            let start = GuestOffset::new(start).max(region.start);
            self.classify(GuestRange::new(start, end - start.get()), old, new, shows)?;
        }
        Ok(())
    }

    /// Decides about a run of which each state's layers say one thing.
    fn classify(&mut self, range: GuestRange, old: Said, new: Said, shows: [bool; 2]) -> Result<()> {
        let reads_zero = |said: Said, shows: bool| said == Said::Zero || said == Said::Nothing && !shows;
        let all = self.diff.options.allocation;
        let [old_shows, new_shows] = shows;
        if old == Said::Nothing && new == Said::Nothing && old_shows == new_shows {
            return Ok(());
        }
        match (old, new) {
            (_, Said::Data) => self.put(range, DiffKind::Data),
            (Said::Nothing, _) if old_shows && reads_zero(new, new_shows) => {
                self.by_common(range, |data| (data || all).then_some(DiffKind::Zero))?;
            }
            (_, Said::Nothing) if new_shows => {
                let was_zero = reads_zero(old, old_shows);
                self.by_common(range, |data| match data {
                    true => Some(DiffKind::Data),
                    false => (!was_zero || all).then_some(DiffKind::Zero),
                })?;
            }
            _ if reads_zero(old, old_shows) && !all => {}
            _ => self.put(range, DiffKind::Zero),
        }
        Ok(())
    }

    /// Decides by whether the common part has data.
    fn by_common(&mut self, range: GuestRange, decide: impl Fn(bool) -> Option<DiffKind>) -> Result<()> {
        let below = match &self.below {
            Some(below) => Arc::clone(below),
            None => Arc::clone(self.below.insert(self.diff.disk(&self.diff.states.common)?)),
        };
        let mut rest = range;
        while rest.len > 0 {
            let extents = below.extents(rest, BATCH)?;
            for extent in &extents {
                if let Some(kind) = decide(!extent.kind.reads_zero()) {
                    self.put(extent.range, kind);
                }
            }
            let next = extents.last().expect("a range that is not empty has an extent").range.end();
            rest = GuestRange::new(next, range.end() - next);
        }
        Ok(())
    }

    fn put(&mut self, range: GuestRange, kind: DiffKind) {
        self.found.push(DiffExtent { range, kind });
    }
}

impl Search for DiffExtents {
    /// Looks at the next region that may hold a change; false at the end.
    fn advance(&mut self) -> Result<bool> {
        let states = &self.diff.states;
        while self.at.get() < states.new.size {
            let next_end = self.ends[self.ends.partition_point(|&end| end <= self.at.get())];
            let shows = [&states.old, &states.new].map(|side| self.at.get() < side.common_end);
            let mut start = Some(self.at);
            if shows[0] == shows[1] {
                let tables = [self.old.next_table(self.at)?, self.new.next_table(self.at)?];
                start = tables.into_iter().flatten().min();
            }
            let Some(start) = start.filter(|start| start.get() < next_end) else {
                self.at = GuestOffset::new(next_end);
                continue;
            };
            let end = region_end(start, states.unit).min(next_end);
            self.look(GuestRange::new(start, end - start.get()), shows)?;
            self.at = GuestOffset::new(end);
            return Ok(true);
        }
        Ok(false)
    }

    fn found(&mut self) -> &mut Found {
        &mut self.found
    }
}

impl Iterator for DiffExtents {
    type Item = Result<DiffExtent>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_found()
    }
}
