//! Axes: from a value to a place, and which values are marked.

use crate::human;

/// How values are spread along an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Spread {
    /// Evenly.
    Linear,
    /// By their logarithm; values start above 0.
    Log,
    /// By the logarithm of one more: for counts that may be 0.
    LogFromZero,
}

impl Spread {
    fn of(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log => value.max(f64::MIN_POSITIVE).ln(),
            Self::LogFromZero => value.max(0.0).ln_1p(),
        }
    }
}

/// An axis with its marks.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) label: &'static str,
    spread: Spread,
    min: f64,
    max: f64,
    /// Values with their labels, ascending.
    pub(super) ticks: Vec<(f64, String)>,
}

/// Marks that fit an axis.
const TICKS_MAX: usize = 9;

const DAY: f64 = 86_400.0;
/// Between marks of times, in seconds.
const TIME_STEPS: [f64; 12] = [
    600.0,
    3600.0,
    3.0 * 3600.0,
    6.0 * 3600.0,
    12.0 * 3600.0,
    DAY,
    2.0 * DAY,
    7.0 * DAY,
    14.0 * DAY,
    30.0 * DAY,
    91.0 * DAY,
    365.0 * DAY,
];

impl Axis {
    /// Shares from 0 to 100 %.
    pub(super) fn percent(label: &'static str) -> Self {
        let ticks = [0.0, 25.0, 50.0, 75.0, 100.0].map(|share| (share, format!("{share:.0} %")));
        Self { label, spread: Spread::Linear, min: 0.0, max: 100.0, ticks: ticks.to_vec() }
    }

    /// Sizes in bytes, logarithmic, marked at powers of two; those of 0 stand at the lower end.
    pub(super) fn bytes(label: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = span(values.filter(|value| *value > 0.0), (4096.0, (1u64 << 30) as f64));
        let (low, high) = (low.log2().floor(), high.log2().ceil().max(low.log2().floor() + 2.0));
        let step = [1.0, 2.0, 3.0, 5.0, 10.0]
            .into_iter()
            .find(|step| (high - low) / step <= TICKS_MAX as f64 - 1.0)
            .unwrap_or(10.0);
        let first = (low / step).ceil() as i32;
        let ticks = (first..)
            .map(|at| f64::from(at) * step)
            .take_while(|power| *power <= high)
            .map(|power| (power.exp2(), human::bytes(power.exp2())))
            .collect();
        Self { label, spread: Spread::Log, min: low.exp2(), max: high.exp2(), ticks }
    }

    /// Counts, logarithmic, marked at 1, 2, 5, 10, ...; with 0 on it if a value is.
    pub(super) fn counts(label: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = span(values, (1.0, 10.0));
        let spread = if low < 1.0 { Spread::LogFromZero } else { Spread::Log };
        let low = if low < 1.0 { 0.0 } else { round_number(low, f64::floor) };
        let high = round_number(high.max(low + 1.0), f64::ceil);
        Self { label, spread, min: low, max: high, ticks: count_ticks(low, high) }
    }

    /// Named steps, one above the other.
    pub(super) fn steps(label: &'static str, names: impl Iterator<Item = &'static str>) -> Self {
        let ticks: Vec<_> = names.enumerate().map(|(at, name)| (at as f64, name.to_owned())).collect();
        Self { label, spread: Spread::Linear, min: -0.5, max: ticks.len() as f64 - 0.5, ticks }
    }

    /// Moments, in seconds since 1970.
    pub(super) fn times(label: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = span(values, (0.0, DAY));
        // At least an hour, so that there is something to mark.
        let (low, high) = (low.min(high - 3600.0), high);
        let fits = |step: &&f64| (high - low) / **step <= TICKS_MAX as f64 - 1.0;
        let step = TIME_STEPS.iter().find(fits).copied().unwrap_or(((high - low) / 8.0 / DAY).ceil() * DAY);
        let label_of = |at: f64| {
            let text = super::utc(at as u64);
            // `2026-11-21`, or `11-21 23:00` where days are too far apart.
            if step < DAY { text[5..16].to_owned() } else { text[..10].to_owned() }
        };
        let first = (low / step).ceil() as u64;
        let ticks = (first..)
            .map(|at| at as f64 * step)
            .take_while(|at| *at <= high)
            .map(|at| (at, label_of(at)))
            .collect();
        Self { label, spread: Spread::Linear, min: low, max: high, ticks }
    }

    /// Where `value` lies, from 0 at the lower end to 1 at the upper.
    pub(super) fn place(&self, value: f64) -> f64 {
        let (min, max) = (self.spread.of(self.min), self.spread.of(self.max));
        ((self.spread.of(value) - min) / (max - min)).clamp(0.0, 1.0)
    }

    /// The lower end.
    pub(super) fn min(&self) -> f64 {
        self.min
    }

    /// The upper end.
    pub(super) fn max(&self) -> f64 {
        self.max
    }
}

fn span(values: impl Iterator<Item = f64>, without: (f64, f64)) -> (f64, f64) {
    values
        .fold(None, |span: Option<(f64, f64)>, value| {
            Some(span.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
        })
        .unwrap_or(without)
}

/// The next of 1, 2, 5, 10, ... in the direction that `round` rounds to.
fn round_number(value: f64, round: fn(f64) -> f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let digit = value / power;
    let up = round(0.5) == 1.0;
    let found = if up {
        steps.into_iter().find(|step| *step >= digit - 1e-9)
    } else {
        steps.into_iter().rev().find(|step| *step <= digit + 1e-9)
    };
    found.unwrap_or(1.0) * power
}

fn count_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let decades = || (0..19).map(|power| 10f64.powi(power));
    let within = |value: &f64| *value >= low && *value <= high;
    let fine: Vec<f64> =
        decades().flat_map(|power| [power, 2.0 * power, 5.0 * power]).filter(within).collect();
    let values = if fine.len() <= TICKS_MAX { fine } else { decades().filter(within).collect() };
    let zero = (low == 0.0).then_some(0.0);
    zero.into_iter().chain(values).map(|value| (value, human::count(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_lie_on_the_axis_in_order_and_are_few() {
        for values in [&[1.0][..], &[1.0, 2.0], &[0.0, 1000.0], &[3.0, 70_000.0], &[0.0], &[1e6, 1e7], &[]] {
            let counts = Axis::counts("n", values.iter().copied());
            let bytes = Axis::bytes("b", values.iter().map(|value| value * 4096.0));
            for axis in [counts, bytes] {
                assert!((2..=12).contains(&axis.ticks.len()), "{values:?}: {axis:?}");
                assert!(
                    axis.ticks.is_sorted_by(|a, b| axis.place(a.0) < axis.place(b.0)),
                    "{values:?}: {axis:?}"
                );
                assert!(values.iter().all(|value| (0.0..=1.0).contains(&axis.place(*value))));
                assert!(axis.min() < axis.max());
            }
        }
    }

    #[test]
    fn times_are_marked_by_what_tells_them_apart() {
        let day = 1_795_302_119.0 - 1_795_302_119.0 % DAY;
        let axis = |len: f64| Axis::times("t", [day, day + len].into_iter());
        assert_eq!(labels(&axis(2.0 * DAY))[..2], ["11-21 00:00", "11-21 06:00"]);
        assert_eq!(labels(&axis(6.0 * DAY))[..2], ["2026-11-21", "2026-11-22"]);
        for len in [0.0, 1.0, 3600.0, 40.0 * DAY, 400.0 * DAY, 20_000.0 * DAY] {
            let axis = axis(len);
            assert!((2..=10).contains(&axis.ticks.len()), "{len}: {axis:?}");
            assert!(
                axis.ticks.iter().all(|(at, _)| (axis.min()..=axis.max()).contains(at)),
                "{len}: {axis:?}"
            );
        }
        assert_eq!(Axis::times("t", [5.0].into_iter()).place(5.0), 1.0);
    }

    #[test]
    fn counts_are_marked_at_round_numbers() {
        assert_eq!(labels(&Axis::counts("n", [1.0, 30.0].into_iter())), ["1", "2", "5", "10", "20", "50"]);
        assert_eq!(labels(&Axis::counts("n", [0.0, 4.0].into_iter())), ["0", "1", "2", "5"]);
        let wide = Axis::counts("n", [1.0, 90_000.0].into_iter());
        assert_eq!(labels(&wide), ["1", "10", "100", "1,000", "10,000", "100,000"]);
    }

    #[test]
    fn a_logarithmic_axis_spreads_by_ratio() {
        let axis = Axis::counts("n", [1.0, 100.0].into_iter());
        assert!((axis.place(10.0) - 0.5).abs() < 1e-9);
        assert_eq!((axis.place(0.0), axis.place(1e9)), (0.0, 1.0));
        let bytes = Axis::bytes("b", [65536.0, (1u64 << 40) as f64].into_iter());
        assert!(labels(&bytes).contains(&"1 GiB"), "{bytes:?}");
    }
}
