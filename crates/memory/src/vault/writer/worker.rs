//! A thread of a writer: hashes pages, looks for them, packs the new ones into extents.

use crossbeam_channel::{Receiver, Sender};

use super::super::error::{Result, VaultError};
use super::super::extent::{self, ExtentId};
use super::super::known::Found;
use super::super::object::{self, Hash};
use super::super::pages::{Content, Entry, PageNumber, Place};
use super::super::stats::Stats;
use super::output::Output;
use super::{Batch, Shared, is_zero};
use crate::address::PAGE_BYTES;
use crate::class::PageClass;

/// The word of a page that was given, until a thread knows more; no entry's word.
pub(super) const TAKEN: u64 = 1;

/// Works until no more batches come; after a failure only empties them, so that whoever sends does not wait for ever.
pub(super) fn run(shared: &Shared, batches: &Receiver<Batch>, emptied: &Sender<Batch>) -> Stats {
    let mut worker = match Worker::new(shared) {
        Ok(worker) => Some(worker),
        Err(error) => {
            shared.fail(error);
            None
        }
    };
    for mut batch in batches {
        if let Some(working) = &mut worker
            && let Err(error) = working.take(&batch)
        {
            shared.fail(error);
            worker = None;
        }
        batch.pages.clear();
        batch.bytes.clear();
        let _ = emptied.try_send(batch);
    }
    let Some(mut worker) = worker else { return Stats::default() };
    if let Err(error) = worker.flush(PageClass::Critical).and_then(|()| worker.flush(PageClass::Clean)) {
        shared.fail(error);
    }
    worker.stats
}

/// What became of a page.
enum Kept {
    /// It was there.
    Found(Place),
    Stored(Place),
    /// It is not to be kept.
    Dropped,
}

/// Hashes pages, and packs into extents those that the store does not have.
pub(super) struct Worker<'a> {
    shared: &'a Shared,
    compressor: zstd::bulk::Compressor<'static>,
    critical: Open,
    clean: Open,
    stats: Stats,
}

/// An extent that has room.
#[derive(Default)]
struct Open {
    /// Reserved with the first page.
    number: Option<u32>,
    pages: Vec<u8>,
    hashes: Vec<Hash>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(shared: &'a Shared) -> Result<Self> {
        let level = shared.policy.level;
        let compressor = zstd::bulk::Compressor::new(level).map_err(|_| VaultError::Worker)?;
        let (critical, clean) = Default::default();
        Ok(Self { shared, compressor, critical, clean, stats: Stats::default() })
    }

    fn take(&mut self, batch: &Batch) -> Result<()> {
        for ((page, class), bytes) in batch.pages.iter().zip(batch.bytes.chunks_exact(PAGE_BYTES)) {
            let content = self.content(*page, *class, bytes)?;
            self.shared.set(*page, Entry { class: *class, content });
        }
        Ok(())
    }

    /// Where the page is from now on.
    fn content(&mut self, page: PageNumber, class: PageClass, bytes: &[u8]) -> Result<Content> {
        let hash = object::hash(bytes);
        if let Some(place) = self.shared.known.at_same_page(page, class, &hash) {
            self.count_found(class, place);
            return Ok(Content::At(place));
        }
        match self.keep(class, bytes, hash)? {
            Kept::Found(place) => {
                self.count_found(class, place);
                Ok(Content::At(place))
            }
            Kept::Stored(place) => {
                let is_clean = class == PageClass::Clean;
                *(if is_clean { &mut self.stats.stored_clean } else { &mut self.stats.stored_critical }) += 1;
                Ok(Content::At(place))
            }
            Kept::Dropped => {
                self.stats.dropped += 1;
                Ok(Content::Absent)
            }
        }
    }

    /// Where a page of the snapshot's tables is from now on.
    ///
    /// # Errors
    /// What the repositories say.
    pub(super) fn keep_table(&mut self, bytes: &[u8; PAGE_BYTES]) -> Result<Content> {
        if is_zero(bytes) {
            return Ok(Content::Zero);
        }
        match self.keep(PageClass::Critical, bytes, object::hash(bytes))? {
            Kept::Found(place) | Kept::Stored(place) => Ok(Content::At(place)),
            Kept::Dropped => Ok(Content::Absent),
        }
    }

    /// Finds the page in the store, or stores it.
    fn keep(&mut self, class: PageClass, bytes: &[u8], hash: Hash) -> Result<Kept> {
        let is_wanted = self.output(class).is_wanted();
        let offered = if is_wanted { Some(self.next_place(class)?) } else { None };
        match (self.shared.known.find_or_claim(class, &hash, || offered), offered) {
            (Found::At(place), _) => Ok(Kept::Found(place)),
            (Found::New, Some(place)) => {
                self.store(class, bytes, hash)?;
                Ok(Kept::Stored(place))
            }
            (Found::New, None) => Ok(Kept::Dropped),
        }
    }

    fn count_found(&mut self, class: PageClass, place: Place) {
        let is_own = self.shared.known.own.contains(&place.object);
        let count = match (class, is_own) {
            (PageClass::Clean, true) => &mut self.stats.same_clean,
            (PageClass::Clean, false) => &mut self.stats.older_clean,
            (_, true) => &mut self.stats.same_critical,
            (_, false) => &mut self.stats.older_critical,
        };
        *count += 1;
    }

    fn output(&self, class: PageClass) -> &'a Output {
        if class == PageClass::Clean { &self.shared.clean } else { &self.shared.critical }
    }

    fn open(&mut self, class: PageClass) -> &mut Open {
        if class == PageClass::Clean { &mut self.clean } else { &mut self.critical }
    }

    /// Where the next page of `class` will be stored.
    fn next_place(&mut self, class: PageClass) -> Result<Place> {
        let output = self.output(class);
        let open = self.open(class);
        let extent = match open.number {
            Some(number) => number,
            None => *open.number.insert(output.reserve()?),
        };
        let slot = open.hashes.len() as u8;
        Ok(Place { object: output.number, extent, slot })
    }

    fn store(&mut self, class: PageClass, bytes: &[u8], hash: Hash) -> Result<()> {
        let most = self.shared.policy.extent_pages;
        let open = self.open(class);
        open.pages.extend_from_slice(bytes);
        open.hashes.push(hash);
        if open.hashes.len() < most { Ok(()) } else { self.flush(class) }
    }

    /// Writes the open extent of `class`, if it has pages.
    ///
    /// # Errors
    /// What the repositories say.
    pub(super) fn flush(&mut self, class: PageClass) -> Result<()> {
        let output = self.output(class);
        let mut open = std::mem::take(self.open(class));
        let Some(number) = open.number else { return Ok(()) };
        if open.hashes.is_empty() {
            // The page that it was reserved for was found elsewhere: another may take its place.
            *self.open(class) = open;
            return Ok(());
        }
        let id = ExtentId { object: output.name, number };
        let packed = extent::pack(id, &open.pages, &mut self.compressor);
        output.append(number, &packed, &open.hashes)?;
        open.pages.clear();
        open.hashes.clear();
        *self.open(class) = Open { number: None, ..open };
        Ok(())
    }
}
