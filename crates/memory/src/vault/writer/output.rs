//! An object of pages while it is written, all its copies at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::Builder;

use parking_lot::Mutex;

use super::super::Vault;
use super::super::error::{Result, VaultError};
use super::super::home::NewObject;
use super::super::info::ObjectUse;
use super::super::name::ObjectName;
use super::super::object::{self, ExtentPlace, Hash, MAX_EXTENTS};
use super::super::place::Share;

/// An object of the new snapshot.
#[derive(Debug)]
pub(super) struct Output {
    vault: Arc<Vault>,
    pub(super) name: ObjectName,
    /// Its number in the new snapshot.
    pub(super) number: u16,
    shares: Vec<Share>,
    next: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None before the first extent.
    copies: Copies,
    offset: u64,
    /// `[extent]`
    extents: Vec<ExtentPlace>,
    hashes: Vec<Vec<Hash>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// Copies of one object that is being written.
#[derive(Default)]
pub(super) struct Copies(Vec<(usize, Box<dyn NewObject>)>);

impl Copies {
    /// Begins an object in each of the homes.
    pub(super) fn create(vault: &Vault, name: ObjectName, shares: &[Share]) -> Result<Self> {
        let mut copies = Vec::with_capacity(shares.len());
        for share in shares {
            let home = vault.home(share.home);
            let object = home.create(name, share.copies).map_err(VaultError::home(home, "creating", name))?;
            copies.push((share.home, object));
        }
        Ok(Self(copies))
    }

    /// Adds bytes to all.
    pub(super) fn append(&mut self, vault: &Vault, name: ObjectName, bytes: &[u8]) -> Result<()> {
        self.0.iter_mut().try_for_each(|(home, object)| {
            object.append(bytes).map_err(VaultError::home(vault.home(*home), "writing", name))
        })
    }

    /// Brings all to stable storage, at the same time, as they are on different devices.
    pub(super) fn sync(&mut self, vault: &Vault, name: ObjectName) -> Result<()> {
        std::thread::scope(|scope| {
            let sync = |(home, object): &mut (usize, Box<dyn NewObject>)| {
                object.sync().map_err(VaultError::home(vault.home(*home), "flushing", name))
            };
            let start = |copy| Builder::new().name("sync".into()).spawn_scoped(scope, move || sync(copy));
            let threads: io::Result<Vec<_>> = self.0.iter_mut().map(start).collect();
            let threads = threads.map_err(VaultError::Thread)?;
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| VaultError::Worker)?)
        })
    }

    /// Gives all their name.
    pub(super) fn publish(self, vault: &Vault, name: ObjectName) -> Result<()> {
        self.0.into_iter().try_for_each(|(home, object)| {
            object.publish().map_err(VaultError::home(vault.home(home), "publishing", name))
        })
    }
}

impl Output {
    pub(super) fn new(vault: &Arc<Vault>, name: ObjectName, number: u16, shares: Vec<Share>) -> Self {
        Self {
            vault: Arc::clone(vault),
            name,
            number,
            shares,
            next: AtomicU32::new(0),
            state: Mutex::default(),
        }
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
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.offset == 0 {
            state.copies = Copies::create(&self.vault, self.name, &self.shares)?;
            state.copies.append(&self.vault, self.name, &object::header(self.name))?;
            state.offset = object::HEADER as u64;
        }
        state.copies.append(&self.vault, self.name, bytes)?;
        let index = number as usize;
        if index >= state.extents.len() {
            state.extents.resize(index + 1, ExtentPlace::default());
            state.hashes.resize(index + 1, Vec::new());
        }
        let (len, pages) = (bytes.len() as u32, hashes.len() as u8);
        state.extents[index] = ExtentPlace { offset: state.offset, len, pages };
        state.hashes[index] = hashes.to_vec();
        state.offset += bytes.len() as u64;
        Ok(())
    }

    /// Bytes that the object would have if it ended here.
    pub(super) fn len(&self) -> u64 {
        let state = self.state.lock();
        let pages = state.hashes.iter().map(Vec::len).sum();
        if state.offset == 0 { 0 } else { state.offset + object::trailer_len(state.extents.len(), pages) }
    }

    /// Ends the object and brings it to stable storage under its name; `None` when it has no pages.
    pub(super) fn finish(&self) -> Result<Option<ObjectUse>> {
        let state = std::mem::take(&mut *self.state.lock());
        if state.offset == 0 {
            return Ok(None);
        }
        let end = object::trailer(state.offset, &state.extents, &state.hashes);
        let mut copies = state.copies;
        copies.append(&self.vault, self.name, &end)?;
        copies.sync(&self.vault, self.name)?;
        copies.publish(&self.vault, self.name)?;
        let len = state.offset + end.len() as u64;
        let copies = self.shares.iter().map(|share| share.copies).sum();
        Ok(Some(ObjectUse { name: self.name, copies, len }))
    }

    /// Removes what was published, when the snapshot comes to nothing.
    pub(super) fn withdraw(&self) {
        drop(std::mem::take(&mut *self.state.lock()));
        for share in &self.shares {
            // What stays is collected later.
            let _ = self.vault.home(share.home).delete(self.name);
        }
    }
}
