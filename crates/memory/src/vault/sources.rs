//! The objects that a snapshot's pages lie in, open for reading.
//!
//! Any copy that has a page will do; one that is missing or damaged is passed over and noted.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::Vault;
use super::copies::{ObjectCopies, OpenCopy};
use super::extent::{ExtentReader, is_zero};
use super::info::ObjectUse;
use super::live;
use super::pages::Place;
use super::survey::Survey;

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
    objects: BTreeMap<u16, ObjectCopies>,
    /// Those unpacked last, first.
    cache: Mutex<VecDeque<Cached>>,
    problems: Mutex<BTreeSet<String>>,
}

impl Sources {
    /// Opens all copies of these objects.
    pub(super) fn open(vault: &Vault, survey: &Survey, objects: &BTreeMap<u16, ObjectUse>) -> Self {
        let open = |(number, object): (&u16, &ObjectUse)| (*number, open_copies(vault, survey, *object));
        let objects: BTreeMap<u16, ObjectCopies> = objects.iter().map(open).collect();
        let problems = objects.values().flat_map(|object| object.problems.iter().cloned()).collect();
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
        let has_page = |(cached, extent): &&Cached| {
            let page = extent.as_chunks().0.get(usize::from(place.slot));
            *cached == key && page.is_some_and(|page| !is_zero(page))
        };
        let cached = self.cache.lock().iter().find(has_page).map(|(_, extent)| Arc::clone(extent));
        if let Some(extent) = cached {
            return Ok(extent);
        }
        let wanted = live::places(place.slot, 1);
        let (have, tried, extent) = self.extent(key, wanted);
        if have != wanted {
            return Err(tried);
        }
        let extent = Arc::new(extent);
        let mut cache = self.cache.lock();
        cache.truncate(CACHED_EXTENTS - 1);
        cache.push_front((key, Arc::clone(&extent)));
        Ok(extent)
    }

    /// As [`Self::read_extent`], with the extent's pages.
    pub(super) fn extent(&self, key: ExtentKey, wanted: u64) -> (u64, Vec<String>, Vec<u8>) {
        READER.with_borrow_mut(|reader| {
            let (have, tried) = self.read_extent(key, wanted, reader);
            (have, tried, reader.pages().to_vec())
        })
    }

    /// Reads these places of an extent from the copies that have them. Returns those that are there and, where some are
    /// not, what is wrong with each copy.
    pub(super) fn read_extent(
        &self,
        (object, number): ExtentKey,
        wanted: u64,
        reader: &mut ExtentReader,
    ) -> (u64, Vec<String>) {
        let object = &self.objects[&object];
        let (have, mut tried) = object.read(number, wanted, reader);
        if !tried.is_empty() {
            self.problems.lock().extend(tried.iter().cloned());
        }
        if have != wanted {
            tried.splice(0..0, object.problems.iter().cloned());
        }
        (have, tried)
    }

    /// Whether, by lengths and tables alone, an extent lies within a copy of its object.
    ///
    /// # Errors
    /// Each copy with what is wrong.
    pub(super) fn check_present(&self, (object, extent): ExtentKey) -> Result<(), Vec<String>> {
        let object = &self.objects[&object];
        if object.has_room_for(extent) {
            return Ok(());
        }
        let mut tried = object.problems.clone();
        let short = |copy: &OpenCopy| format!("{}: extent {extent} is not there", copy.place);
        tried.extend(object.copies.iter().map(short));
        Err(tried)
    }
}

/// Opens the copies of an object; those that should be there and are not are among its problems.
fn open_copies(vault: &Vault, survey: &Survey, object: ObjectUse) -> ObjectCopies {
    let name = object.name;
    let mut opened = ObjectCopies::open(vault, survey, name);
    if opened.copies.len() < usize::from(object.copies) {
        opened.problems.extend(vault.missing.iter().chain(&survey.failed).cloned());
    }
    if opened.copies.is_empty() {
        opened.problems.push(format!("{name}: no copy of it is there"));
    }
    opened
}
