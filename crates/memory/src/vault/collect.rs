//! Deleting snapshots, and removing what is not needed any more.
//!
//! A snapshot is deleted by deleting its metadata, everywhere; its objects go when no snapshot's pages lie in them, and are
//! compacted when few do. Only who holds all repositories alone removes or compacts objects, so no writer is about to refer to
//! them and no reader reads them.

use std::collections::BTreeSet;

use vmstrata_repo::Hold;

use super::compact::Compact;
use super::error::{Result, VaultError};
use super::name::{ObjectId, ObjectKind, SnapshotId};
use super::survey::{CopyAt, Survey};
use super::{Listed, Vault};

/// What was collected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Copies of objects that were removed.
    pub objects: usize,
    /// Objects that were compacted.
    pub compacted: usize,
    /// Unfinished objects that were removed.
    pub unfinished: usize,
    /// Bytes of devices that were given back, as `du` counts them.
    pub bytes: u64,
}

/// What a collection would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collectable {
    /// Objects that would be removed, copies counted.
    pub objects: usize,
    /// Objects that would be compacted.
    pub compact: Vec<ObjectId>,
    /// Bytes that would be given back, about.
    pub bytes: u64,
}

/// What became of the space of deleted snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// What is not needed was removed.
    Collected(Collected),
    /// Others read or write the store: what is not needed is removed by the next who can.
    Later,
}

impl Vault {
    /// Deletes snapshots; others keep all pages they share with them.
    ///
    /// # Errors
    /// When a copy of a snapshot's metadata may still be there: it is then listed until it is deleted again. Repositories that
    /// cannot be reached are an error before anything is deleted.
    pub fn delete(&self, ids: &[SnapshotId]) -> Result<Deleted> {
        let survey = self.survey_of_all()?;
        if let Some(id) = ids.iter().find(|id| !survey.has_snapshot(**id)) {
            return Err(VaultError::NotFound(id.to_string()));
        }
        let mut bytes = 0;
        for id in ids {
            let name = ObjectId { owner: *id, kind: ObjectKind::Metadata };
            for copy in survey.copies(name) {
                self.repository(copy.repository).delete(&name.into())?;
                bytes += copy.allocated;
            }
        }
        let mut deleted = self.collect()?;
        if let Deleted::Collected(collected) = &mut deleted {
            collected.bytes += bytes;
        }
        Ok(deleted)
    }

    /// Removes what no snapshot needs and compacts what is worth it, unless others read or write the store now. An object that
    /// cannot be compacted stays as it is, with a warning.
    ///
    /// # Errors
    /// [`VaultError::NeedsUnknown`] while no copy of a snapshot's metadata can be read; what the repositories say.
    pub fn collect(&self) -> Result<Deleted> {
        self.collect_and(|survey, listed, used| {
            let due = self.due(survey, listed, used, Compact::Worthwhile);
            let compacted = due.and_then(|due| self.compact(survey, due, &mut |_, _| ()));
            Ok(compacted.unwrap_or_else(|error| {
                tracing::warn!("space that is no longer needed stays for now: {error:?}");
                0
            }))
        })
    }

    /// As [`Self::collect`]; `progress` gets the bytes compacted and of all.
    ///
    /// # Errors
    /// As there; and what is in the way of compacting.
    pub fn gc(&self, which: Compact, progress: &mut dyn FnMut(u64, u64)) -> Result<Deleted> {
        self.collect_and(|survey, listed, used| {
            self.compact(survey, self.due(survey, listed, used, which)?, progress)
        })
    }

    /// What [`Self::gc`] would do now.
    ///
    /// # Errors
    /// As there.
    pub fn collectable(&self, which: Compact) -> Result<Collectable> {
        let _held = self.hold_to_read();
        let survey = self.survey_of_all()?;
        let listed = survey.snapshots(self);
        let used = used(&listed)?;
        let unused = unused(&survey, &used);
        let due = self.due(&survey, &listed, &used, which)?;
        let removed: u64 = unused.iter().map(|(_, copy)| copy.allocated).sum();
        Ok(Collectable {
            objects: unused.len(),
            bytes: removed + due.iter().map(|candidate| candidate.dead).sum::<u64>(),
            compact: due.iter().map(|candidate| candidate.name).collect(),
        })
    }

    /// Removes what no snapshot needs, then compacts.
    fn collect_and(
        &self,
        compact: impl FnOnce(&Survey, &[Listed], &BTreeSet<ObjectId>) -> Result<usize>,
    ) -> Result<Deleted> {
        let Some(_held) = self.hold(Hold::AloneOrNot)? else { return Ok(Deleted::Later) };
        let survey = self.survey_of_all()?;
        let mut collected = Collected::default();
        for repository in &self.repositories {
            let swept = repository.sweep()?;
            collected.unfinished += swept.objects;
            collected.bytes += swept.bytes;
        }
        let listed = survey.snapshots(self);
        let used = used(&listed)?;
        for (name, copy) in unused(&survey, &used) {
            self.repository(copy.repository).delete(&name.into())?;
            collected.objects += 1;
        }
        collected.compacted = compact(&survey, &listed, &used)?;
        collected.bytes += survey.allocated().saturating_sub(Survey::take(self)?.allocated());
        Ok(Deleted::Collected(collected))
    }

    /// What a writer does first; a store that cannot be collected can still be written. Nothing is compacted, as the writer
    /// would wait for that.
    pub(super) fn remove_if_idle(&self) {
        if let Err(error) = self.collect_and(|_, _, _| Ok(0)) {
            tracing::warn!("what is no longer needed stays for now: {error}");
        }
    }

    /// What a writer does last. Others wait while the repositories are held alone, so they are only if there may be something
    /// to do.
    pub(super) fn collect_if_idle(&self) {
        let collected =
            self.may_have_unneeded().and_then(|may| if may { self.collect().map(drop) } else { Ok(()) });
        if let Err(error) = collected {
            tracing::warn!("what is no longer needed stays for now: {error}");
        }
    }

    /// Whether objects are unused or may have pages that are: those of deleted snapshots.
    fn may_have_unneeded(&self) -> Result<bool> {
        let survey = self.survey_of_all()?;
        let used = used(&survey.snapshots(self))?;
        Ok(used.iter().any(|name| !survey.has_snapshot(name.owner)) || !unused(&survey, &used).is_empty())
    }

    /// What is in all repositories: with one missing, it is not known what is needed.
    fn survey_of_all(&self) -> Result<Survey> {
        let survey = Survey::take(self)?;
        match self.missing.iter().chain(&survey.failed).next() {
            None => Ok(survey),
            Some(_) => {
                Err(VaultError::Unreachable(self.missing.iter().chain(&survey.failed).cloned().collect()))
            }
        }
    }
}

/// Objects that snapshots' pages lie in.
fn used(listed: &[Listed]) -> Result<BTreeSet<ObjectId>> {
    let (mut used, mut unknown) = (BTreeSet::new(), Vec::new());
    for Listed { id, info, .. } in listed {
        match info {
            Ok(info) => used.extend(info.objects.values().map(|object| object.name)),
            Err(_) => unknown.push(ObjectId { owner: *id, kind: ObjectKind::Metadata }),
        }
    }
    if unknown.is_empty() { Ok(used) } else { Err(VaultError::NeedsUnknown(unknown)) }
}

/// Copies of objects of pages that no snapshot uses.
fn unused(survey: &Survey, used: &BTreeSet<ObjectId>) -> Vec<(ObjectId, CopyAt)> {
    let is_unused = |name: &ObjectId| name.kind != ObjectKind::Metadata && !used.contains(name);
    let objects = survey.objects.iter().filter(|(name, _)| is_unused(name));
    objects.flat_map(|(name, copies)| copies.iter().map(|copy| (*name, *copy))).collect()
}
