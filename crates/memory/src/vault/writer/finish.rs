//! The last step of a writer: everything to stable storage, and then the object that makes it a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::error::{Result, VaultError};
use super::super::info::ObjectUse;
use super::super::metadata::Metadata;
use super::super::name::{ObjectId, ObjectKind};
use super::super::pages::{self, PageNumber, Pages};
use super::super::survey::Survey;
use super::super::tables::{self, Index, Tables};
use super::begin::refuse_second;
use super::output::Copies;
use super::worker::Worker;
use super::{Closing, Saved, Writer};
use crate::address::PAGE_BYTES;
use crate::class::PageClass;

impl Writer {
    /// Writes what is left, and makes it a snapshot. On failure nothing is listed.
    ///
    /// # Errors
    /// [`VaultError::Incomplete`] when pages of the machine were not given; [`VaultError::Limit`] and [`VaultError::Page`]
    /// for what cannot be described; [`VaultError::Exists`] when another writer took the name; what the repositories say.
    pub fn finish(mut self, closing: Closing) -> Result<Saved> {
        check_blobs(&closing)?;
        self.stop()?;
        let words = self.shared.words.iter().map(|word| word.load(Ordering::Relaxed));
        let pages = Pages::new(words).map_err(|first| self.incomplete(first))?;
        let Closing { taken_ns, labels, disks, hiding, blobs } = closing;
        (self.info.taken_ns, self.info.labels, self.info.disks) = (taken_ns, labels, disks);
        let mut refill = std::mem::take(&mut self.refill);
        refill.sort_unstable_by_key(|(frame, _)| *frame);
        self.check_disks(&refill)?;
        self.stats.bytes_critical = self.shared.critical.len();
        let tables = Tables { pages: &pages, hiding: &hiding, refill: &refill, blobs: &blobs };
        let tables = self.write_tables(&tables)?;
        let own = [self.shared.critical.finish()?, self.shared.clean.finish()?];
        let len = |object: Option<ObjectUse>| object.map_or(0, |object| object.len);
        self.stats.bytes_metadata = len(own[0]) - self.stats.bytes_critical;
        self.stats.bytes_clean = len(own[1]);
        self.stats.copies_critical = self.info.critical_copies.into();
        self.stats.copies_clean = self.info.clean_copies.into();
        self.info.stats = self.stats;
        self.info.objects = self.objects_in_use(pages.objects().chain(tables.objects()), own);
        let is_older = |object: &ObjectUse| object.name.owner != self.info.id;
        let needs_older = self.info.objects.values().any(is_older);
        self.info.step = if needs_older { self.shared.known.step } else { 0 };
        self.info.check()?;
        self.stats.bytes_metadata += self.publish(&Metadata { info: self.info.clone(), tables })?;
        self.is_saved = true;
        let saved = Saved { id: self.info.id, is_full: self.info.is_full(), stats: self.stats };
        let vault = Arc::clone(&self.vault);
        // Lets go of the repositories.
        drop(self);
        vault.collect_if_idle();
        Ok(saved)
    }

    /// Lets the threads end, and takes what they counted.
    fn stop(&mut self) -> Result<()> {
        if !self.batch.pages.is_empty() {
            self.send()?;
        }
        self.send = None;
        for thread in self.threads.drain(..) {
            self.stats.add(&thread.join().map_err(|_| VaultError::Worker)?);
        }
        self.shared.check()
    }

    /// Adds the pages of the tables to the critical ones, in extents of their own: whoever reads them reads little else.
    fn write_tables(&self, tables: &Tables<'_>) -> Result<Index> {
        let mut worker = Worker::new(&self.shared)?;
        let index = tables.write(&mut |page| worker.keep_table(page))?;
        worker.flush(PageClass::Critical)?;
        Ok(index)
    }

    /// Of the objects that pages may lie in, those `used`. One that was written stays with its snapshot, even if no page came
    /// to lie in it.
    fn objects_in_use(
        &self,
        used: impl Iterator<Item = (u16, PageClass)>,
        own: [Option<ObjectUse>; 2],
    ) -> BTreeMap<u16, ObjectUse> {
        let known = &self.shared.known;
        let used: BTreeSet<u16> = used.map(|(number, _)| number).collect();
        let older = known.older.iter().filter(|(number, _)| used.contains(number));
        let own = known.own.into_iter().zip(own).filter_map(|(number, object)| Some((number, object?)));
        older.map(|(number, object)| (*number, *object)).chain(own).collect()
    }

    fn incomplete(&self, first: PageNumber) -> VaultError {
        let missing = self.shared.words.iter().filter(|word| word.load(Ordering::Relaxed) == 0).count();
        let first = pages::frame(&self.info.layout, first);
        VaultError::Incomplete { missing: missing as u64, first }
    }

    fn check_disks(&self, refill: &[(crate::Frame, super::Refill)]) -> Result<()> {
        let wrong = refill.iter().find(|(_, refill)| {
            refill.pieces.iter().any(|piece| usize::from(piece.disk) >= self.info.disks.len())
        });
        match wrong {
            Some((frame, _)) => Err(VaultError::Page { frame: *frame, reason: "it lies on an unknown disk" }),
            None => Ok(()),
        }
    }

    /// Writes the metadata to all its repositories, and only then gives it its name.
    fn publish(&self, metadata: &Metadata) -> Result<u64> {
        let vault = &self.vault;
        let name = ObjectId { owner: self.info.id, kind: ObjectKind::Metadata };
        let bytes = metadata.encode();
        let mut copies = Copies::create(vault, name, &self.shares)?;
        copies.append(&bytes)?;
        copies.sync()?;
        refuse_second(&Survey::take(vault)?.snapshots(vault), &self.info)?;
        if let Err(error) = copies.publish() {
            // Before its objects are withdrawn, so that it is never listed without them.
            let withdrawn = self
                .shares
                .iter()
                .all(|share| vault.repository(share.repository).delete(&name.into()).is_ok());
            if !withdrawn {
                tracing::warn!("{}: half published, and could not be withdrawn", self.info.title());
            }
            return Err(error);
        }
        Ok(bytes.len() as u64)
    }
}

fn check_blobs(closing: &Closing) -> Result<()> {
    let most = |what, value: usize, most: u64| {
        let (value, most) = (value.try_into().unwrap_or(i64::MAX), most as i64);
        if value <= most { Ok(()) } else { Err(VaultError::Limit { what, value, least: 0, most }) }
    };
    most("the number of blobs", closing.blobs.len(), tables::MAX_BLOBS as u64)?;
    closing.blobs.iter().try_for_each(|(name, blob)| {
        most("the length of a blob's name", name.len(), tables::MAX_BLOB_NAME as u64)?;
        most("the length of a blob", blob.len(), tables::MAX_PAGES * PAGE_BYTES as u64)
    })
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.send = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if !self.is_saved && self.is_alone() {
            self.shared.critical.withdraw();
            self.shared.clean.withdraw();
        }
    }
}

impl Writer {
    /// Whether no copy of the metadata is there, so that nobody needs the objects.
    fn is_alone(&self) -> bool {
        let survey = Survey::take(&self.vault);
        Arc::strong_count(&self.shared) == 1
            && survey.is_ok_and(|survey| survey.failed.is_empty() && !survey.has_snapshot(self.info.id))
    }
}
