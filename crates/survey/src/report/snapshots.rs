//! When snapshots were taken: the time from one link of a chain to the next, as Figure 9 of the paper has it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::graph::Graph;
use crate::stats::Summary;
use crate::times::{self, TimeSource, WINDOWS};

/// When snapshots were taken.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Snapshots {
    /// Layers that stand on another one: each was made by a snapshot or a copy.
    pub taken: u64,
    /// Those of them for which the time since the link before is known.
    pub dated: u64,
    /// How many times come from where.
    pub sources: BTreeMap<TimeSource, u64>,
    /// Links that seem older than those they stand on; left out.
    pub out_of_order: u64,
    /// Seconds from one link to the next.
    pub interval_s: Summary,
    /// Snapshots by their place in the chain and the time since the link before.
    pub points: Vec<SnapshotPoint>,
    /// Upper ends of the windows that `points` count in, in seconds; the last has none.
    pub windows: Vec<Option<f64>>,
}

/// Snapshots at one place of their chains, the same time after the link before, about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotPoint {
    /// Backing files in the chain once it was taken.
    pub position: u32,
    /// Which of the `windows`.
    pub window: usize,
    /// How many.
    pub count: u64,
}

pub(super) fn snapshots(graph: &Graph<'_>) -> Snapshots {
    let mut intervals = Vec::new();
    let mut points: BTreeMap<(u32, usize), u64> = BTreeMap::new();
    let mut sources = BTreeMap::new();
    let (mut taken, mut out_of_order) = (0, 0);
    for at in 0..graph.images.len() {
        let Some(below) = graph.below[at] else { continue };
        taken += 1;
        let (Some((made, source)), Some((before, _))) = (made(graph, at), made(graph, below)) else {
            continue;
        };
        if made < before {
            out_of_order += 1;
            continue;
        }
        let seconds = (made - before) as f64 / 1e9;
        intervals.push(seconds);
        *sources.entry(source).or_insert(0) += 1;
        *points.entry((graph.stacks[at].layers - 1, times::window(seconds))).or_insert(0) += 1;
    }
    Snapshots {
        taken,
        dated: intervals.len() as u64,
        sources,
        out_of_order,
        interval_s: Summary::of(intervals),
        points: points
            .into_iter()
            .map(|((position, window), count)| SnapshotPoint { position, window, count })
            .collect(),
        windows: WINDOWS.iter().map(|(end, _)| Some(*end).filter(|end| end.is_finite())).collect(),
    }
}

fn made(graph: &Graph<'_>, at: usize) -> Option<(i64, TimeSource)> {
    times::made(&graph.images[at], graph.below[at].map(|below| &graph.images[below]))
}
