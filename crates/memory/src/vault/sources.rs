//! The objects that a snapshot's pages lie in, open for reading.
//!
//! Whatever copy is whole will do; one that is missing or damaged is passed over and noted.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::Vault;
use super::extent::{ExtentId, ExtentReader};
use super::home::ObjectReader;
use super::info::ObjectUse;
use super::name::ObjectName;
use super::object::{self, Contents};
use super::pages::Place;
use super::survey::{Survey, wrong};
use crate::address::PAGE_BYTES;

/// Extents kept after their pages were read: neighbours are often read next. Some 8 MiB.
const CACHED_EXTENTS: usize = 64;

/// The number of an extent's object in the snapshot, and its own in that object.
pub(super) type ExtentKey = (u16, u32);
/// An extent with its pages.
type Cached = (ExtentKey, Arc<Vec<u8>>);

thread_local! {
    /// For extents that are read one at a time.
    static READER: RefCell<ExtentReader> = RefCell::default();
}

/// The objects of a snapshot, by their numbers.
pub(super) struct Sources {
    objects: BTreeMap<u16, Opened>,
    /// Those unpacked last, first.
    cache: Mutex<VecDeque<Cached>>,
    problems: Mutex<BTreeSet<String>>,
}

/// An object of pages with the copies that could be opened.
struct Opened {
    name: ObjectName,
    contents: Contents,
    copies: Vec<OpenCopy>,
    /// Copies that cannot be used at all, and why.
    unusable: Vec<String>,
}

struct OpenCopy {
    /// `HOME/OBJECT`.
    place: String,
    reader: Box<dyn ObjectReader>,
}

impl Sources {
    /// Opens all copies of these objects.
    pub(super) fn open(vault: &Vault, survey: &Survey, objects: &BTreeMap<u16, ObjectUse>) -> Self {
        let open = |(number, object): (&u16, &ObjectUse)| (*number, Opened::open(vault, survey, *object));
        let objects: BTreeMap<u16, Opened> = objects.iter().map(open).collect();
        let problems = objects.values().flat_map(|object| object.unusable.iter().cloned()).collect();
        Self { objects, cache: Mutex::default(), problems: Mutex::new(problems) }
    }

    /// Copies that could not be read so far, each with the reason.
    pub(super) fn problems(&self) -> Vec<String> {
        self.problems.lock().iter().cloned().collect()
    }

    /// A page's bytes, as those at its slot of the extent returned.
    ///
    /// # Errors
    /// Each copy with what was wrong.
    pub(super) fn page_at(&self, place: Place) -> Result<Arc<Vec<u8>>, Vec<String>> {
        let key = (place.object, place.extent);
        let cached =
            self.cache.lock().iter().find(|(cached, _)| *cached == key).map(|(_, extent)| Arc::clone(extent));
        let extent = match cached {
            Some(extent) => extent,
            None => {
                let extent = Arc::new(self.extent((place.object, place.extent))?);
                let mut cache = self.cache.lock();
                cache.truncate(CACHED_EXTENTS - 1);
                cache.push_front((key, Arc::clone(&extent)));
                extent
            }
        };
        self.holds(&extent, place)
    }

    fn holds(&self, extent: &Arc<Vec<u8>>, place: Place) -> Result<Arc<Vec<u8>>, Vec<String>> {
        if usize::from(place.slot) < extent.len() / PAGE_BYTES {
            return Ok(Arc::clone(extent));
        }
        let object = self.objects[&place.object].name;
        Err(vec![format!("{object}: extent {} has fewer pages", place.extent)])
    }

    /// The pages of an extent.
    ///
    /// # Errors
    /// As [`Self::page_at`].
    pub(super) fn extent(&self, extent: ExtentKey) -> Result<Vec<u8>, Vec<String>> {
        READER.with_borrow_mut(|reader| {
            self.read_extent(extent, reader)?;
            Ok(reader.pages().to_vec())
        })
    }

    /// Reads and unpacks an extent from whichever copy is whole.
    ///
    /// # Errors
    /// As [`Self::page_at`].
    pub(super) fn read_extent(
        &self,
        (object, number): ExtentKey,
        reader: &mut ExtentReader,
    ) -> Result<(), Vec<String>> {
        let opened = &self.objects[&object];
        let mut tried = opened.unusable.clone();
        let id = ExtentId { object: opened.name, number };
        let place = opened.contents.extents.get(number as usize).copied().unwrap_or_default();
        for copy in &opened.copies {
            match reader.read(id, place, copy.reader.as_ref()) {
                Ok(()) => {
                    self.note(&tried[opened.unusable.len()..]);
                    return Ok(());
                }
                Err(malformed) => tried.push(format!("{}: extent {number}: {}", copy.place, malformed.0)),
            }
        }
        self.note(&tried);
        Err(tried)
    }

    /// Whether, by lengths and tables alone, an extent lies within a copy of its object.
    ///
    /// # Errors
    /// Each copy with what is wrong.
    pub(super) fn check_present(&self, (object, extent): ExtentKey) -> Result<(), Vec<String>> {
        let object = &self.objects[&object];
        if object.has(extent) {
            return Ok(());
        }
        let mut tried = object.unusable.clone();
        let short = |copy: &OpenCopy| format!("{}: extent {extent} is not there", copy.place);
        tried.extend(object.copies.iter().map(short));
        Err(tried)
    }

    fn note(&self, problems: &[String]) {
        if !problems.is_empty() {
            self.problems.lock().extend(problems.iter().cloned());
        }
    }
}

impl Opened {
    fn open(vault: &Vault, survey: &Survey, object: ObjectUse) -> Self {
        let name = object.name;
        let mut opened =
            Self { name, contents: Contents::default(), copies: Vec::new(), unusable: Vec::new() };
        for copy in survey.copies(name) {
            let home = vault.home(copy.home);
            match home.open(name) {
                Ok(reader) => {
                    opened.copies.push(OpenCopy { place: format!("{}/{name}", home.describe()), reader })
                }
                Err(error) => opened.unusable.push(wrong(home, name, error)),
            }
        }
        if opened.copies.len() < usize::from(object.copies) {
            opened.unusable.extend(vault.missing.iter().chain(&survey.failed).cloned());
        }
        if opened.copies.is_empty() {
            opened.unusable.push(format!("{name}: no copy of it is there"));
        }
        opened.find_extents();
        opened
    }

    /// Whether a copy is long enough to hold an extent.
    fn has(&self, extent: u32) -> bool {
        let Some(place) = self.contents.extents.get(extent as usize).filter(|place| place.len > 0) else {
            return false;
        };
        let end = place.offset.saturating_add(place.len.into());
        self.copies.iter().any(|copy| copy.reader.len() >= end)
    }

    /// Takes the table of extents from a copy that has a whole one; else finds what extents there are.
    fn find_extents(&mut self) {
        for copy in &self.copies {
            match object::contents_of_rest(self.name, copy.reader.as_ref()) {
                Ok(contents) => {
                    self.contents = contents;
                    return;
                }
                Err(malformed) => self.unusable.push(format!("{}: {}", copy.place, malformed.0)),
            }
        }
        let readers: Vec<&dyn ObjectReader> = self.copies.iter().map(|copy| copy.reader.as_ref()).collect();
        self.contents = object::scan_all(self.name, &readers);
    }
}
