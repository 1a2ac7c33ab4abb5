//! What is in the repositories at one moment.

use std::collections::BTreeMap;

use vmstrata_repo::{ObjectInfo, ObjectReader, Repository};

use super::Vault;
use super::error::Result;
use super::info::Info;
use super::metadata;
use super::name::{ObjectId, ObjectKind, SnapshotId};

/// A copy of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyAt {
    /// Index of the repository.
    pub(super) repository: usize,
    /// Bytes of the object.
    pub(super) len: u64,
    /// Bytes that it takes of the device.
    pub(super) allocated: u64,
    /// As which the repository counts: more than one where it replicates by itself.
    pub(super) copies: u8,
}

/// All objects of all repositories that can be read.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) objects: BTreeMap<ObjectId, Vec<CopyAt>>,
    /// Repositories that could not be listed, with why.
    pub(super) failed: Vec<String>,
}

/// A snapshot of the store.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Tells it from all others.
    pub id: SnapshotId,
    /// What is known of it, or why no copy of that can be read.
    pub info: Result<Info, Vec<String>>,
    /// Copies of its metadata that are there, damaged ones included.
    pub metadata_copies: usize,
    /// Bytes of one copy of its metadata.
    pub metadata_len: u64,
}

impl Survey {
    /// Lists all repositories.
    ///
    /// # Errors
    /// When none can be listed.
    pub(super) fn take(vault: &Vault) -> Result<Self> {
        let mut survey = Self::default();
        let mut first = None;
        for (index, repository) in vault.repositories.iter().enumerate() {
            match repository.list("") {
                Ok(objects) => {
                    for ObjectInfo { name, len, allocated, copies } in objects {
                        let Some(id) = ObjectId::parse(name.as_str()) else { continue };
                        let copy = CopyAt { repository: index, len, allocated, copies };
                        survey.objects.entry(id).or_default().push(copy);
                    }
                }
                Err(error) => {
                    survey.failed.push(format!("{}: {}", error.repository, error.source));
                    first.get_or_insert(error);
                }
            }
        }
        match first {
            Some(error) if survey.failed.len() == vault.repositories.len() => Err(error.into()),
            _ => Ok(survey),
        }
    }

    pub(super) fn has_snapshot(&self, id: SnapshotId) -> bool {
        self.objects.contains_key(&ObjectId { owner: id, kind: ObjectKind::Metadata })
    }

    /// The copies of an object.
    pub(super) fn copies(&self, name: ObjectId) -> &[CopyAt] {
        self.objects.get(&name).map_or(&[], Vec::as_slice)
    }

    /// As how many copies of an object a repository counts; 0 when it has none.
    pub(super) fn copies_in(&self, repository: usize, name: ObjectId) -> u8 {
        self.copies(name).iter().find(|copy| copy.repository == repository).map_or(0, |copy| copy.copies)
    }

    /// Bytes that all copies of all objects take of their devices.
    pub(super) fn allocated(&self) -> u64 {
        self.objects.values().flatten().map(|copy| copy.allocated).sum()
    }

    /// The ids of all snapshots.
    pub(super) fn ids(&self) -> impl Iterator<Item = SnapshotId> + '_ {
        self.objects.keys().filter(|name| name.kind == ObjectKind::Metadata).map(|name| name.owner)
    }

    /// All snapshots, newest first; those of which nothing is known first of all.
    pub(super) fn snapshots(&self, vault: &Vault) -> Vec<Listed> {
        let mut listed: Vec<Listed> = self.ids().map(|id| self.look_at(vault, id)).collect();
        listed.sort_by_key(|listed| {
            let taken = listed.info.as_ref().map_or(u64::MAX, |info| info.taken_ns);
            std::cmp::Reverse((taken, listed.id))
        });
        listed
    }

    fn look_at(&self, vault: &Vault, id: SnapshotId) -> Listed {
        let name = ObjectId { owner: id, kind: ObjectKind::Metadata };
        let copies = self.copies(name);
        let mut len = copies.first().map_or(0, |copy| copy.len);
        let info = self.first_good(vault, name, |reader| {
            let info = metadata::read_info(id, reader)?;
            len = reader.len();
            Ok(info)
        });
        Listed { id, info, metadata_copies: copies.len(), metadata_len: len }
    }

    /// What `read` gets from the first copy that it can read.
    ///
    /// # Errors
    /// Each copy with what was wrong.
    pub(super) fn first_good<T>(
        &self,
        vault: &Vault,
        name: ObjectId,
        mut read: impl FnMut(&dyn ObjectReader) -> Result<T, super::bytes::Malformed>,
    ) -> Result<T, Vec<String>> {
        let mut tried = Vec::new();
        for copy in self.copies(name) {
            let repository = vault.repository(copy.repository);
            match repository.open(&name.into()) {
                Ok(reader) => match read(reader.as_ref()) {
                    Ok(value) => return Ok(value),
                    Err(malformed) => tried.push(wrong(repository, name, malformed.0)),
                },
                Err(error) => tried.push(wrong(repository, name, error.source)),
            }
        }
        tried.extend(vault.missing.iter().chain(&self.failed).cloned());
        Err(tried)
    }
}

/// `REPOSITORY/OBJECT: what is wrong`.
pub(super) fn wrong(repository: &dyn Repository, name: ObjectId, what: impl std::fmt::Display) -> String {
    format!("{}/{name}: {what}", repository.describe())
}
