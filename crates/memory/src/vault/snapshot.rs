//! Reading a snapshot: any page at any time, or all of them as fast as they come.
//!
//! Whatever copy is whole will do; one that is missing or damaged is passed over and noted in [`Snapshot::problems`].

mod order;
mod stream;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use vmstrata_repo::Held;

use super::Vault;
use super::error::{Result, VaultError};
use super::info::Info;
use super::metadata::{Metadata, Outline};
use super::name::{ObjectId, ObjectKind, SnapshotId};
use super::pages::{self, Content, Entry};
use super::refill::Refill;
use super::sources::Sources;
use super::survey::Survey;
use crate::address::{Frame, PAGE_BYTES};
use crate::class::{ClassMap, PageClass};
use crate::hide::Hiding;

pub use order::{Order, Want};

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

/// A snapshot that is open for reading. What it needs is not collected before it is dropped.
pub struct Snapshot {
    metadata: Outline,
    blobs: BTreeMap<String, Vec<u8>>,
    hiding: OnceLock<Hiding>,
    refill: OnceLock<Vec<(Frame, Refill)>>,
    sources: Sources,
    _held: Vec<Held>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("title", &self.metadata.info.title()).finish_non_exhaustive()
    }
}

impl Snapshot {
    pub(super) fn open(vault: &Vault, id: SnapshotId, survey: &Survey, held: Vec<Held>) -> Result<Self> {
        let name = ObjectId { owner: id, kind: ObjectKind::Metadata };
        let metadata = survey
            .first_good(vault, name, |reader| Metadata::read(id, reader))
            .map_err(|tried| VaultError::MetadataLost { id, snapshot: id.to_string(), tried })?;
        let title = metadata.info.title();
        let sources = Sources::open(vault, survey, &metadata.info.objects);
        let read = Outline::of(metadata, &sources).and_then(|outline| {
            let blobs = outline.blobs(&sources)?;
            Ok((outline, blobs))
        });
        let (metadata, blobs) =
            read.map_err(|tried| VaultError::MetadataLost { id, snapshot: title, tried })?;
        let (hiding, refill) = (OnceLock::new(), OnceLock::new());
        Ok(Self { metadata, blobs, hiding, refill, sources, _held: held })
    }

    /// What is known of it.
    pub fn info(&self) -> &Info {
        &self.metadata.info
    }

    /// The class of each frame, holes critical.
    pub fn classes(&self) -> ClassMap {
        pages::classes(&self.metadata.info.layout, &self.metadata.pages)
    }

    /// What hides pages of clean cache. Read when it is first asked for.
    ///
    /// # Errors
    /// [`VaultError::MetadataLost`] when no copy of it can be read.
    pub fn hiding(&self) -> Result<&Hiding> {
        self.kept(&self.hiding, || self.metadata.hiding(&self.sources))
    }

    /// Clean pages that lie on the guest's disks, in order of frames. Read when it is first asked for.
    ///
    /// # Errors
    /// As [`Self::hiding`].
    pub fn refill(&self) -> Result<&[(Frame, Refill)]> {
        self.kept(&self.refill, || self.metadata.refill(&self.sources)).map(Vec::as_slice)
    }

    fn kept<'a, T>(
        &self,
        kept: &'a OnceLock<T>,
        read: impl FnOnce() -> Result<T, Vec<String>>,
    ) -> Result<&'a T> {
        if let Some(kept) = kept.get() {
            return Ok(kept);
        }
        let (id, snapshot) = (self.metadata.info.id, self.metadata.info.title());
        let read = read().map_err(|tried| VaultError::MetadataLost { id, snapshot, tried })?;
        Ok(kept.get_or_init(|| read))
    }

    /// What the writer kept under this name.
    pub fn blob(&self, name: &str) -> Option<&[u8]> {
        self.blobs.get(name).map(Vec::as_slice)
    }

    /// All that the writer kept by name.
    pub fn blobs(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.blobs
    }

    /// Copies that could not be read so far, each with the reason: there are fewer than there should be.
    pub fn problems(&self) -> Vec<String> {
        self.sources.problems()
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
        match self.sources.page_at(place) {
            Ok(extent) => {
                into.copy_from_slice(&extent[usize::from(place.slot) * PAGE_BYTES..][..PAGE_BYTES]);
                Ok(Page::Data)
            }
            Err(_) if class == PageClass::Clean => Ok(Page::Lost),
            Err(tried) => Err(VaultError::PageLost { snapshot: info.title(), frame, tried }),
        }
    }

    /// Checks, by lengths and tables alone, that each page the guest needs lies within a copy of its object. Quick for any
    /// size of memory; damage inside an extent is found when it is read.
    ///
    /// # Errors
    /// [`VaultError::PageLost`] names the first page that no copy can have.
    pub fn check_present(&self) -> Result<()> {
        for (first, _, Entry { class, content }) in self.metadata.pages.runs() {
            let Content::At(place) = content else { continue };
            if class != PageClass::Critical {
                continue;
            }
            let Err(tried) = self.sources.check_present((place.object, place.extent)) else { continue };
            let frame = pages::frame(&self.metadata.info.layout, first);
            return Err(VaultError::PageLost { snapshot: self.metadata.info.title(), frame, tried });
        }
        Ok(())
    }
}
