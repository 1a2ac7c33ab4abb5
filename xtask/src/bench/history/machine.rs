//! What the machine itself did while a guest worked, in the guest's time.

use std::time::Duration;

use super::super::distance::{Distance, Distances};
use super::super::results::median;
use super::super::stalls::{Stall, Stalls};
use super::guest::Guest;

/// Two processors that are as far apart as before differ by less than this from one second to the next; where they came to
/// share a cache, or no longer do, it is four times as far.
const MOVED: f64 = 1.25;

/// Someone who looks.
#[derive(Debug)]
pub(super) struct Watch {
    stalls: Option<Stalls>,
    distances: Option<Distances>,
}

impl Watch {
    /// Begins to look at what can be seen here.
    pub(super) fn begin() -> Self {
        let cannot = |what: &str, error: &_| eprintln!("cannot tell {what}: {error}");
        let stalls = Stalls::watch().inspect_err(|error| cannot("when the machine stands still", error));
        let distances = Distances::watch().inspect_err(|error| cannot("when its processors move", error));
        Self { stalls: stalls.ok(), distances: distances.ok() }
    }
}

/// What was seen of it.
#[derive(Debug)]
pub(super) struct Machine {
    /// From when to when it stood still; `None` where that cannot be told.
    stalls: Option<Vec<(Duration, Duration)>>,
    /// When, and how far apart two of its processors were; `None` where that cannot be told.
    distances: Option<Vec<(Duration, Duration)>>,
}

impl Machine {
    /// Nothing yet.
    pub(super) fn unseen() -> Self {
        Self { stalls: Some(Vec::new()), distances: Some(Vec::new()) }
    }

    /// Ends a watch, and adds what it saw.
    pub(super) fn add(&mut self, watch: Watch, guest: &Guest) {
        let stall = |stall: Stall| (guest.time_of(stall.from), guest.time_of(stall.to));
        let distance = |one: Distance| (guest.time_of(one.at), one.round_trip);
        add(&mut self.stalls, watch.stalls.map(|stalls| stalls.end().into_iter().map(stall)));
        add(&mut self.distances, watch.distances.map(|seen| seen.end().into_iter().map(distance)));
    }

    /// Whether it can be told when the machine stood still.
    pub(super) fn is_known(&self) -> bool {
        self.stalls.is_some()
    }

    /// Whether the machine is known not to have stood still.
    pub(super) fn ran(&self, from: Duration, to: Duration) -> bool {
        let within = |stall: &(Duration, Duration)| stall.0 < to && stall.1 > from;
        self.stalls.as_ref().is_some_and(|stalls| !stalls.iter().any(within))
    }

    /// Whether its processors were as far apart in the `second` after as in the one before, as far as can be told.
    pub(super) fn stayed(&self, at: Duration, second: Duration) -> bool {
        let Some(distances) = &self.distances else { return true };
        let usual = |from: Duration, to: Duration| {
            let within = distances.iter().filter(|(when, _)| (from..to).contains(when));
            let seen: Vec<f64> = within.map(|(_, distance)| distance.as_secs_f64()).collect();
            (!seen.is_empty()).then(|| median(&seen))
        };
        let both = usual(at.saturating_sub(second), at).zip(usual(at, at + second));
        both.is_some_and(|(before, after)| before.max(after) < MOVED * before.min(after))
    }
}

/// Adds what was seen; from where on it cannot be told, nothing is known at all.
fn add<T>(all: &mut Option<Vec<T>>, seen: Option<impl Iterator<Item = T>>) {
    *all = all.take().zip(seen).map(|(all, seen)| all.into_iter().chain(seen).collect());
}

#[cfg(test)]
impl Machine {
    /// One that stood still once, for a moment.
    pub(super) fn stalled(at: Duration) -> Self {
        Self { stalls: Some(vec![(at, at + Duration::from_millis(4))]), distances: None }
    }

    /// One whose processors were so far apart, in nanoseconds, in each second.
    pub(super) fn of_distances(distances: &[u64]) -> Self {
        let middle = |index: u32| Duration::from_secs(1) * index + Duration::from_millis(500);
        let seen = distances.iter().zip(0..);
        let seen = seen.map(|(distance, index)| (middle(index), Duration::from_nanos(*distance)));
        Self { stalls: Some(Vec::new()), distances: Some(seen.collect()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_stall_counts_where_it_was() {
        let machine = Machine::stalled(2 * SECOND);
        assert!(machine.ran(SECOND, 2 * SECOND) && machine.ran(3 * SECOND, 4 * SECOND));
        assert!(!machine.ran(SECOND, 2 * SECOND + Duration::from_millis(1)));
        assert!(!machine.ran(2 * SECOND + Duration::from_millis(3), 3 * SECOND));
    }

    #[test]
    fn processors_that_come_to_share_a_cache_have_moved() {
        let machine = Machine::of_distances(&[360, 380, 90, 100, 400]);
        let stayed: Vec<bool> = (1..5).map(|second| machine.stayed(second * SECOND, SECOND)).collect();
        assert_eq!(stayed, [true, false, true, false]);
        assert!(!machine.stayed(5 * SECOND, SECOND), "nothing was seen after");
    }

    #[test]
    fn what_cannot_be_told_once_is_not_known() {
        let mut seen = Some(vec![1]);
        add(&mut seen, Some([2].into_iter()));
        assert_eq!(seen, Some(vec![1, 2]));
        add(&mut seen, None::<std::iter::Empty<i32>>);
        add(&mut seen, Some([3].into_iter()));
        assert_eq!(seen, None);
    }
}
