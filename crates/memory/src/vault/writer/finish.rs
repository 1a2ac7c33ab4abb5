//! The last step of a writer: everything to stable storage, and then the object that makes it a snapshot.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::error::{Result, VaultError};
use super::super::info::ObjectUse;
use super::super::metadata::{self, Metadata};
use super::super::name::{ObjectKind, ObjectName};
use super::super::pages::{self, PageNumber, Pages};
use super::super::survey::Survey;
use super::begin::refuse_second;
use super::output::Copies;
use super::{Closing, Saved, Writer};

impl Writer {
    /// Writes what is left, and makes it a snapshot. On failure nothing is listed.
    ///
    /// # Errors
    /// [`VaultError::Incomplete`] when pages of the machine were not given; [`VaultError::Limit`] and [`VaultError::Page`]
    /// for what cannot be described; [`VaultError::Exists`] when another writer took the name; what the homes say.
    pub fn finish(mut self, closing: Closing) -> Result<Saved> {
        check_blobs(&closing)?;
        self.stop()?;
        let words = self.shared.words.iter().map(|word| word.load(Ordering::Relaxed));
        let mut pages = Pages::new(words).map_err(|first| self.incomplete(first))?;
        let own = [self.shared.critical.finish()?, self.shared.clean.finish()?];
        self.stats.bytes_critical = own[0].map_or(0, |object| object.len);
        self.stats.bytes_clean = own[1].map_or(0, |object| object.len);
        self.stats.copies_critical = self.info.critical_copies.into();
        self.stats.copies_clean = self.info.clean_copies.into();
        self.info.objects = objects_in_use(&mut pages, own, &self.shared.known.older);
        let Closing { taken_ns, labels, disks, hiding, blobs } = closing;
        (self.info.taken_ns, self.info.labels, self.info.disks) = (taken_ns, labels, disks);
        self.info.stats = self.stats;
        self.info.check()?;
        let mut refill = std::mem::take(&mut self.refill);
        refill.sort_unstable_by_key(|(frame, _)| *frame);
        self.check_disks(&refill)?;
        let metadata = Metadata { info: self.info.clone(), pages, hiding, refill, blobs };
        self.stats.bytes_metadata = self.publish(&metadata)?;
        self.is_saved = true;
        Ok(Saved { id: self.info.id, stats: self.stats })
    }

    /// Lets the threads end, and takes what they counted.
    fn stop(&mut self) -> Result<()> {
        if !self.batch.pages.is_empty() {
            self.send()?;
        }
        self.send = None;
        for thread in self.threads.drain(..) {
            self.stats.add(thread.join().map_err(|_| VaultError::Worker)?);
        }
        self.shared.check()
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

    /// Writes the metadata to all its homes, and only then gives it its name.
    fn publish(&self, metadata: &Metadata) -> Result<u64> {
        let vault = &self.vault;
        let name = ObjectName { owner: self.info.id, kind: ObjectKind::Metadata };
        let bytes = metadata.encode();
        let mut copies = Copies::create(vault, name, &self.shares)?;
        copies.append(vault, name, &bytes)?;
        copies.sync(vault, name)?;
        refuse_second(&Survey::take(vault)?.snapshots(vault), &self.info)?;
        if let Err(error) = copies.publish(vault, name) {
            // Before its objects are withdrawn, so that it is never listed without them.
            let withdrawn = self.shares.iter().all(|share| vault.home(share.home).delete(name).is_ok());
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
    most("the number of blobs", closing.blobs.len(), metadata::MAX_BLOBS as u64)?;
    closing.blobs.iter().try_for_each(|(name, blob)| {
        most("the length of a blob's name", name.len(), metadata::MAX_BLOB_NAME as u64)?;
        most("the length of a blob", blob.len(), metadata::MAX_SECTION - metadata::MAX_BLOB_NAME as u64 - 2)
    })
}

/// The objects that pages lie in, and pages that count only those.
fn objects_in_use(pages: &mut Pages, own: [Option<ObjectUse>; 2], older: &[ObjectUse]) -> Vec<ObjectUse> {
    let all: Vec<Option<ObjectUse>> = own.into_iter().chain(older.iter().copied().map(Some)).collect();
    let mut is_used = vec![false; all.len()];
    for (object, _) in pages.objects() {
        is_used[usize::from(object)] = true;
    }
    let mut used = Vec::new();
    let mut new = vec![None; all.len()];
    for (index, object) in all.into_iter().enumerate() {
        // An object that was written stays with its snapshot, even if no page came to lie in it.
        if let Some(object) = object.filter(|_| is_used[index] || index < super::super::known::OWN_OBJECTS) {
            new[index] = Some(used.len() as u16);
            used.push(object);
        }
    }
    pages.renumber(&new);
    used
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
