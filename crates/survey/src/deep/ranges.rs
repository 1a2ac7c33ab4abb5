//! Sets of bytes as runs.

/// Runs `start..end`, ascending, none empty, none touching another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Adds a run that starts no earlier than the last one does.
    pub(super) fn push(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.1 >= start => last.1 = last.1.max(end),
            _ => self.0.push((start, end)),
        }
    }

    /// Runs.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// What is in either.
    pub(super) fn union(&self, other: &Self) -> Self {
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut all = Self::default();
        loop {
            let ours_first = match (ours.peek(), theirs.peek()) {
                (Some(a), Some(b)) => a.0 <= b.0,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => return all,
            };
            let (start, end) = if ours_first { ours.next() } else { theirs.next() }.expect("peeked at");
            all.push(*start, *end);
        }
    }

    /// What is in both.
    pub(super) fn intersection(&self, other: &Self) -> Self {
        let mut both = Self::default();
        let (mut at, mut there) = (0, 0);
        while let (Some(a), Some(b)) = (self.0.get(at), other.0.get(there)) {
            both.push(a.0.max(b.0), a.1.min(b.1));
            if a.1 <= b.1 { at += 1 } else { there += 1 }
        }
        both
    }

    /// Answers questions that come in ascending order.
    pub(super) fn follower(&self) -> Follower<'_> {
        Follower { runs: &self.0 }
    }
}

/// See [`Ranges::follower`].
pub(super) struct Follower<'a> {
    runs: &'a [(u64, u64)],
}

impl Follower<'_> {
    /// Whether all of `start..end` is in the set; `start` is no lower than in the question before.
    pub(super) fn covers(&mut self, start: u64, end: u64) -> bool {
        while let Some((run, rest)) = self.runs.split_first().filter(|(run, _)| run.1 <= start) {
            debug_assert!(run.0 < run.1, "no run is empty");
            self.runs = rest;
        }
        self.runs.first().is_some_and(|run| run.0 <= start && end <= run.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: u64 = 64;

    /// Runs out of the bits of a number, and back.
    fn of(bits: u64) -> Ranges {
        let mut ranges = Ranges::default();
        (0..SPACE).filter(|at| bits >> at & 1 == 1).for_each(|at| ranges.push(at, at + 1));
        ranges
    }

    /// Numbers that look random, from Knuth's generator.
    fn numbers() -> impl Iterator<Item = u64> {
        std::iter::successors(Some(1u64), |last| {
            Some(last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
        })
        .map(|state| state ^ state >> 29)
    }

    #[test]
    fn sets_behave_like_bits() {
        let numbers: Vec<u64> = numbers().take(400).chain([0, u64::MAX, 1, 1 << 63]).collect();
        for pair in numbers.windows(2) {
            let (a, b) = (pair[0] & pair[0] >> 1, pair[1]);
            assert_eq!(of(a).union(&of(b)), of(a | b), "{a:#x} {b:#x}");
            assert_eq!(of(a).intersection(&of(b)), of(a & b), "{a:#x} {b:#x}");
        }
    }

    #[test]
    fn a_follower_sees_what_is_covered_whole() {
        for bits in numbers().take(50) {
            let set = of(bits);
            for len in 1..6 {
                let mut follower = set.follower();
                for start in 0..SPACE - len {
                    let mask = ((1u64 << len) - 1) << start;
                    assert_eq!(
                        follower.covers(start, start + len),
                        bits & mask == mask,
                        "{bits:#x} {start} {len}"
                    );
                }
            }
        }
    }

    #[test]
    fn runs_that_touch_become_one() {
        let mut ranges = Ranges::default();
        for (start, end) in [(0, 4), (4, 8), (6, 7), (9, 9), (10, 12)] {
            ranges.push(start, end);
        }
        assert_eq!(ranges.0, [(0, 8), (10, 12)]);
        ranges.push(11, u64::MAX);
        assert_eq!(ranges.len(), 2);
    }
}
