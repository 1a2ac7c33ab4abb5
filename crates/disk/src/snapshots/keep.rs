//! Which snapshots to keep, by rules such as `daily=7,weekly=4`.
//!
//! A rule keeps the newest snapshot of each of the last so many hours, days, weeks (from Monday), months or years *that have
//! one*, in UTC; `last=N` keeps the N newest. What one rule keeps is kept. So a disk that was not used for a month keeps its
//! history, and a rule added later finds what is there.
//!
//! Snapshots of a disk have an order of their own, which decides where their times contradict it.
//!
//! Pure: instants in, decisions out. Deleting asks here first, and never deletes what has no name or no time.

use std::fmt;
use std::str::FromStr;

use vmstrata_types::time::date;

/// One kind of rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Period {
    /// Every snapshot is a period of its own.
    Last,
    Hour,
    Day,
    Week,
    Month,
    Year,
}

const PERIODS: [(&str, Period); 6] = [
    ("last", Period::Last),
    ("hourly", Period::Hour),
    ("daily", Period::Day),
    ("weekly", Period::Week),
    ("monthly", Period::Month),
    ("yearly", Period::Year),
];

const NS_PER_HOUR: u64 = 3_600_000_000_000;
/// 1970-01-01 was a Thursday: Monday is three days before.
const DAYS_SINCE_MONDAY: u64 = 3;

impl Period {
    /// The number of the period that an instant lies in.
    fn of(self, taken_ns: u64) -> u64 {
        let day = taken_ns / NS_PER_HOUR / 24;
        match self {
            Self::Last => taken_ns,
            Self::Hour => taken_ns / NS_PER_HOUR,
            Self::Day => day,
            Self::Week => (day + DAYS_SINCE_MONDAY) / 7,
            Self::Month => {
                let [year, month, _] = date(day);
                year * 12 + month
            }
            Self::Year => date(day)[0],
        }
    }
}

/// Rules for what to keep; see the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// At least one, each period once.
    rules: Vec<(Period, u32)>,
}

/// Why a text is no [`Keep`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// Nothing is to be kept: that is not what anybody means.
    #[error("name at least one rule, such as daily=7,weekly=4")]
    Empty,
    /// A part that is no rule.
    #[error("'{0}' is no rule: last, hourly, daily, weekly, monthly or yearly, '=' and a number from 1 on")]
    Rule(String),
    /// Two rules for one period.
    #[error("'{0}' is named twice")]
    Twice(String),
}

impl FromStr for Keep {
    type Err = KeepError;

    fn from_str(text: &str) -> Result<Self, KeepError> {
        let mut rules: Vec<(Period, u32)> = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let rule = part.split_once('=').and_then(|(name, count)| {
                let (_, period) = PERIODS.iter().find(|(known, _)| *known == name)?;
                Some((*period, count.parse().ok().filter(|count| *count > 0)?))
            });
            let Some((period, count)) = rule else { return Err(KeepError::Rule(part.to_owned())) };
            if rules.iter().any(|(known, _)| *known == period) {
                return Err(KeepError::Twice(part.to_owned()));
            }
            rules.push((period, count));
        }
        if rules.is_empty() { Err(KeepError::Empty) } else { Ok(Self { rules }) }
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (period, count)) in self.rules.iter().enumerate() {
            let name = PERIODS.iter().find(|(_, known)| known == period).map_or("", |(name, _)| name);
            write!(f, "{}{name}={count}", if place == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// The instants, newest first, none later than the one before it, the first none later than `now_ns`.
pub(super) fn no_later_than(taken_ns: &[u64], now_ns: u64) -> impl Iterator<Item = u64> {
    taken_ns.iter().scan(now_ns, |newer, &taken| {
        *newer = taken.min(*newer);
        Some(*newer)
    })
}

impl Keep {
    /// Whether to keep each of the snapshots taken at these instants (ns since 1970), in any order. Of several at one
    /// instant the first counts as the newest.
    pub fn decide(&self, taken_ns: &[u64]) -> Vec<bool> {
        let mut newest_first: Vec<usize> = (0..taken_ns.len()).collect();
        newest_first.sort_by_key(|&index| std::cmp::Reverse(taken_ns[index]));
        self.decide_of(taken_ns, &newest_first)
    }

    /// As [`Keep::decide`], of what is known to be in order, the newest first. None can have been taken after `now_ns`, nor after
    /// one that is newer: then the clock was wrong, and it counts as taken at that moment. So the newest is always kept.
    pub fn decide_in_order(&self, taken_ns: &[u64], now_ns: u64) -> Vec<bool> {
        let sound: Vec<u64> = no_later_than(taken_ns, now_ns).collect();
        self.decide_of(&sound, &(0..sound.len()).collect::<Vec<_>>())
    }

    fn decide_of(&self, taken_ns: &[u64], newest_first: &[usize]) -> Vec<bool> {
        let mut kept = vec![false; taken_ns.len()];
        for &(period, count) in &self.rules {
            let mut left = count;
            let mut last = None;
            for &index in newest_first {
                let this = period.of(taken_ns[index]);
                let is_new = period == Period::Last || last != Some(this);
                if left > 0 && is_new {
                    kept[index] = true;
                    left -= 1;
                }
                last = Some(this);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: u64 = NS_PER_HOUR;
    const DAY: u64 = 24 * HOUR;

    fn keep(text: &str, taken: &[u64]) -> Vec<usize> {
        let kept = text.parse::<Keep>().unwrap().decide(taken);
        (0..taken.len()).filter(|&index| kept[index]).collect()
    }

    #[test]
    fn the_newest_of_each_period_is_kept() {
        let taken: Vec<u64> = (0..10).map(|step| 1000 * DAY + step * 8 * HOUR).collect();
        assert_eq!(keep("last=2", &taken), [8, 9]);
        assert_eq!(keep("daily=2", &taken), [8, 9]);
        assert_eq!(keep("daily=3", &taken), [5, 8, 9]);
        assert_eq!(keep("hourly=3,daily=3", &taken), [5, 7, 8, 9]);
        assert_eq!(keep("yearly=5", &taken), [9]);
    }

    #[test]
    fn periods_without_a_snapshot_do_not_count() {
        let taken = [10 * DAY, 200 * DAY, 201 * DAY, 900 * DAY];
        assert_eq!(keep("daily=3", &taken), [1, 2, 3]);
        assert_eq!(keep("yearly=2", &taken), [2, 3]);
    }

    #[test]
    fn weeks_begin_on_monday_and_months_on_the_first() {
        // 2026-11-22 is a Sunday, 2026-11-23 a Monday; the numbers are days since 1970.
        let [sunday, monday] = [20_779 * DAY, 20_780 * DAY];
        assert_eq!(keep("weekly=1", &[sunday, monday]), [1]);
        assert_eq!(keep("weekly=2", &[sunday - DAY, sunday, monday, monday + 6 * DAY]), [1, 3]);
        // 2024-02-28, 2024-02-29, 2024-03-01, 2024-12-31, 2025-01-01.
        let days = [19_781, 19_782, 19_783, 20_088, 20_089].map(|day| day * DAY);
        assert_eq!(keep("monthly=9", &days), [1, 2, 3, 4]);
        assert_eq!(keep("yearly=9", &days), [3, 4]);
    }

    #[test]
    fn rules_read_back_and_nonsense_is_refused() {
        let keep: Keep = "last=3,hourly=24,daily=7,weekly=4,monthly=12,yearly=2".parse().unwrap();
        assert_eq!(keep.to_string().parse::<Keep>().unwrap(), keep);
        for (text, words) in [
            ("", "at least one"),
            ("daily", "no rule"),
            ("daily=0", "no rule"),
            ("daily=-1", "no rule"),
            ("often=3", "'often=3' is no rule"),
            ("daily=1,daily=2", "twice"),
        ] {
            let error = text.parse::<Keep>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    /// Two that were taken while the clock was three years ahead stay behind those that came after.
    #[test]
    fn a_clock_in_the_future_does_not_make_what_is_older_the_newest() {
        let (now, ahead) = (20_000 * DAY, 1095 * DAY);
        let in_order =
            |rules: &str, taken: &[u64]| rules.parse::<Keep>().unwrap().decide_in_order(taken, now);
        let taken = [now - HOUR, now - 2 * HOUR, now + ahead, now + ahead - HOUR, now - 3 * DAY];
        assert_eq!(in_order("last=2", &taken), [true, true, false, false, false]);
        assert_eq!(in_order("daily=2", &taken), [true, false, false, false, true]);
        // Nothing newer yet: it is the newest, taken just now.
        assert_eq!(in_order("hourly=1", &taken[2..]), [true, false, false]);
    }

    proptest! {
        /// However wrong the clocks were, the newest is kept; where they were right, order says nothing new.
        #[test]
        fn the_newest_of_a_chain_is_always_kept(
            mut taken in prop::collection::vec(0u64..3000 * DAY, 1..40),
            counts in prop::array::uniform3(1u32..6),
        ) {
            let keep: Keep = format!("last={},daily={},yearly={}", counts[0], counts[1], counts[2]).parse().unwrap();
            prop_assert!(keep.decide_in_order(&taken, 1000 * DAY)[0]);
            taken.sort_unstable_by(|one, other| other.cmp(one));
            prop_assert_eq!(keep.decide_in_order(&taken, 3000 * DAY), keep.decide(&taken));
        }

        /// Deciding again over what was kept changes nothing, the newest is always kept, and order does not matter.
        #[test]
        fn pruning_twice_is_pruning_once(
            mut taken in prop::collection::vec(0u64..3000 * DAY, 1..60),
            counts in prop::array::uniform3(1u32..6),
        ) {
            let keep: Keep = format!("last={},daily={},monthly={}", counts[0], counts[1], counts[2]).parse().unwrap();
            let of = |taken: &[u64]| {
                let kept = keep.decide(taken);
                let mut left: Vec<u64> = (0..taken.len()).filter(|&at| kept[at]).map(|at| taken[at]).collect();
                left.sort_unstable();
                left
            };
            let once = of(&taken);
            prop_assert_eq!(of(&once), once.clone());
            prop_assert!(once.contains(taken.iter().max().unwrap()));
            taken.reverse();
            prop_assert_eq!(of(&taken), once);
        }
    }
}
