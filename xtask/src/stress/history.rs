//! What became of one sector, oldest first; see [`super::model`].

use super::stamp::Value;

/// A point in the order of requests and answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tick(pub(super) u64);

/// Whether an entry took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    InFlight,
    Maybe,
    Done(Tick),
}

/// One change of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) value: Value,
    pub(super) fate: Fate,
}

/// What became of one sector; never empty.
#[derive(Clone, Debug)]
pub(super) struct History(pub(super) Vec<Entry>);

impl History {
    /// One value, on stable storage.
    pub(super) fn of(value: Value) -> Self {
        Self(vec![Entry { value, fate: Fate::Done(Tick(0)) }])
    }

    /// Drops what no crash can bring back any more.
    pub(super) fn prune(&mut self, flushed: Tick) {
        let covered = |entry: &Entry| matches!(entry.fate, Fate::Done(tick) if tick < flushed);
        if let Some(last) = self.0.iter().rposition(covered)
            && last > 0
        {
            self.0.drain(..last);
        }
    }

    /// The entries that a read may find.
    pub(super) fn current(&self) -> &[Entry] {
        let done = |entry: &Entry| matches!(entry.fate, Fate::Done(_));
        &self.0[self.0.iter().rposition(done).unwrap_or(0)..]
    }

    /// Gives the last entry its fate; a doubt that is there already is not doubled.
    pub(super) fn settle(&mut self, fate: Fate) {
        let Some((last, before)) = self.0.split_last_mut() else { return };
        debug_assert_eq!(last.fate, Fate::InFlight, "an entry is settled once");
        last.fate = fate;
        if fate == Fate::Maybe && before.last() == Some(last) {
            self.0.pop();
        }
    }

    /// The change in flight is done, and on stable storage: nothing older can come back.
    pub(super) fn keep_last(&mut self) {
        let last = self.0.len() - 1;
        self.0.drain(..last);
    }

    /// All that was not flushed may be lost: each value may be there, and none for sure but, perhaps, the oldest.
    pub(super) fn lose(&mut self, flushed: Tick) {
        self.prune(flushed);
        if self.0.len() == 1 {
            return;
        }
        let mut kept: Vec<Entry> = Vec::with_capacity(self.0.len());
        for entry in &self.0 {
            if kept.iter().all(|other| other.value != entry.value) {
                let fate = if kept.is_empty() { entry.fate } else { Fate::Maybe };
                kept.push(Entry { value: entry.value, fate });
            }
        }
        self.0 = kept;
    }
}
