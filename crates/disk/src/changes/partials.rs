//! Partial clusters: which there are, and whether more of them are admitted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vmstrata_qcow2::RawEntry;

use super::Changes;
use crate::journal::{Record, Slot};
use crate::partial::is_partial;

/// Most clusters whose copying is put off: bounds what a flush or a snapshot has to do first.
const PARTIALS_MAX: usize = 32_768;

/// See the module documentation. Part of what the state's lock protects.
#[derive(Debug, Default)]
pub(super) struct Partials {
    clusters: BTreeSet<u64>,
    /// Those who want no more of them.
    refusals: usize,
}

/// What a write looks at, without a lock, before it makes one.
#[derive(Debug, Default)]
pub(super) struct Welcome {
    count: AtomicUsize,
    refusals: AtomicUsize,
    never: AtomicBool,
    /// Some could not be completed.
    stuck: AtomicBool,
}

/// Whether a cluster becomes partial by this change.
pub(super) fn begins(record: &Record) -> bool {
    record.old.is_empty() && is_partial(record.new)
}

impl Partials {
    /// Whether more clusters may become partial.
    pub(super) fn are_admitted(&self) -> bool {
        self.refusals == 0
    }

    pub(super) fn len(&self) -> usize {
        self.clusters.len()
    }

    /// Takes notice of changes.
    pub(super) fn note(&mut self, records: &[Record], welcome: &Welcome) {
        for record in records {
            let Slot::L2(cluster) = record.slot else { continue };
            if is_partial(record.new) {
                self.clusters.insert(cluster);
            } else {
                self.clusters.remove(&cluster);
            }
        }
        welcome.count.store(self.clusters.len(), Ordering::Relaxed);
    }

    /// What `entries`, which has them all, says of them; the image has no entry for them yet.
    pub(super) fn records(&self, entries: &BTreeMap<Slot, RawEntry>) -> Vec<Record> {
        let slots = self.clusters.iter().map(|&cluster| Slot::L2(cluster));
        slots.map(|slot| Record { slot, old: RawEntry::EMPTY, new: entries[&slot] }).collect()
    }
}

impl Welcome {
    pub(super) fn never(&self, never: bool) {
        self.never.store(never, Ordering::Relaxed);
    }
}

impl Changes {
    /// Whether a cluster may become partial now. A guess: [`Changes::note`] says for certain.
    #[inline]
    pub(crate) fn welcomes_partials(&self) -> bool {
        let welcome = &self.welcome;
        welcome.count.load(Ordering::Relaxed) < PARTIALS_MAX
            && welcome.refusals.load(Ordering::Relaxed) == 0
            && !welcome.never.load(Ordering::Relaxed)
            && !welcome.stuck.load(Ordering::Relaxed)
    }

    /// The partial clusters, in order.
    pub(crate) fn partials(&self) -> Vec<u64> {
        self.state.lock().partials.clusters.iter().copied().collect()
    }

    /// The clusters that are worth completing before they must be: none while some could not be.
    pub(crate) fn partials_to_copy(&self) -> Vec<u64> {
        if self.welcome.stuck.load(Ordering::Relaxed) { Vec::new() } else { self.partials() }
    }

    /// What a journal has to say of them.
    pub(crate) fn partial_records(&self) -> Vec<Record> {
        let state = self.state.lock();
        state.partials.records(&state.open.entries)
    }

    /// While some cannot be completed, no more are admitted. Returns whether that is new.
    pub(crate) fn partials_are_stuck(&self, stuck: bool) -> bool {
        self.welcome.stuck.swap(stuck, Ordering::Relaxed) != stuck
    }

    /// Counts those that let no cluster become partial.
    pub(crate) fn refuse_partials(&self, more: isize) {
        let partials = &mut self.state.lock().partials;
        partials.refusals = partials.refusals.strict_add_signed(more);
        self.welcome.refusals.store(partials.refusals, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use vmstrata_types::{ClusterBits, HostOffset};

    use super::super::{CommitTarget, Noted};
    use super::*;
    use crate::error::Result;
    use crate::journal;
    use crate::partial::{Partial, Parts};

    const BITS: ClusterBits = ClusterBits::DEFAULT;

    /// The entries that were written.
    #[derive(Default)]
    struct Image(RefCell<Vec<(Slot, RawEntry)>>);

    impl CommitTarget for Image {
        fn flush(&self) -> Result<()> {
            Ok(())
        }
        fn write_entries(&self, entries: &BTreeMap<Slot, RawEntry>) -> Result<()> {
            self.0.borrow_mut().extend(entries.iter().map(|(&slot, &raw)| (slot, raw)));
            Ok(())
        }
    }

    const NONE: RawEntry = RawEntry::EMPTY;
    const WHOLE: RawEntry = RawEntry::standard(0x5_0000);

    fn word(host: u64, part: u64) -> RawEntry {
        Partial::new(HostOffset::new(host), BITS).with(Parts::of(BITS, part * 4096, 4096).unwrap()).raw()
    }

    fn record(cluster: u64, old: RawEntry, new: RawEntry) -> Record {
        Record { slot: Slot::L2(cluster), old, new }
    }

    #[test]
    fn a_commit_writes_no_word_of_a_partial_cluster_and_keeps_it_in_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, subject) = journal::tests::fresh(dir.path());
        let changes = Changes::new(BITS);
        changes.use_journal(Some(journal));
        let found = || journal::look(dir.path(), &subject).unwrap().records;
        let image = Image::default();
        let (part, other) = (word(0x5_0000, 3), RawEntry::standard(0x6_0000));
        assert_eq!(changes.note(&[record(1, NONE, part), record(2, NONE, other)], &[]), Noted::Safe);
        changes.commit(&image).unwrap();
        assert_eq!(*image.0.borrow(), [(Slot::L2(2), other)]);
        assert_eq!((found(), changes.partials()), (vec![record(1, NONE, part)], vec![1]));
        changes.commit(&image).unwrap();
        assert_eq!(image.0.borrow().len(), 1, "a commit of nothing but that");
        assert_eq!(changes.note(&[record(1, part, WHOLE)], &[]), Noted::Safe);
        changes.commit(&image).unwrap();
        assert_eq!(image.0.borrow()[1..], [(Slot::L2(1), WHOLE)]);
        assert!(found().is_empty() && changes.partials().is_empty());
    }

    #[test]
    fn none_begin_where_they_are_not_welcome_but_those_there_are_go_on() {
        let changes = Changes::new(BITS);
        let (part, more) = (word(0x5_0000, 3), word(0x5_0000, 4));
        assert_eq!(changes.note(&[record(1, NONE, part)], &[]), Noted::Safe);
        assert!(changes.welcomes_partials());
        changes.refuse_partials(1);
        assert!(!changes.welcomes_partials());
        assert_eq!(changes.note(&[record(2, NONE, word(0x6_0000, 0))], &[]), Noted::Refused);
        assert_eq!(changes.note(&[record(1, part, more)], &[]), Noted::Safe);
        assert_eq!(changes.partials(), [1]);
        changes.refuse_partials(-1);
        assert_eq!(changes.note(&[record(2, NONE, word(0x6_0000, 0))], &[]), Noted::Safe);
        assert_eq!(changes.partials(), [1, 2]);
        assert!(changes.partials_are_stuck(true));
        assert!(!changes.welcomes_partials() && changes.partials_to_copy().is_empty());
        assert!(!changes.partials_are_stuck(true) && changes.partials_are_stuck(false));
        assert_eq!(changes.partials_to_copy(), [1, 2]);
        changes.commit_each_change(true);
        assert!(!changes.welcomes_partials());
    }
}
