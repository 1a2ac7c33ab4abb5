//! An object of pages while it is written, all its copies at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::Builder;

use parking_lot::Mutex;
use vmstrata_repo::{NewObject, ObjectReader};

use super::super::Vault;
use super::super::error::{Result, VaultError};
use super::super::info::ObjectUse;
use super::super::name::ObjectId;
use super::super::object::{self, ExtentPlace, Hash, MAX_EXTENTS};
use super::super::place::Share;

/// An object of the new snapshot.
#[derive(Debug)]
pub(super) struct Output {
    vault: Arc<Vault>,
    pub(super) name: ObjectId,
    /// Its number in the new snapshot.
    pub(super) number: u16,
    shares: Vec<Share>,
    next: AtomicU32,
    /// `None` before the first extent.
    building: Mutex<Option<Building>>,
}

/// The copies of an object while extents are added.
#[derive(Default)]
pub(in super::super) struct Building {
    copies: Copies,
    offset: u64,
    /// `[extent]`
    extents: Vec<ExtentPlace>,
    hashes: Vec<Vec<Hash>>,
}

impl Building {
    /// Begins an object in each of the repositories.
    pub(in super::super) fn begin(vault: &Vault, name: ObjectId, shares: &[Share]) -> Result<Self> {
        let mut copies = Copies::create(vault, name, shares)?;
        copies.append(&object::header(name))?;
        Ok(Self { copies, offset: object::HEADER as u64, ..Self::default() })
    }

    /// Adds an extent that is packed.
    pub(in super::super) fn append(&mut self, number: u32, bytes: &[u8], hashes: Vec<Hash>) -> Result<()> {
        self.copies.append(bytes)?;
        let index = number as usize;
        if index >= self.extents.len() {
            self.extents.resize(index + 1, ExtentPlace::default());
            self.hashes.resize(index + 1, Vec::new());
        }
        let (len, pages) = (bytes.len() as u32, hashes.len() as u8);
        self.extents[index] = ExtentPlace { offset: self.offset, len, pages };
        self.hashes[index] = hashes;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    /// Bytes that the object would have if it ended here.
    fn len(&self) -> u64 {
        let pages = self.hashes.iter().map(Vec::len).sum();
        self.offset + object::trailer_len(self.extents.len(), pages)
    }

    /// Ends the object and brings it to stable storage; returns its copies, which have no name yet, and its length.
    pub(in super::super) fn end(mut self) -> Result<(Copies, u64)> {
        let end = object::trailer(self.offset, &self.extents, &self.hashes);
        self.copies.append(&end)?;
        self.copies.sync()?;
        Ok((self.copies, self.offset + end.len() as u64))
    }
}

impl std::fmt::Debug for Building {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Building").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// Copies of one object that is being written.
#[derive(Default)]
pub(in super::super) struct Copies(Vec<(usize, Box<dyn NewObject>)>);

impl Copies {
    /// Begins an object in each of the repositories.
    pub(in super::super) fn create(vault: &Vault, name: ObjectId, shares: &[Share]) -> Result<Self> {
        let create = |share: &Share| {
            let repository = vault.repository(share.repository);
            Ok((share.repository, repository.replace(&name.into(), share.copies)?))
        };
        shares.iter().map(create).collect::<Result<_>>().map(Self)
    }

    /// Adds bytes to all.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.iter_mut().try_for_each(|(_, object)| object.write(bytes))?)
    }

    /// Brings all to stable storage, at the same time, as they are on different devices.
    pub(super) fn sync(&mut self) -> Result<()> {
        std::thread::scope(|scope| {
            let threads: io::Result<Vec<_>> = self
                .0
                .iter_mut()
                .map(|(_, object)| Builder::new().name("sync".into()).spawn_scoped(scope, || object.sync()))
                .collect();
            let threads = threads.map_err(VaultError::Thread)?;
            threads.into_iter().try_for_each(|thread| Ok(thread.join().map_err(|_| VaultError::Worker)??))
        })
    }

    /// Opens what was brought to stable storage, in each repository.
    pub(in super::super) fn read_back(&self) -> Result<Vec<(usize, Box<dyn ObjectReader>)>> {
        self.0.iter().map(|(repository, object)| Ok((*repository, object.read_back()?))).collect()
    }

    /// Gives all their name.
    pub(in super::super) fn publish(self) -> Result<()> {
        Ok(self.0.into_iter().try_for_each(|(_, object)| object.finish())?)
    }
}

impl Output {
    pub(super) fn new(vault: &Arc<Vault>, name: ObjectId, number: u16, shares: Vec<Share>) -> Self {
        let vault = Arc::clone(vault);
        Self { vault, name, number, shares, next: AtomicU32::new(0), building: Mutex::default() }
    }

    /// Whether pages can be kept here at all.
    pub(super) fn is_wanted(&self) -> bool {
        !self.shares.is_empty()
    }

    /// The number of an extent that the caller may append; one that is not stays empty.
    pub(super) fn reserve(&self) -> Result<u32> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (value, most) = (i64::from(number), i64::from(MAX_EXTENTS) - 1);
        if value > most {
            return Err(VaultError::Limit { what: "the number of an extent", value, least: 0, most });
        }
        Ok(number)
    }

    /// Adds an extent that is packed.
    pub(super) fn append(&self, number: u32, bytes: &[u8], hashes: &[Hash]) -> Result<()> {
        let mut building = self.building.lock();
        let building = match &mut *building {
            Some(building) => building,
            none => none.insert(Building::begin(&self.vault, self.name, &self.shares)?),
        };
        building.append(number, bytes, hashes.to_vec())
    }

    /// Bytes that the object would have if it ended here.
    pub(super) fn len(&self) -> u64 {
        self.building.lock().as_ref().map_or(0, Building::len)
    }

    /// Ends the object and brings it to stable storage under its name; `None` when it has no pages.
    pub(super) fn finish(&self) -> Result<Option<ObjectUse>> {
        let Some(building) = self.building.lock().take() else { return Ok(None) };
        let (copies, len) = building.end()?;
        copies.publish()?;
        let copies = self.shares.iter().map(|share| share.copies).sum();
        Ok(Some(ObjectUse { name: self.name, copies, len }))
    }

    /// Removes what was published, when the snapshot comes to nothing.
    pub(super) fn withdraw(&self) {
        drop(self.building.lock().take());
        for share in &self.shares {
            // What stays is collected later.
            let _ = self.vault.repository(share.repository).delete(&self.name.into());
        }
    }
}
