//! Reading a snapshot: any page at any time, or all of them as fast as they come.
//!
//! Whatever copy is whole will do; one that is missing or damaged is passed over and noted in [`Snapshot::problems`].

mod order;
mod stream;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::Vault;
use super::bytes::Malformed;
use super::error::{Result, VaultError};
use super::extent::{ExtentId, ExtentReader};
use super::hiding::Hiding;
use super::home::{Held, ObjectReader};
use super::info::{Info, ObjectUse};
use super::metadata::Outline;
use super::name::{ObjectKind, ObjectName, SnapshotId};
use super::object::{self, Contents};
use super::pages::{self, Content, Entry, Place};
use super::refill::Refill;
use super::survey::{Survey, wrong};
use crate::address::{Frame, PAGE_BYTES};
use crate::class::{ClassMap, PageClass};

pub use order::{Order, Want};

/// Extents kept after their pages were read: neighbours are often read next. Some 8 MiB.
const CACHED_EXTENTS: usize = 64;

/// What was read of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Its bytes.
    Data,
    /// Zeros.
    Zero,
    /// Nothing that matters; zeros were filled in.
    Free,
    /// A page of clean cache of which no copy was stored, or none can be read: it must be hidden, or read from the guest's
    /// disk. Zeros were filled in.
    Lost,
}

/// An extent's object, as an index into the snapshot's table, and number.
type ExtentKey = (u16, u32);
/// An extent with its pages.
type Cached = (ExtentKey, Arc<Vec<u8>>);

thread_local! {
    /// For extents that are read one at a time.
    static READER: RefCell<ExtentReader> = RefCell::default();
}

/// A snapshot that is open for reading. What it needs is not collected before it is dropped.
pub struct Snapshot {
    metadata: Outline,
    hiding: OnceLock<Hiding>,
    refill: OnceLock<Vec<(Frame, Refill)>>,
    objects: Vec<Opened>,
    /// Those unpacked last, first.
    cache: Mutex<VecDeque<Cached>>,
    problems: Mutex<BTreeSet<String>>,
    _held: Vec<Held>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("title", &self.metadata.info.title()).finish_non_exhaustive()
    }
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

impl Snapshot {
    pub(super) fn open(vault: &Vault, id: SnapshotId, survey: &Survey, held: Vec<Held>) -> Result<Self> {
        let name = ObjectName { owner: id, kind: ObjectKind::Metadata };
        let metadata = survey
            .first_good(vault, name, |reader| Outline::read(id, reader))
            .map_err(|tried| VaultError::MetadataLost { id, tried })?;
        let objects: Vec<Opened> =
            metadata.info.objects.iter().map(|object| Opened::open(vault, survey, *object)).collect();
        let problems = objects.iter().flat_map(|object| object.unusable.iter().cloned()).collect();
        let (cache, problems) = (Mutex::default(), Mutex::new(problems));
        let (hiding, refill) = (OnceLock::new(), OnceLock::new());
        Ok(Self { metadata, hiding, refill, objects, cache, problems, _held: held })
    }

    /// What is known of it.
    pub fn info(&self) -> &Info {
        &self.metadata.info
    }

    /// The class of each frame, holes critical.
    pub fn classes(&self) -> ClassMap {
        pages::classes(&self.metadata.info.layout, &self.metadata.pages)
    }

    /// What hides pages of clean cache. Decoded when it is first asked for.
    ///
    /// # Errors
    /// [`VaultError::MetadataLost`] when it is not what it should be, although its checksum matches.
    pub fn hiding(&self) -> Result<&Hiding> {
        self.decoded(&self.hiding, || self.metadata.hiding.decode())
    }

    /// Clean pages that lie on the guest's disks, in order of frames. Decoded when it is first asked for.
    ///
    /// # Errors
    /// As [`Self::hiding`].
    pub fn refill(&self) -> Result<&[(Frame, Refill)]> {
        let disks = self.metadata.info.disks.len();
        self.decoded(&self.refill, || self.metadata.refill.decode(disks)).map(Vec::as_slice)
    }

    fn decoded<'a, T>(
        &self,
        kept: &'a OnceLock<T>,
        decode: impl FnOnce() -> Result<T, Malformed>,
    ) -> Result<&'a T> {
        if let Some(kept) = kept.get() {
            return Ok(kept);
        }
        let decoded = decode().map_err(|malformed| {
            let id = self.metadata.info.id;
            VaultError::MetadataLost { id, tried: vec![malformed.0.to_owned()] }
        })?;
        Ok(kept.get_or_init(|| decoded))
    }

    /// What the writer kept under this name.
    pub fn blob(&self, name: &str) -> Option<&[u8]> {
        self.metadata.blobs.get(name).map(Vec::as_slice)
    }

    /// All that the writer kept by name.
    pub fn blobs(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.metadata.blobs
    }

    /// Copies that could not be read so far, each with the reason: there are fewer than there should be.
    pub fn problems(&self) -> Vec<String> {
        self.problems.lock().iter().cloned().collect()
    }

    /// Reads a page. May be called by several threads.
    ///
    /// # Errors
    /// [`VaultError::PageLost`] for a page that the guest needs and no copy of which can be read; [`VaultError::Page`] for
    /// one that the machine does not have.
    pub fn read_page(&self, frame: Frame, into: &mut [u8; PAGE_BYTES]) -> Result<Page> {
        let info = &self.metadata.info;
        let number = pages::number(&info.layout, frame)
            .ok_or(VaultError::Page { frame, reason: "the machine has no such page" })?;
        let Entry { class, content } = self.metadata.pages.get(number);
        into.fill(0);
        let place = match (content, class) {
            (Content::Zero, _) => return Ok(Page::Zero),
            (Content::Absent, PageClass::Free) => return Ok(Page::Free),
            (Content::Absent, _) => return Ok(Page::Lost),
            (Content::At(place), _) => place,
        };
        match self.page_at(place) {
            Ok(extent) => {
                into.copy_from_slice(&extent[usize::from(place.slot) * PAGE_BYTES..][..PAGE_BYTES]);
                Ok(Page::Data)
            }
            Err(_) if class == PageClass::Clean => Ok(Page::Lost),
            Err(tried) => Err(VaultError::PageLost { snapshot: info.title(), frame, tried }),
        }
    }

    /// The extent that has a page.
    fn page_at(&self, place: Place) -> Result<Arc<Vec<u8>>, Vec<String>> {
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
        let object = self.objects[usize::from(place.object)].name;
        Err(vec![format!("{object}: extent {} has fewer pages", place.extent)])
    }

    /// The pages of an extent.
    fn extent(&self, extent: ExtentKey) -> Result<Vec<u8>, Vec<String>> {
        READER.with_borrow_mut(|reader| {
            self.read_extent(extent, reader)?;
            Ok(reader.pages().to_vec())
        })
    }

    /// Reads and unpacks an extent from whichever copy is whole.
    fn read_extent(&self, (object, number): ExtentKey, reader: &mut ExtentReader) -> Result<(), Vec<String>> {
        let opened = &self.objects[usize::from(object)];
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

    /// Checks, by lengths and tables alone, that each page the guest needs lies within a copy of its object. Quick for any
    /// size of memory; damage inside an extent is found when it is read.
    ///
    /// # Errors
    /// [`VaultError::PageLost`] names the first page that no copy can have.
    pub fn check_present(&self) -> Result<()> {
        for (first, _, Entry { class, content }) in self.metadata.pages.runs() {
            let Content::At(place) = content else { continue };
            let object = &self.objects[usize::from(place.object)];
            if class != PageClass::Critical || object.has(place.extent) {
                continue;
            }
            let mut tried = object.unusable.clone();
            let short = |copy: &OpenCopy| format!("{}: extent {} is not there", copy.place, place.extent);
            tried.extend(object.copies.iter().map(short));
            let frame = pages::frame(&self.metadata.info.layout, first);
            return Err(VaultError::PageLost { snapshot: self.metadata.info.title(), frame, tried });
        }
        Ok(())
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
