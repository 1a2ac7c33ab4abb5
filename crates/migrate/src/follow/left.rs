//! What a move has not read yet.

use std::collections::BTreeMap;

use vmstrata_types::{GuestOffset, GuestRange};

/// Disjoint runs of bytes; neighbours are joined. Each operation takes O(log n) of the number of runs, beside the runs that it removes.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// End by start.
    runs: BTreeMap<u64, u64>,
    bytes: u64,
}

impl FromIterator<GuestRange> for Left {
    fn from_iter<I: IntoIterator<Item = GuestRange>>(ranges: I) -> Self {
        let mut left = Self::default();
        ranges.into_iter().for_each(|range| left.insert(range));
        left
    }
}

impl Left {
    /// Bytes in all runs.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of runs.
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Adds a range, of which parts may be there already.
    pub fn insert(&mut self, range: GuestRange) {
        if range.len == 0 {
            return;
        }
        self.remove(range);
        let (mut start, mut end) = (range.start.get(), range.end().get());
        self.bytes += range.len;
        if let Some(after) = self.runs.remove(&end) {
            end = after;
        }
        if let Some((&before, _)) =
            self.runs.range(..start).next_back().filter(|(_, touches)| **touches == start)
        {
            start = before;
        }
        self.runs.insert(start, end);
    }

    /// Takes a range out. Returns the bytes of it that were there.
    pub fn remove(&mut self, range: GuestRange) -> u64 {
        let (start, end) = (range.start.get(), range.end().get());
        let mut removed = 0;
        if range.len == 0 {
            return 0;
        }
        while let Some((&run, &run_end)) = self.runs.range(..end).next_back().filter(|(_, e)| **e > start) {
            self.runs.remove(&run);
            if run_end > end {
                self.runs.insert(end, run_end);
            }
            if run < start {
                self.runs.insert(run, start);
            }
            removed += run_end.min(end) - run.max(start);
        }
        self.bytes -= removed;
        removed
    }

    /// The first bytes at `at` or after it, up to the end of their run.
    pub fn after(&self, at: GuestOffset) -> Option<GuestRange> {
        let at = at.get();
        let holds =
            self.runs.range(..=at).next_back().filter(|(_, end)| **end > at).map(|(_, end)| (at, *end));
        let (start, end) =
            holds.or_else(|| self.runs.range(at..).next().map(|(start, end)| (*start, *end)))?;
        Some(GuestRange::new(GuestOffset::new(start), end - start))
    }

    /// The last bytes before `at`, from the beginning of their run.
    pub fn before(&self, at: GuestOffset) -> Option<GuestRange> {
        let (start, end) = self.runs.range(..at.get()).next_back()?;
        Some(GuestRange::new(GuestOffset::new(*start), (*end).min(at.get()) - start))
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    #[test]
    fn runs_are_what_a_map_of_bytes_says() {
        const SIZE: u64 = 300;
        let mut rng = SmallRng::seed_from_u64(1);
        let (mut left, mut bytes) = (Left::default(), vec![false; SIZE as usize]);
        for _ in 0..5000 {
            let start = rng.random_range(0..SIZE);
            let range =
                GuestRange::new(GuestOffset::new(start), rng.random_range(0..=(SIZE - start).min(40)));
            let of = &mut bytes[start as usize..range.end().get() as usize];
            if rng.random_bool(0.5) {
                assert_eq!(left.remove(range), of.iter().filter(|is| **is).count() as u64);
                of.fill(false);
            } else {
                left.insert(range);
                of.fill(true);
            }
            assert_eq!(left.bytes(), bytes.iter().filter(|is| **is).count() as u64);
            let runs = bytes.chunk_by(|a, b| a == b).filter(|run| run[0]).count();
            assert_eq!(left.runs(), runs);
            let at = rng.random_range(0..SIZE);
            let run = |from: usize| bytes[from..].iter().take_while(|is| **is).count() as u64;
            let after = (at as usize..SIZE as usize).find(|at| bytes[*at]);
            assert_eq!(
                left.after(GuestOffset::new(at)).map(|r| (r.start.get(), r.len)),
                after.map(|a| (a as u64, run(a)))
            );
            let before = (0..at as usize).rfind(|at| bytes[*at]);
            assert_eq!(
                left.before(GuestOffset::new(at)).map(|r| r.end().get() - 1),
                before.map(|b| b as u64)
            );
        }
    }
}
