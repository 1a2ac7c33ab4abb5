//! Making changes of entries seen, and giving back what nothing leads to any more.

use super::{Active, Change, EntryGuard};
use crate::changes::{Freed, Noted};
use crate::error::Result;
use crate::journal::{Record, Slot};

impl Active {
    /// Publishes changes of entries that lie in one page and one L2 table and are locked. The data they lead to is written.
    ///
    /// # Errors
    /// A commit that failed where the changes could not be journalled.
    pub(crate) fn publish(&self, changed: &[Change], freed: &[Freed], guard: &EntryGuard<'_>) -> Result<()> {
        self.settle(self.note(changed, freed, guard))
    }

    /// As [`Active::publish`], but that it is left to the caller to do what was noted asks for.
    pub(crate) fn note(&self, changed: &[Change], freed: &[Freed], _guard: &EntryGuard<'_>) -> Noted {
        let records: smallvec::SmallVec<[Record; 4]> = changed
            .iter()
            .map(|change| Record { slot: Slot::L2(change.cluster), old: change.old, new: change.new })
            .collect();
        let noted = self.changes.note(&records, freed);
        if noted != Noted::Refused {
            for change in changed {
                let (key, slot) = self.key(change.cluster);
                self.cache.update(key, slot, change.new);
            }
        }
        noted
    }

    pub(super) fn settle(&self, noted: Noted) -> Result<()> {
        match noted {
            Noted::Safe => Ok(()),
            Noted::MustCommit => self.changes.commit(self),
            Noted::Refused => unreachable!("only a cluster that begins to be written in part is refused"),
        }
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
