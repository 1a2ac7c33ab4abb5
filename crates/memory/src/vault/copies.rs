//! An object of pages with all its copies open: any that has a page gives it.
//!
//! Copies need not lie alike. A compaction that was killed has replaced some of them, and a repository that was compacted by
//! itself has given back what only snapshots elsewhere need. So each copy is read by its own table; one whose table is damaged,
//! by those of the others, and at last by searching it.
//!
//! Invariant: no page that a snapshot needs is all zeros, as the writer notes those without storing them. A page of zeros in
//! an extent is one that was given back, and counts as missing from that copy.

use std::sync::OnceLock;

use vmstrata_repo::ObjectReader;

use super::Vault;
use super::bytes::Malformed;
use super::extent::{ExtentId, ExtentReader};
use super::name::ObjectId;
use super::object::{self, Contents, ExtentPlace};
use super::survey::{Survey, wrong};
use crate::address::PAGE_BYTES;

/// A copy of an object, open for reading.
pub(super) struct OpenCopy {
    pub(super) repository: usize,
    /// `REPOSITORY/OBJECT`.
    pub(super) place: String,
    pub(super) reader: Box<dyn ObjectReader>,
    pub(super) table: Result<Contents, Malformed>,
    /// What a search of it found.
    found: OnceLock<Contents>,
}

/// All copies of an object that can be opened.
pub(super) struct ObjectCopies {
    pub(super) name: ObjectId,
    pub(super) copies: Vec<OpenCopy>,
    /// Repositories with a copy that cannot be opened, and why.
    pub(super) unopened: Vec<(usize, String)>,
    /// Copies that cannot be opened or whose table is damaged, each with what is wrong.
    pub(super) problems: Vec<String>,
}

impl ObjectCopies {
    /// Opens all copies.
    pub(super) fn open(vault: &Vault, survey: &Survey, name: ObjectId) -> Self {
        let mut object = Self::none(name);
        for copy in survey.copies(name) {
            let repository = vault.repository(copy.repository);
            match repository.open(&name.into()) {
                Ok(reader) => {
                    object.add(copy.repository, format!("{}/{name}", repository.describe()), reader)
                }
                Err(error) => object.unopened.push((copy.repository, wrong(repository, name, error.source))),
            }
        }
        object.problems.extend(object.unopened.iter().map(|(_, problem)| problem.clone()));
        object
    }

    /// An object of one copy, which need not have its name yet.
    pub(super) fn of(name: ObjectId, repository: usize, reader: Box<dyn ObjectReader>) -> Self {
        let mut object = Self::none(name);
        object.add(repository, name.to_string(), reader);
        object
    }

    fn none(name: ObjectId) -> Self {
        Self { name, copies: Vec::new(), unopened: Vec::new(), problems: Vec::new() }
    }

    fn add(&mut self, repository: usize, place: String, reader: Box<dyn ObjectReader>) {
        let table = object::contents_of_rest(self.name, reader.as_ref());
        if let Err(malformed) = &table {
            self.problems.push(format!("{place}: {}", malformed.0));
        }
        self.copies.push(OpenCopy { repository, place, reader, table, found: OnceLock::new() });
    }

    /// More than the number of any extent.
    pub(super) fn extents(&self) -> u32 {
        let tables = self.copies.iter().filter_map(|copy| copy.table.as_ref().ok());
        let most = tables.map(|table| table.extents.len()).max();
        let most = most.or_else(|| self.copies.iter().map(|copy| self.found(copy).extents.len()).max());
        most.unwrap_or(0) as u32
    }

    fn found<'a>(&self, copy: &'a OpenCopy) -> &'a Contents {
        copy.found.get_or_init(|| object::scan(self.name, copy.reader.as_ref()))
    }

    /// Where an extent may lie in a copy.
    fn places<'a>(&'a self, copy: &'a OpenCopy, extent: u32) -> impl Iterator<Item = ExtentPlace> + 'a {
        let own = copy.table.as_ref().ok().map(|table| table.place(extent));
        let others = self.copies.iter().filter_map(|other| other.table.as_ref().ok());
        let others =
            others.map(move |table| table.place(extent)).take(if own.is_some() { 0 } else { usize::MAX });
        let is_lost = own.is_none();
        let found = std::iter::once_with(move || self.found(copy).place(extent)).take(usize::from(is_lost));
        own.into_iter().chain(others).chain(found).filter(|place| place.len > 0)
    }

    /// Where an extent lies in the first copy that says so: extents in this order lie as in that copy.
    pub(super) fn offset(&self, extent: u32) -> u64 {
        let place = self.copies.iter().find_map(|copy| self.places(copy, extent).next());
        place.map_or(u64::MAX, |place| place.offset)
    }

    /// Whether a copy is long enough to hold an extent.
    pub(super) fn has_room_for(&self, extent: u32) -> bool {
        let ends = |place: ExtentPlace| place.offset.saturating_add(place.len.into());
        self.copies.iter().any(|copy| self.places(copy, extent).any(|place| ends(place) <= copy.reader.len()))
    }

    /// Reads an extent of one copy.
    pub(super) fn read_copy(
        &self,
        copy: &OpenCopy,
        extent: u32,
        reader: &mut ExtentReader,
    ) -> Result<(), Malformed> {
        let id = ExtentId { object: self.name, number: extent };
        let mut read = Err(Malformed("it is not there"));
        for place in self.places(copy, extent) {
            read = reader.read(id, place, copy.reader.as_ref());
            if read.is_ok() {
                break;
            }
        }
        read
    }

    /// Reads these places of an extent from the first copy that has them all, or from several together. Returns the places
    /// that there are, and what was wrong with the copies that were tried.
    pub(super) fn read(&self, extent: u32, wanted: u64, reader: &mut ExtentReader) -> (u64, Vec<String>) {
        let (mut have, mut together, mut tried) = (0, Vec::new(), Vec::new());
        for copy in &self.copies {
            let problem = match self.read_copy(copy, extent, reader) {
                Ok(()) => {
                    let there = reader.filled() & wanted;
                    if there == wanted {
                        return (wanted, tried);
                    }
                    add_pages(&mut together, reader.pages(), there & !have);
                    have |= there;
                    "pages of it were given back"
                }
                Err(malformed) => malformed.0,
            };
            tried.push(format!("{}: extent {extent}: {problem}", copy.place));
            if have == wanted {
                break;
            }
        }
        reader.put(together);
        (have, tried)
    }
}

fn add_pages(into: &mut Vec<u8>, pages: &[u8], places: u64) {
    into.resize(into.len().max(pages.len()), 0);
    let both = into.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().zip(pages.as_chunks::<PAGE_BYTES>().0);
    for (place, (into, page)) in both.enumerate() {
        if places >> place & 1 == 1 {
            *into = *page;
        }
    }
}
