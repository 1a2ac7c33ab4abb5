//! Reading every byte of every copy, to know what a snapshot has left.

use std::collections::BTreeMap;

use super::bytes::Malformed;
use super::error::{Result, VaultError};
use super::extent::{ExtentId, ExtentReader};
use super::home::ObjectReader;
use super::info::Info;
use super::metadata::{Metadata, Outline};
use super::name::{ObjectKind, ObjectName, SnapshotId};
use super::object::{self, Contents, Hash};
use super::pages::{Content, Place};
use super::sources::Sources;
use super::survey::{Survey, wrong};
use super::{Vault, Which};
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
}

impl Health {
    fn unknown(id: SnapshotId) -> Self {
        let (lost_critical, lost_clean, lost_metadata) = Default::default();
        Self { id, title: None, lost_critical, lost_clean, lost_metadata, problems: Vec::new() }
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
    pub(super) home: usize,
    /// `[extent]`
    pub(super) good: Vec<bool>,
    /// What is wrong with it.
    pub(super) problem: Option<String>,
}

/// An object of pages, after every byte of every copy was read.
#[derive(Debug, Default)]
pub(super) struct CheckedObject {
    pub(super) contents: Contents,
    pub(super) copies: Vec<CheckedCopy>,
}

impl CheckedObject {
    /// Whether a copy has the extent.
    pub(super) fn has(&self, extent: u32) -> bool {
        self.copies.iter().any(|copy| copy.good.get(extent as usize) == Some(&true))
    }

    /// Homes that have a copy without a fault.
    pub(super) fn whole(&self) -> impl Iterator<Item = usize> + '_ {
        self.copies.iter().filter(|copy| copy.problem.is_none()).map(|copy| copy.home)
    }
}

/// What was found of objects, as many snapshots share them.
#[derive(Debug, Default)]
pub(super) struct Checked(BTreeMap<ObjectName, CheckedObject>);

impl Checked {
    /// Reads every copy of an object, unless that was done before.
    pub(super) fn object(&mut self, vault: &Vault, survey: &Survey, name: ObjectName) -> &CheckedObject {
        self.0.entry(name).or_insert_with(|| check_object(vault, survey, name))
    }
}

impl Vault {
    /// Reads every byte of these snapshots; all for none. `progress` gets the number done and of all.
    ///
    /// # Errors
    /// When no home can be read; [`VaultError::NotFound`]. What is found of the snapshots is no error.
    pub fn verify(&self, ids: &[SnapshotId], mut progress: impl FnMut(u64, u64)) -> Result<Vec<Health>> {
        let _held = self.hold_to_read();
        let survey = Survey::take(self)?;
        let ids = self.ids_or_all(&survey, ids)?;
        let mut checked = Checked::default();
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
    /// When no home can be read.
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
        let mut checked = Checked::default();
        Ok(older.find(|info| self.check(&survey, &mut checked, info.id).is_whole()).cloned())
    }

    pub(super) fn ids_or_all(&self, survey: &Survey, ids: &[SnapshotId]) -> Result<Vec<SnapshotId>> {
        if ids.is_empty() {
            return Ok(survey.snapshots(self).iter().map(|listed| listed.id).collect());
        }
        match ids.iter().find(|id| !survey.has_snapshot(**id)) {
            Some(id) => Err(VaultError::NotFound(id.to_string())),
            None => Ok(ids.to_vec()),
        }
    }

    pub(super) fn check(&self, survey: &Survey, checked: &mut Checked, id: SnapshotId) -> Health {
        let mut health = Health::unknown(id);
        let (metadata, whole) = self.check_metadata(survey, id, &mut health.problems);
        let Some(metadata) = metadata else { return health };
        let info = &metadata.info;
        health.title = Some(info.title());
        let name = ObjectName { owner: id, kind: ObjectKind::Metadata };
        note_missing(survey, name, &whole, info.critical_copies, &mut health.problems);
        for object in info.objects.values() {
            let found = checked.object(self, survey, object.name);
            health.problems.extend(found.copies.iter().filter_map(|copy| copy.problem.clone()));
            let whole: Vec<usize> = found.whole().collect();
            note_missing(survey, object.name, &whole, object.copies, &mut health.problems);
        }
        let mut has =
            |place: Place| checked.object(self, survey, info.objects[&place.object].name).has(place.extent);
        let lost = metadata.tables.places().filter(|(place, _)| !has(*place));
        health.lost_metadata = lost.map(|(_, len)| len).sum();
        if health.lost_metadata > 0 {
            return health;
        }
        let outline = match self.read_tables(survey, metadata.clone()) {
            Ok(outline) => outline,
            Err(tried) => {
                health.title = None;
                health.problems.extend(tried);
                return health;
            }
        };
        for (_, len, entry) in outline.pages.runs() {
            let Content::At(place) = entry.content else { continue };
            if !has(place) {
                let is_clean = entry.class == PageClass::Clean;
                *(if is_clean { &mut health.lost_clean } else { &mut health.lost_critical }) += len;
            }
        }
        health
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

    /// What a copy of the metadata says, and the homes that have a good one.
    pub(super) fn check_metadata(
        &self,
        survey: &Survey,
        id: SnapshotId,
        problems: &mut Vec<String>,
    ) -> (Option<Metadata>, Vec<usize>) {
        let name = ObjectName { owner: id, kind: ObjectKind::Metadata };
        let (mut metadata, mut whole) = (None, Vec::new());
        for copy in survey.copies(name) {
            let home = self.home(copy.home);
            let read = home.open(name).map_err(|error| error.to_string());
            let read = read.and_then(|reader| {
                Metadata::read(id, reader.as_ref()).map_err(|malformed| malformed.0.to_owned())
            });
            match read {
                Ok(read) => {
                    metadata = Some(read);
                    whole.push(copy.home);
                }
                Err(problem) => problems.push(wrong(home, name, problem)),
            }
        }
        (metadata, whole)
    }
}

fn note_missing(survey: &Survey, name: ObjectName, whole: &[usize], wanted: u8, problems: &mut Vec<String>) {
    let there: u64 = whole.iter().map(|home| u64::from(survey.copies_in(*home, name))).sum();
    if there < wanted.into() {
        problems.push(format!("{name}: {there} whole of {wanted} copies"));
    }
}

fn check_object(vault: &Vault, survey: &Survey, name: ObjectName) -> CheckedObject {
    let mut checked = CheckedObject::default();
    let mut readers: Vec<(usize, Box<dyn ObjectReader>)> = Vec::new();
    for copy in survey.copies(name) {
        match vault.home(copy.home).open(name) {
            Ok(reader) => readers.push((copy.home, reader)),
            Err(error) => {
                let problem = Some(wrong(vault.home(copy.home), name, error));
                checked.copies.push(CheckedCopy { home: copy.home, good: Vec::new(), problem });
            }
        }
    }
    let (contents, hashes) = ends(name, &readers);
    for (home, reader) in &readers {
        let (good, found) = check_copy(name, reader.as_ref(), &contents, &hashes);
        let problem = found.err().map(|problem| wrong(vault.home(*home), name, problem.0));
        checked.copies.push(CheckedCopy { home: *home, good, problem });
    }
    checked.contents = contents;
    checked
}

/// The table of extents, and the hashes if a copy has them.
fn ends(name: ObjectName, readers: &[(usize, Box<dyn ObjectReader>)]) -> (Contents, Vec<Hash>) {
    let readers: Vec<&dyn ObjectReader> = readers.iter().map(|(_, reader)| reader.as_ref()).collect();
    let hashes = readers.iter().find_map(|reader| object::hashes(name, *reader).ok()).unwrap_or_default();
    let contents = readers.iter().find_map(|reader| object::contents_of_rest(name, *reader).ok());
    (contents.unwrap_or_else(|| object::scan_all(name, &readers)), hashes)
}

/// Which extents of a copy are good, and what is wrong with it.
fn check_copy(
    name: ObjectName,
    reader: &dyn ObjectReader,
    contents: &Contents,
    hashes: &[Hash],
) -> (Vec<bool>, Result<(), Malformed>) {
    let mut found = object::contents(name, reader).and_then(|_| object::hashes(name, reader)).map(drop);
    let mut good = Vec::with_capacity(contents.extents.len());
    let (mut first, mut extent) = (0, ExtentReader::default());
    for (number, place) in (0..).zip(&contents.extents) {
        let hashes = hashes.get(first..first + usize::from(place.pages));
        first += usize::from(place.pages);
        let id = ExtentId { object: name, number };
        let is_unused = place.len == 0;
        let read = extent.read(id, *place, reader).and_then(|()| match hashes {
            Some(hashes)
                if !extent.pages().chunks(PAGE_BYTES).map(object::hash).eq(hashes.iter().copied()) =>
            {
                Err(Malformed("a page is not what its hash says"))
            }
            _ => Ok(()),
        });
        good.push(read.is_ok());
        if !is_unused {
            found = found.and(read);
        }
    }
    (good, found)
}
