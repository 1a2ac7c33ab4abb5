//! Cumulative distributions: which share of things is no larger than a value.

use super::axis::Axis;
use super::plot::{Ink, Plot};

/// Steps drawn at most; a curve of more is drawn through as many quantiles.
const STEPS_MAX: usize = 300;
/// Places along a curve that say their figures under the pointer.
const TOLD_MAX: usize = 40;

/// A series of a distribution.
pub(super) struct Series {
    pub(super) ink: Ink,
    pub(super) name: &'static str,
    pub(super) values: Vec<f64>,
}

/// What the values are, and how they are written.
pub(super) struct Quantity {
    pub(super) title: &'static str,
    pub(super) axis: fn(&[f64]) -> Axis,
    pub(super) show: fn(f64) -> String,
    pub(super) note: &'static str,
}

/// The figure of these series over one axis.
pub(super) fn figure(quantity: &Quantity, mut series: Vec<Series>) -> String {
    series.iter_mut().for_each(|series| series.values.sort_by(f64::total_cmp));
    series.retain(|series| !series.values.is_empty());
    let all: Vec<f64> = series.iter().flat_map(|series| series.values.iter().copied()).collect();
    let told: Vec<String> = series.iter().map(|series| tell(quantity, series)).collect();
    let mut plot = Plot::new(
        quantity.title,
        told.join(" "),
        (quantity.axis)(&all),
        Axis::percent("share of all, up to this value"),
    );
    for series in &series {
        draw(&mut plot, quantity, series);
    }
    plot.figure(quantity.note)
}

fn tell(quantity: &Quantity, series: &Series) -> String {
    let at = |share: f64| (quantity.show)(series.values[((series.values.len() - 1) as f64 * share) as usize]);
    format!("{}: median {}, largest {}.", series.name, at(0.5), at(1.0))
}

fn draw(plot: &mut Plot, quantity: &Quantity, series: &Series) {
    let steps = steps(&series.values, STEPS_MAX);
    let (axis, _) = plot.axes();
    let (low, high) = (axis.min(), axis.max());
    let mut points = vec![(low, 0.0)];
    let mut share = 0.0;
    for (value, reached) in &steps {
        points.extend([(*value, share), (*value, *reached)]);
        share = *reached;
    }
    points.push((high, 100.0));
    plot.line(series.ink.class(), &points);
    plot.name(series.ink, series.name);
    let every = steps.len().div_ceil(TOLD_MAX).max(1);
    for (value, reached) in steps.iter().step_by(every).chain(steps.last()) {
        let says = format!("{}: {reached:.1} % up to {}", series.name, (quantity.show)(*value));
        plot.disc(&format!("hit {}", series.ink.class()), plot.place(*value, *reached), 7.0, &[&says]);
    }
}

/// Values with the share in percent that is no larger, ascending; `steps_max` of them about, the last always.
fn steps(sorted: &[f64], steps_max: usize) -> Vec<(f64, f64)> {
    let every = sorted.len().div_ceil(steps_max).max(1);
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (at, value) in sorted.iter().enumerate() {
        let last_of_value = sorted.get(at + 1) != Some(value);
        if !last_of_value {
            continue;
        }
        let share = (at + 1) as f64 * 100.0 / sorted.len() as f64;
        let drawn = steps.last().map_or(0.0, |(_, share)| *share) * sorted.len() as f64 / 100.0;
        if (at + 1) as f64 - drawn >= every as f64 - 0.5 || at + 1 == sorted.len() {
            steps.push((*value, share));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_at_distinct_values_and_end_at_all() {
        assert_eq!(steps(&[1.0, 1.0, 2.0, 4.0], 300), [(1.0, 50.0), (2.0, 75.0), (4.0, 100.0)]);
        assert_eq!(steps(&[7.0], 300), [(7.0, 100.0)]);
    }

    #[test]
    fn a_curve_of_many_values_has_few_steps_that_all_are_true() {
        let values: Vec<f64> = (1..=100_000).map(f64::from).collect();
        let steps = steps(&values, 300);
        assert!(steps.len() <= 301, "{}", steps.len());
        assert_eq!(steps.last(), Some(&(100_000.0, 100.0)));
        assert!(steps.iter().all(|(value, share)| (value / 1000.0 - share).abs() < 1e-6));
    }
}
