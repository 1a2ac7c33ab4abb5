//! Reading every byte of every copy, to know what a snapshot has left.

use std::collections::BTreeMap;

use super::bytes::Malformed;
use super::copies::{ObjectCopies, OpenCopy};
use super::error::{Result, VaultError};
use super::extent::ExtentReader;
use super::info::Info;
use super::live::{self, Needs, PageSet};
use super::metadata::{Metadata, Outline};
use super::name::{ObjectId, ObjectKind, SnapshotId};
use super::object;
use super::pages::{Content, Place};
use super::sources::Sources;
use super::survey::{Survey, wrong};
use super::users::Users;
use super::{Listed, Vault, Which};
use crate::address::PAGE_BYTES;
use crate::class::PageClass;

/// What a snapshot has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Tells it from all others.
    pub id: SnapshotId,
    /// `GUEST@NAME`; `None` when no copy of its metadata can be read.
    pub title: Option<String>,
    /// Pages that the guest needs and that no copy has.
    pub lost_critical: u64,
    /// Stored clean pages that no copy has.
    pub lost_clean: u64,
    /// Pages of its metadata that no copy has: what else is lost is then not known.
    pub lost_metadata: u64,
    /// Copies that are missing or damaged, each with what is wrong.
    pub problems: Vec<String>,
    /// Other snapshots whose pages lie in the objects that those are of.
    pub others: Vec<String>,
}

impl Health {
    fn unknown(id: SnapshotId) -> Self {
        let (lost_critical, lost_clean, lost_metadata) = Default::default();
        Self {
            id,
            title: None,
            lost_critical,
            lost_clean,
            lost_metadata,
            problems: Vec::new(),
            others: Vec::new(),
        }
    }

    /// Whether the guest can be restored.
    pub fn is_whole(&self) -> bool {
        self.title.is_some() && self.lost_critical == 0 && self.lost_metadata == 0
    }

    /// Whether everything is there in as many copies as it should be.
    pub fn is_complete(&self) -> bool {
        self.is_whole() && self.problems.is_empty()
    }
}

/// A copy of an object of pages, after every byte of it was read.
#[derive(Debug)]
pub(super) struct CheckedCopy {
    pub(super) repository: usize,
    /// Pages that it has.
    pub(super) pages: PageSet,
    /// What is wrong with it.
    pub(super) problem: Option<String>,
}

/// An object of pages, after every byte of every copy was read.
#[derive(Debug, Default)]
pub(super) struct CheckedObject {
    /// Pages that any of the copies has.
    pub(super) pages: PageSet,
    pub(super) copies: Vec<CheckedCopy>,
}

impl CheckedObject {
    /// Repositories that have a copy without a fault, and with all that is needed of it.
    pub(super) fn whole(&self, needed: &PageSet) -> Vec<usize> {
        let is_whole = |copy: &&CheckedCopy| copy.problem.is_none() && copy.pages.has_all(needed);
        self.copies.iter().filter(is_whole).map(|copy| copy.repository).collect()
    }
}

/// What was found of objects, as many snapshots share them.
#[derive(Debug)]
pub(super) struct Checked {
    objects: BTreeMap<ObjectId, CheckedObject>,
    pub(super) users: Users,
}

impl Checked {
    pub(super) fn new(listed: &[Listed]) -> Self {
        Self { objects: BTreeMap::new(), users: Users::of(listed) }
    }

    /// Reads every copy of an object, unless that was done before.
    pub(super) fn object(&mut self, vault: &Vault, survey: &Survey, name: ObjectId) -> &CheckedObject {
        self.objects.entry(name).or_insert_with(|| check_object(vault, survey, name))
    }
}

impl Vault {
    /// Reads every byte of these snapshots; all for none. `progress` gets the number done and of all.
    ///
    /// # Errors
    /// When no repository can be read; [`VaultError::NotFound`]. What is found of the snapshots is no error.
    pub fn verify(&self, ids: &[SnapshotId], mut progress: impl FnMut(u64, u64)) -> Result<Vec<Health>> {
        let _held = self.hold_to_read();
        let survey = Survey::take(self)?;
        let listed = survey.snapshots(self);
        let ids = ids_or_all(&survey, &listed, ids)?;
        let mut checked = Checked::new(&listed);
        let mut found = Vec::with_capacity(ids.len());
        for id in &ids {
            progress(found.len() as u64, ids.len() as u64);
            found.push(self.check(&survey, &mut checked, *id));
        }
        Ok(found)
    }

    /// The newest snapshot that can be restored instead of the one meant: an older one of the same guest, found by reading
    /// every byte of it. Where what is known of the one meant is lost, it is of the guest that `which` names, or of any.
    ///
    /// # Errors
    /// When no repository can be read.
    pub fn newest_whole_before(&self, which: &Which) -> Result<Option<Info>> {
        let _held = self.hold_to_read();
        let survey = Survey::take(self)?;
        let listed = survey.snapshots(self);
        let id = self.find(which, &survey).ok();
        let known = listed.iter().find(|listed| Some(listed.id) == id);
        let known = known.and_then(|listed| listed.info.as_ref().ok());
        let guest = match which {
            Which::Named { guest, .. } | Which::Newest(guest) => Some(guest),
            Which::Id(_) => known.map(|info| &info.guest),
        };
        let is_older = |other: &&Info| match (known, id) {
            (Some(info), _) => (other.taken_ns, other.id) < (info.taken_ns, info.id),
            // Ids begin with the time.
            (None, Some(id)) => other.id < id,
            (None, None) => true,
        };
        let infos = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
        let mut older = infos.filter(|info| guest.is_none_or(|guest| info.guest == *guest)).filter(is_older);
        let mut checked = Checked::new(&listed);
        Ok(older.find(|info| self.check(&survey, &mut checked, info.id).is_whole()).cloned())
    }

    pub(super) fn check(&self, survey: &Survey, checked: &mut Checked, id: SnapshotId) -> Health {
        let mut health = Health::unknown(id);
        let (metadata, whole) = self.check_metadata(survey, id, &mut health.problems);
        let Some(metadata) = metadata else { return health };
        let info = &metadata.info;
        health.title = Some(info.title());
        let name = ObjectId { owner: id, kind: ObjectKind::Metadata };
        note_missing(survey, name, &whole, info.critical_copies, &mut health.problems);
        let (needs, outline) = self.needs_by(survey, &metadata);
        let mut concerned = Vec::new();
        for object in info.objects.values() {
            let before = health.problems.len();
            let found = checked.object(self, survey, object.name);
            health.problems.extend(found.copies.iter().filter_map(|copy| copy.problem.clone()));
            let whole = found.whole(&needs[&object.name]);
            note_missing(survey, object.name, &whole, object.copies, &mut health.problems);
            concerned.extend((health.problems.len() > before).then_some(object.name));
        }
        health.others = checked.users.others(&concerned, Some(id));
        let mut lost = |place: Place, len| {
            let there =
                checked.object(self, survey, info.objects[&place.object].name).pages.places(place.extent);
            u64::from((live::places(place.slot, len) & !there).count_ones())
        };
        health.lost_metadata = metadata.tables.places().map(|(place, len)| lost(place, len)).sum();
        if health.lost_metadata > 0 {
            return health;
        }
        let outline = match outline {
            Ok(outline) => outline,
            Err(tried) => {
                health.title = None;
                health.problems.extend(tried);
                return health;
            }
        };
        for (_, len, entry) in outline.pages.runs() {
            let Content::At(place) = entry.content else { continue };
            let is_clean = entry.class == PageClass::Clean;
            *(if is_clean { &mut health.lost_clean } else { &mut health.lost_critical }) += lost(place, len);
        }
        health
    }

    /// What the snapshot with this metadata needs, and what it says; where its tables cannot be read, only those are needed.
    pub(super) fn needs_by(
        &self,
        survey: &Survey,
        metadata: &Metadata,
    ) -> (Needs, Result<Outline, Vec<String>>) {
        let outline = self.read_tables(survey, metadata.clone());
        let needs = match &outline {
            Ok(outline) => live::needs(&outline.info, outline.places()),
            Err(_) => live::needs(&metadata.info, metadata.tables.places()),
        };
        (needs, outline)
    }

    /// Reads and decodes all of a snapshot's tables.
    fn read_tables(&self, survey: &Survey, metadata: Metadata) -> Result<Outline, Vec<String>> {
        let sources = Sources::open(self, survey, &metadata.info.objects);
        let outline = Outline::of(metadata, &sources)?;
        outline.hiding(&sources)?;
        outline.refill(&sources)?;
        outline.blobs(&sources)?;
        Ok(outline)
    }

    /// What a copy of the metadata says, and the repositories that have a good one.
    pub(super) fn check_metadata(
        &self,
        survey: &Survey,
        id: SnapshotId,
        problems: &mut Vec<String>,
    ) -> (Option<Metadata>, Vec<usize>) {
        let name = ObjectId { owner: id, kind: ObjectKind::Metadata };
        let (mut metadata, mut whole) = (None, Vec::new());
        for copy in survey.copies(name) {
            let repository = self.repository(copy.repository);
            let read = repository.open(&name.into()).map_err(|error| error.source.to_string());
            let read = read.and_then(|reader| {
                Metadata::read(id, reader.as_ref()).map_err(|malformed| malformed.0.to_owned())
            });
            match read {
                Ok(read) => {
                    metadata = Some(read);
                    whole.push(copy.repository);
                }
                Err(problem) => problems.push(wrong(repository, name, problem)),
            }
        }
        (metadata, whole)
    }
}

pub(super) fn ids_or_all(survey: &Survey, listed: &[Listed], ids: &[SnapshotId]) -> Result<Vec<SnapshotId>> {
    if ids.is_empty() {
        return Ok(listed.iter().map(|listed| listed.id).collect());
    }
    match ids.iter().find(|id| !survey.has_snapshot(**id)) {
        Some(id) => Err(VaultError::NotFound(id.to_string())),
        None => Ok(ids.to_vec()),
    }
}

fn note_missing(survey: &Survey, name: ObjectId, whole: &[usize], wanted: u8, problems: &mut Vec<String>) {
    let there: u64 = whole.iter().map(|repository| u64::from(survey.copies_in(*repository, name))).sum();
    if there < wanted.into() {
        problems.push(format!("{name}: {there} whole of {wanted} copies"));
    }
}

fn check_object(vault: &Vault, survey: &Survey, name: ObjectId) -> CheckedObject {
    let mut checked = CheckedObject::default();
    let object = ObjectCopies::open(vault, survey, name);
    for (repository, problem) in &object.unopened {
        let problem = Some(problem.clone());
        checked.copies.push(CheckedCopy { repository: *repository, pages: PageSet::default(), problem });
    }
    for copy in &object.copies {
        let (pages, found) = check_copy(&object, copy);
        checked.pages.add_all(&pages);
        let problem = found.err().map(|problem| format!("{}: {}", copy.place, problem.0));
        checked.copies.push(CheckedCopy { repository: copy.repository, pages, problem });
    }
    checked
}

/// Which pages a copy has, and what is wrong with it.
pub(super) fn check_copy(object: &ObjectCopies, copy: &OpenCopy) -> (PageSet, Result<(), Malformed>) {
    let reader = copy.reader.as_ref();
    let hashes = object::contents(object.name, reader).and_then(|_| object::hashes(object.name, reader));
    let mut found = hashes.as_ref().map(drop).map_err(|malformed| *malformed);
    // Without a table of its own nothing says which hash is whose.
    let hashes = if copy.table.is_ok() { hashes.unwrap_or_default() } else { Vec::new() };
    let (mut pages, mut first, mut extent) = (PageSet::default(), 0, ExtentReader::default());
    for number in 0..object.extents() {
        let count = copy.table.as_ref().map_or(0, |table| usize::from(table.place(number).pages));
        let hashes = hashes.get(first..first + count).filter(|hashes| !hashes.is_empty());
        first += count;
        if copy.table.as_ref().is_ok_and(|table| table.place(number).len == 0) {
            continue;
        }
        let read = object.read_copy(copy, number, &mut extent).and_then(|()| match hashes {
            Some(hashes)
                if !extent.pages().chunks(PAGE_BYTES).map(object::hash).eq(hashes.iter().copied()) =>
            {
                Err(Malformed("a page is not what its hash says"))
            }
            _ => Ok(()),
        });
        if read.is_ok() {
            pages.add(number, extent.filled());
        }
        found = found.and(read);
    }
    (pages, found)
}
