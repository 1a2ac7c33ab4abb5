//! What a check found in all.

use std::collections::BinaryHeap;

use serde::Serialize;
use vmstrata_types::HostOffset;

use crate::finding::{Finding, FindingKind, Severity};

/// The result of a check; after a repair, of the check that followed it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    /// Inconsistencies, counted as `qemu-img check` counts them.
    pub corruptions: u64,
    /// Clusters whose refcount is too high.
    pub leaks: u64,
    /// Clusters that only the journal of a killed process leads to: no leaks, as the next server takes it up.
    pub journaled: u64,
    /// Whether a process of this boot was killed that wrote the image, and its journal is not where it was looked for: what seems
    /// leaked may be its unflushed writes.
    pub journal_missing: bool,
    /// Parts that could not be checked; with any of these the other numbers say little.
    pub check_errors: u64,
    /// Corruptions that the repair removed.
    pub corruptions_fixed: u64,
    /// Leaks that the repair removed.
    pub leaks_fixed: u64,
    /// The first byte after the last cluster in use.
    #[serde(serialize_with = "as_number")]
    pub image_end_offset: HostOffset,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those that this image has a host cluster for.
    pub allocated_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Those that do not follow their predecessor in the file.
    pub fragmented_clusters: u64,
    /// Whether the image is marked as written with refcounts postponed, and not closed.
    #[serde(rename = "dirty-flag")]
    pub dirty: bool,
    /// Whether the image is marked corrupt.
    pub marked_corrupt: bool,
    /// The first findings in order of their offset; as many as asked for.
    pub findings: Vec<Finding>,
    /// Findings there are in all, each place counted once.
    pub findings_total: u64,
}

fn as_number<S: serde::Serializer>(at: &HostOffset, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(at.get())
}

impl Report {
    /// Nothing wrong at all.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }

    /// Nothing that endangers data; leaks only cost space.
    pub fn is_safe(&self) -> bool {
        self.corruptions == 0 && self.check_errors == 0
    }
}

/// Orders findings by place, so that the list does not depend on the order of threads.
#[derive(Debug, PartialEq, Eq)]
struct Placed(Finding);

impl Placed {
    fn key(&self) -> (HostOffset, &'static str) {
        (self.0.at, self.0.kind.name())
    }
}

impl PartialOrd for Placed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Placed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// Counts findings and keeps the first ones.
#[derive(Debug)]
pub(crate) struct Tally {
    limit: usize,
    first: BinaryHeap<Placed>,
    pub(crate) total: u64,
    pub(crate) corruptions: u64,
    pub(crate) leaks: u64,
    /// Clusters that only a journal leads to.
    pub(crate) journaled: u64,
    pub(crate) check_errors: u64,
    /// Findings that hide references: [`FindingKind::hides_references`].
    pub(crate) unfollowed: u64,
}

impl Tally {
    /// A tally that keeps at most `limit` findings.
    pub(crate) fn new(limit: usize) -> Self {
        let first = BinaryHeap::new();
        Self {
            limit,
            first,
            total: 0,
            corruptions: 0,
            leaks: 0,
            journaled: 0,
            check_errors: 0,
            unfollowed: 0,
        }
    }

    /// Notes a finding once.
    pub(crate) fn add(&mut self, at: HostOffset, kind: FindingKind) {
        self.add_weighted(at, kind, 1);
    }

    /// Notes a finding that counts `weight` times, for tables that several entries lead to.
    pub(crate) fn add_weighted(&mut self, at: HostOffset, kind: FindingKind, weight: u64) {
        let counter = match kind.severity() {
            Severity::Corruption => &mut self.corruptions,
            Severity::Leak => &mut self.leaks,
            Severity::CheckError => &mut self.check_errors,
        };
        *counter = counter.saturating_add(weight);
        self.total += 1;
        self.unfollowed += u64::from(kind.hides_references());
        self.keep(Placed(Finding { at, kind }));
    }

    fn keep(&mut self, placed: Placed) {
        if self.first.len() < self.limit {
            self.first.push(placed);
        } else if self.first.peek().is_some_and(|last| placed < *last) {
            self.first.pop();
            self.first.push(placed);
        }
    }

    /// Takes over everything that another tally has noted.
    pub(crate) fn merge(&mut self, other: Self) {
        self.corruptions = self.corruptions.saturating_add(other.corruptions);
        self.leaks += other.leaks;
        self.journaled += other.journaled;
        self.check_errors += other.check_errors;
        self.total += other.total;
        self.unfollowed += other.unfollowed;
        other.first.into_iter().for_each(|placed| self.keep(placed));
    }

    /// The findings kept, in order of place.
    pub(crate) fn into_findings(self) -> Vec<Finding> {
        self.first.into_sorted_vec().into_iter().map(|placed| placed.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_keeps_the_first_places_and_counts_all() {
        let leak = FindingKind::Leak { refcount: 1, references: 0 };
        let mut tally = Tally::new(3);
        let mut other = Tally::new(3);
        for at in [9, 2, 7] {
            tally.add(HostOffset::new(at), leak.clone());
            other.add(HostOffset::new(at - 1), leak.clone());
        }
        other.add_weighted(HostOffset::new(100), FindingKind::Overlap { references: 2 }, 5);
        tally.merge(other);
        assert_eq!((tally.total, tally.leaks, tally.corruptions), (7, 6, 5));
        let kept: Vec<_> = tally.into_findings().iter().map(|finding| finding.at.get()).collect();
        assert_eq!(kept, [1, 2, 6]);
    }
}
