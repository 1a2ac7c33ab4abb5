//! What people ask of a cache, layer by layer: what stays, and what goes.

use std::io;
use std::sync::Arc;

use vmstrata_store::Place;

use super::{CACHE_BYTES_MIN, Cache, Cached, PINNED_SUFFIX, PRIVATE, Retired, Room, State};
use crate::error::{Error, Result};
use crate::head::ObjectId;

impl Cache {
    /// Whether a layer gives up nothing.
    pub(crate) fn is_pinned(&self, layer: &Cached) -> bool {
        self.room.lock().pinned.contains(&layer.id)
    }

    /// Has these layers give up nothing from now on, also in later processes.
    ///
    /// # Errors
    /// [`Error::NoRoom`] where nothing would be left for the chunks of others; whatever the host reports.
    pub(crate) fn pin(&self, layers: &[&Arc<Cached>]) -> Result<()> {
        let mut room = self.room.lock();
        self.check_room(room.bytes_with(layers))?;
        for layer in layers {
            let place = self.pinned_place(layer.id);
            place.open_or_create(PRIVATE).map_err(|source| Error::Cache { path: place.path(), source })?;
            room.pinned.insert(layer.id);
        }
        Ok(())
    }

    /// Lets them give up chunks again.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn unpin(&self, layers: &[&Arc<Cached>]) -> Result<()> {
        let mut room = self.room.lock();
        for layer in layers {
            let place = self.pinned_place(layer.id);
            match place.remove() {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::Cache { path: place.path(), source });
                }
                _ => room.pinned.remove(&layer.id),
            };
        }
        self.shrink(&mut room);
        Ok(())
    }

    /// Refuses layers that it cannot have here together, beside those that stay.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub(crate) fn check_fill(&self, layers: &[&Arc<Cached>]) -> Result<()> {
        self.check_room(self.room.lock().bytes_with(layers))
    }

    /// Refuses to keep so many bytes of layers: reads of others need room.
    fn check_room(&self, wanted: u64) -> Result<()> {
        let room = self.budget.saturating_sub(CACHE_BYTES_MIN);
        if wanted <= room { Ok(()) } else { Err(Error::NoRoom { path: self.path(), wanted, room }) }
    }

    /// Pins that were made when there was more room hold nothing until there is again.
    pub(super) fn check_pins(&self) {
        let mut room = self.room.lock();
        let bytes = room.pinned_bytes();
        if let Err(error) = self.check_room(bytes) {
            tracing::warn!(%error, "nothing is pinned in the cache until it may be larger");
            room.pinned.clear();
        }
    }

    /// Gives up all that it has of a layer which is not pinned, but for what is fetched at the moment. Returns the bytes.
    ///
    /// # Errors
    /// [`Error::Pinned`]; [`Error::Cache`] for one that gives up chunks already.
    pub(crate) fn give_up(&self, layer: &Arc<Cached>) -> Result<u64> {
        let mut room = self.room.lock();
        if room.pinned.contains(&layer.id) {
            return Err(Error::Pinned { layer: layer.id });
        }
        self.reclaim(&mut room);
        if room.gives_up(layer) {
            let (path, why) =
                (self.chunks_place(layer.id).path(), "it gives up chunks already, which are read: try again");
            return Err(Error::Cache { path, source: io::Error::new(io::ErrorKind::ResourceBusy, why) });
        }
        let is_kept = |chunk: &usize| matches!(layer.state(*chunk), State::HERE | State::FOUND);
        let chunks: Vec<usize> = (0..layer.chunks.len()).filter(is_kept).collect();
        chunks.iter().for_each(|&chunk| layer.set(chunk, State::RETIRED));
        let retired = Retired::new(Arc::clone(layer), chunks);
        let bytes = retired.bytes();
        room.retired.push(retired);
        self.reclaim(&mut room);
        Ok(bytes)
    }

    fn pinned_place(&self, id: ObjectId) -> Place {
        self.dir.place(format!("{id}{PINNED_SUFFIX}"))
    }
}

impl Room {
    fn pinned_bytes(&self) -> u64 {
        let pinned = self.layers.iter().filter(|layer| self.pinned.contains(&layer.id));
        pinned.map(|layer| layer.len).sum()
    }

    /// Bytes of the pinned layers and of these.
    fn bytes_with(&self, layers: &[&Arc<Cached>]) -> u64 {
        let more = layers.iter().filter(|layer| !self.pinned.contains(&layer.id));
        self.pinned_bytes() + more.map(|layer| layer.len).sum::<u64>()
    }
}
