//! Deleting snapshots, and removing what nobody needs any more.
//!
//! A snapshot is deleted by deleting its metadata, everywhere; its objects go when no snapshot's pages lie in them. Only who
//! holds all homes alone removes objects, so no writer is about to refer to them and no reader reads them.

use std::collections::BTreeSet;

use super::Vault;
use super::error::{Result, VaultError};
use super::home::Hold;
use super::name::{ObjectKind, ObjectName, SnapshotId};
use super::survey::Survey;

/// What was collected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Copies of objects that were removed.
    pub objects: usize,
    /// Bytes they had.
    pub bytes: u64,
    /// Unfinished objects that were removed.
    pub unfinished: usize,
}

/// What became of the space of deleted snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// What nobody needs was removed.
    Collected(Collected),
    /// Others read or write the store: what nobody needs is removed by the next who can.
    Later,
}

impl Vault {
    /// Deletes snapshots; others keep all pages they share with them.
    ///
    /// # Errors
    /// When a copy of a snapshot's metadata may still be there: it is then listed until it is deleted again. Homes that
    /// cannot be reached are an error before anything is deleted.
    pub fn delete(&self, ids: &[SnapshotId]) -> Result<Deleted> {
        let survey = self.survey_of_all()?;
        if let Some(id) = ids.iter().find(|id| !survey.has_snapshot(**id)) {
            return Err(VaultError::NotFound(id.to_string()));
        }
        for id in ids {
            let name = ObjectName { owner: *id, kind: ObjectKind::Metadata };
            for copy in survey.copies(name) {
                let home = self.home(copy.home);
                home.delete(name).map_err(VaultError::home(home, "deleting", name))?;
            }
        }
        self.collect()
    }

    /// Removes what no snapshot needs, unless others read or write the store now.
    ///
    /// # Errors
    /// [`VaultError::NeedsUnknown`] while no copy of a snapshot's metadata can be read; what the homes say.
    pub fn collect(&self) -> Result<Deleted> {
        let Some(_held) = self.hold(Hold::AloneOrNot)? else { return Ok(Deleted::Later) };
        let survey = self.survey_of_all()?;
        let mut collected = Collected::default();
        for home in &self.homes {
            let swept = home.sweep().map_err(VaultError::home(home.as_ref(), "sweeping", ""))?;
            collected.unfinished += swept;
        }
        let needed = self.needed(&survey)?;
        let is_unneeded = |name: &ObjectName| name.kind != ObjectKind::Metadata && !needed.contains(name);
        for (name, copies) in survey.objects.iter().filter(|(name, _)| is_unneeded(name)) {
            for copy in copies {
                let home = self.home(copy.home);
                home.delete(*name).map_err(VaultError::home(home, "deleting", name))?;
                collected.objects += 1;
                collected.bytes += copy.len;
            }
        }
        Ok(Deleted::Collected(collected))
    }

    /// What a writer does first; a store that cannot be collected can still be written.
    pub(super) fn collect_if_idle(&self) {
        if let Err(error) = self.collect() {
            tracing::warn!("what is no longer needed stays for now: {error}");
        }
    }

    /// What is in all homes: with one missing, it is not known what is needed.
    fn survey_of_all(&self) -> Result<Survey> {
        let survey = Survey::take(self)?;
        match self.missing.iter().chain(&survey.failed).next() {
            None => Ok(survey),
            Some(_) => {
                Err(VaultError::Unreachable(self.missing.iter().chain(&survey.failed).cloned().collect()))
            }
        }
    }

    /// Objects that snapshots' pages lie in.
    fn needed(&self, survey: &Survey) -> Result<BTreeSet<ObjectName>> {
        let mut needed = BTreeSet::new();
        let mut unknown = Vec::new();
        for listed in survey.snapshots(self) {
            match listed.info {
                Ok(info) => needed.extend(info.objects.values().map(|object| object.name)),
                Err(_) => unknown.push(ObjectName { owner: listed.id, kind: ObjectKind::Metadata }),
            }
        }
        if unknown.is_empty() { Ok(needed) } else { Err(VaultError::NeedsUnknown(unknown)) }
    }
}
