//! Which snapshots use an object, and so what is lost with it.

use std::collections::BTreeMap;

use super::error::{Result, VaultError};
use super::info::{Info, ObjectUse};
use super::metadata::Outline;
use super::name::{ObjectId, SnapshotId};
use super::pages::Content;
use super::survey::Survey;
use super::{Listed, Vault};
use crate::class::PageClass;

/// An object that pages of a snapshot lie in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedObject {
    /// The object.
    pub name: ObjectId,
    /// Copies that are there.
    pub copies: u64,
    /// Bytes of one of them.
    pub len: u64,
    /// Critical pages of the snapshot in it, those of its tables too: with one of them the snapshot is lost.
    pub critical_pages: u64,
    /// Clean pages of the snapshot in it.
    pub clean_pages: u64,
    /// Other snapshots whose pages lie in it, newest first.
    pub others: Vec<String>,
}

/// The snapshots that use each object, newest first. Those of which nothing can be read are left out.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<ObjectId, Vec<(SnapshotId, String)>>);

impl Users {
    pub(super) fn of(listed: &[Listed]) -> Self {
        let mut users = Self::default();
        for info in listed.iter().filter_map(|listed| listed.info.as_ref().ok()) {
            for object in info.objects.values() {
                users.0.entry(object.name).or_default().push((info.id, info.title()));
            }
        }
        users
    }

    /// Those that use any of these objects, each once, and not `except`.
    pub(super) fn others(&self, names: &[ObjectId], except: Option<SnapshotId>) -> Vec<String> {
        let mut users: Vec<_> = names.iter().filter_map(|name| self.0.get(name)).flatten().collect();
        users.sort_unstable_by(|one, other| other.cmp(one));
        users.dedup();
        let users = users.into_iter().filter(|(id, _)| Some(*id) != except);
        users.map(|(_, title)| title.clone()).collect()
    }
}

impl Vault {
    /// The objects that a snapshot uses, with the other snapshots that do.
    ///
    /// # Errors
    /// When no repository can be read; [`VaultError::MetadataLost`].
    pub fn used_objects(&self, id: SnapshotId) -> Result<Vec<UsedObject>> {
        let _held = self.hold_to_read();
        let survey = Survey::take(self)?;
        let listed = survey.snapshots(self);
        let users = Users::of(&listed);
        let title = || {
            let info =
                listed.iter().find(|listed| listed.id == id).and_then(|listed| listed.info.as_ref().ok());
            info.map_or_else(|| id.to_string(), Info::title)
        };
        let read = Outline::read(self, &survey, id);
        let (outline, _) = read.map_err(|tried| VaultError::MetadataLost { id, snapshot: title(), tried })?;
        let used = |(number, object): (&u16, &ObjectUse)| {
            let copies = survey.copies(object.name);
            let used = UsedObject {
                name: object.name,
                copies: copies.iter().map(|copy| u64::from(copy.copies)).sum(),
                len: copies.first().map_or(0, |copy| copy.len),
                critical_pages: 0,
                clean_pages: 0,
                others: users.others(&[object.name], Some(id)),
            };
            (*number, used)
        };
        let mut objects: BTreeMap<u16, UsedObject> = outline.info.objects.iter().map(used).collect();
        let is_there = "an outline's places lie in its objects";
        for (place, len) in outline.tables.places() {
            objects.get_mut(&place.object).expect(is_there).critical_pages += len;
        }
        for (_, len, entry) in outline.pages.runs() {
            let Content::At(place) = entry.content else { continue };
            let object = objects.get_mut(&place.object).expect(is_there);
            let is_clean = entry.class == PageClass::Clean;
            *(if is_clean { &mut object.clean_pages } else { &mut object.critical_pages }) += len;
        }
        Ok(objects.into_values().collect())
    }
}
