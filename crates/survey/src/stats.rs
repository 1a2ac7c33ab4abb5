//! A few numbers that sum up many.

use serde::Serialize;

/// Count, mean and quantiles of a set of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// How many numbers there are; with none, the others are 0.
    pub count: u64,
    /// Their sum.
    pub total: f64,
    /// The lowest.
    pub min: f64,
    /// Half of them are no higher.
    pub p50: f64,
    /// Nine tenths of them are no higher.
    pub p90: f64,
    /// 99 of a hundred are no higher.
    pub p99: f64,
    /// The highest.
    pub max: f64,
}

impl Summary {
    /// Of these, in any order.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = numbers.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else { return Self::default() };
        // The nearest rank: always a number that is there.
        let quantile = |share: f64| sorted[((share * sorted.len() as f64).ceil() as usize).max(1) - 1];
        Self {
            count: sorted.len() as u64,
            total: sorted.iter().fold(0.0, |sum, one| sum + one),
            min,
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_numbers_that_are_there() {
        let summary = Summary::of((1..=100).rev().map(f64::from));
        assert_eq!(
            (summary.min, summary.p50, summary.p90, summary.p99, summary.max),
            (1.0, 50.0, 90.0, 99.0, 100.0)
        );
        assert_eq!((summary.count, summary.total), (100, 5050.0));
        assert_eq!(Summary::of([7.0]).p50, 7.0);
        assert_eq!(Summary::of([]), Summary::default());
    }
}
