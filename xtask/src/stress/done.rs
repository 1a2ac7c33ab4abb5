//! What rounds did: figures, in the order in which they are told.

use std::sync::atomic::Ordering;

use super::disturb::Tally;
use super::shared::Counts;
use crate::bench::table::thousands;

/// What a round did beside its requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    pub(super) tally: Tally,
    pub(super) starts: u32,
    pub(super) kills: u32,
    pub(super) lost_journals: u32,
    pub(super) stops: u32,
    pub(super) judged: usize,
}

/// How often each thing was done, by a round or by several.
#[derive(Clone, Debug, Default)]
pub struct Figures(Vec<(&'static str, u64)>);

impl Done {
    /// All that the round did.
    pub(super) fn figures(&self, counts: &Counts) -> Figures {
        let tally = &self.tally;
        let requests = [
            ("writes", &counts.writes),
            ("reads", &counts.reads),
            ("discards", &counts.trims),
            ("writes of zeros", &counts.zeroes),
            ("flushes", &counts.flushes),
            ("requests refused by a full host", &counts.refused),
            ("requests that a kill left without an answer", &counts.lost),
        ];
        let others = [
            ("starts of the server", self.starts),
            ("kills", self.kills),
            ("kills with the journals wiped", self.lost_journals),
            ("clean ends", self.stops),
            ("snapshots taken", tally.snapshots),
            ("snapshots deleted", tally.deletes),
            ("snapshots read by stock tools", self.judged as u32),
            ("flattens", tally.flattens),
            ("resizes", tally.resizes),
            ("jobs paused", tally.paused),
            ("jobs cancelled", tally.cancelled),
            ("times that the images' file system was full", tally.full),
            ("times that the journals' file system was full", tally.run_full),
            ("commands refused", tally.refused),
        ];
        let requests = requests.map(|(what, count)| (what, count.load(Ordering::Relaxed)));
        let others = others.map(|(what, count)| (what, u64::from(count)));
        Figures(requests.into_iter().chain(others).collect())
    }
}

impl Figures {
    pub(super) fn add(&mut self, round: &Self) {
        if self.0.is_empty() {
            self.0.clone_from(&round.0);
        } else {
            self.0.iter_mut().zip(&round.0).for_each(|(all, one)| all.1 += one.1);
        }
    }

    /// On one line.
    pub(super) fn line(&self) -> String {
        let figures: Vec<String> = self.0.iter().map(|(what, count)| format!("{count} {what}")).collect();
        figures.join(", ")
    }

    /// As rows of a table.
    pub(super) fn rows(&self) -> String {
        self.0.iter().map(|(what, count)| format!("| {what} | {} |\n", thousands(*count as f64))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_rounds_add_up() {
        let counts = Counts::default();
        counts.writes.store(1_234_567, Ordering::Relaxed);
        let round = Done { kills: 2, ..Done::default() }.figures(&counts);
        let mut all = Figures::default();
        all.add(&round);
        all.add(&round);
        let rows = all.rows();
        assert!(rows.starts_with("| writes | 2,469,134 |\n") && rows.contains("\n| kills | 4 |\n"), "{rows}");
    }
}
