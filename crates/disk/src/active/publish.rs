//! Making changes of entries seen, and giving back what nothing leads to any more.

use smallvec::SmallVec;

use super::{Active, Change, EntryGuard};
use crate::changes::{Freed, Noted};
use crate::error::Result;
use crate::journal::{Record, Slot};

impl Active {
    /// Publishes changes of entries that lie in one page and one L2 table and are locked. The data they lead to is written.
    ///
    /// # Errors
    /// A commit that failed, or a journal that cannot be written: in the latter case nothing is published.
    pub(crate) fn publish(&self, changed: &[Change], freed: &[Freed], guard: &EntryGuard<'_>) -> Result<()> {
        let noted = self.changes.note_or_commit(&records(changed), freed, self)?;
        // Commit first: a request that sees a new cluster writes into it and completes without a commit of its own.
        self.commit_if_due(noted)?;
        self.show(changed, guard);
        Ok(())
    }

    /// As [`Active::publish`], but that it is left to the caller to do what was noted asks for.
    pub(crate) fn note(&self, changed: &[Change], freed: &[Freed], guard: &EntryGuard<'_>) -> Noted {
        let noted = self.changes.note(&records(changed), freed);
        if matches!(noted, Noted::Safe | Noted::MustCommit) {
            self.show(changed, guard);
        }
        noted
    }

    /// Shows lookups what was noted.
    fn show(&self, changed: &[Change], _guard: &EntryGuard<'_>) {
        for change in changed {
            let (key, slot) = self.key(change.cluster);
            self.cache.update(key, slot, change.new);
        }
    }

    /// Commits where what was noted asks for it.
    pub(super) fn commit_if_due(&self, noted: Noted) -> Result<()> {
        if noted == Noted::MustCommit { self.changes.commit(self) } else { Ok(()) }
    }

    /// Gives back clusters that nothing leads to any more; `wait` returns once no request can still see them.
    ///
    /// # Errors
    /// Refcounts that cannot be read or written: what was not given back is leaked.
    pub(crate) fn reclaim(&self, wait: impl FnOnce()) -> Result<()> {
        let freed = self.changes.take_reclaimable();
        if freed.is_empty() {
            return Ok(());
        }
        wait();
        freed
            .into_iter()
            .try_for_each(|run| self.alloc.free(run.at, run.len))
            .map_err(|error| error.in_file(&self.path))
    }
}

fn records(changed: &[Change]) -> SmallVec<[Record; 4]> {
    let record =
        |change: &Change| Record { slot: Slot::L2(change.cluster), old: change.old, new: change.new };
    changed.iter().map(record).collect()
}
