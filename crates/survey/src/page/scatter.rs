//! Scatter plots: things by two figures; what would lie on one spot is one disc, its area as large as it counts.

use std::collections::BTreeMap;

use super::plot::Plot;
use crate::human::counted;

/// Points closer than this on the drawing are drawn as one; it bounds the page whatever is surveyed.
const SPOT: f64 = 8.0;
const RADIUS_MIN: f64 = 3.0;
const RADIUS_MAX: f64 = 13.0;

/// A thing to be drawn.
pub(super) struct Point<'a> {
    pub(super) x: f64,
    pub(super) y: f64,
    /// How many it stands for.
    pub(super) count: u64,
    /// One of them, by name; empty where they have none.
    pub(super) name: &'a str,
}

/// Draws the points; `says` tells of a spot's figures, to which its count and an example are added. Returns what the largest
/// disc stands for, in words.
pub(super) fn draw<'a>(
    plot: &mut Plot,
    class: &str,
    noun: &str,
    points: impl Iterator<Item = Point<'a>>,
    says: impl Fn(f64, f64, u64) -> String,
) -> String {
    let mut spots: BTreeMap<(i64, i64), Point<'a>> = BTreeMap::new();
    for point in points {
        let (x, y) = plot.place(point.x, point.y);
        let count = point.count;
        let spot = spots.entry(((x / SPOT) as i64, (y / SPOT) as i64));
        spot.and_modify(|spot| spot.count += count).or_insert(point);
    }
    let most = spots.values().map(|spot| spot.count).max().unwrap_or(1) as f64;
    // Large ones first, so that small ones lie on top and can be pointed at.
    let mut spots: Vec<Point<'a>> = spots.into_values().collect();
    spots.sort_by_key(|spot| std::cmp::Reverse(spot.count));
    for spot in spots {
        let share = (spot.count as f64 / most).sqrt();
        // A plot of single things has no large discs.
        let radius =
            if most < 2.0 { RADIUS_MIN + 1.0 } else { RADIUS_MIN + (RADIUS_MAX - RADIUS_MIN) * share };
        let text = format!("{}: {}", counted(spot.count as f64, noun), says(spot.x, spot.y, spot.count));
        let name = if spot.count == 1 { spot.name.to_owned() } else { format!("such as {}", spot.name) };
        let lines = [text.as_str(), name.as_str()];
        let lines = if spot.name.is_empty() { &lines[..1] } else { &lines[..] };
        plot.disc(&format!("dot {class}"), plot.place(spot.x, spot.y), radius, lines);
    }
    format!("The largest disc is {}.", counted(most, noun))
}
