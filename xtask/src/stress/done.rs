//! What a round did, and its line.

use std::sync::atomic::{AtomicU64, Ordering};

use super::disturb::Tally;
use super::shared::Counts;

/// What a round did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    pub(super) tally: Tally,
    pub(super) starts: u32,
    pub(super) kills: u32,
    pub(super) lost_journals: u32,
    pub(super) stops: u32,
    pub(super) judged: usize,
}

impl Done {
    /// The line of the round.
    pub(super) fn line(&self, counts: &Counts) -> String {
        let done = self;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let tally = &done.tally;
        format!(
            "{} writes, {} reads, {} trims, {} zeroes, {} flushes, {} refused, {} lost; {} starts, {} kills ({} journals lost), \
             {} stops, {} snapshots, {} deleted, {} judged, {} flattens, {} resizes, {} jobs paused, {} cancelled, \
             {} times full, {} times no room for journals, {} commands refused",
            get(&counts.writes),
            get(&counts.reads),
            get(&counts.trims),
            get(&counts.zeroes),
            get(&counts.flushes),
            get(&counts.refused),
            get(&counts.lost),
            done.starts,
            done.kills,
            done.lost_journals,
            done.stops,
            tally.snapshots,
            tally.deletes,
            done.judged,
            tally.flattens,
            tally.resizes,
            tally.paused,
            tally.cancelled,
            tally.full,
            tally.run_full,
            tally.refused,
        )
    }
}
