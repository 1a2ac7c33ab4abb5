//! The target of a merge while it is copied into, and how it comes to stand on what is left.

use std::path::Path;
use std::sync::Arc;

use vmstrata_store::{LocalFile, Store};
use vmstrata_types::{GuestOffset, GuestRange};

use super::commit::Commit;
use super::holes::Holes;
use super::relink::Relink;
use super::room::Room;
use super::stream::{After, Progress};
use crate::active::Active;
use crate::active::session::leave_clean;
use crate::changes::CommitTarget as _;
use crate::error::Result;
use crate::layers::Layers;
use crate::map::FrozenMap;

/// Guest bytes looked at in one step.
pub(crate) const WINDOW: u64 = 4 << 20;

/// The target, the way to what lies below it, and what will be left of that.
#[derive(Debug)]
pub(crate) struct Copier {
    /// What is copied into.
    pub(crate) target: Arc<Active>,
    /// The target over all layers below it; `None` when it is the active layer of a running disk, which has them.
    pub(crate) layers: Option<Layers>,
    pub(crate) after: Option<Arc<FrozenMap>>,
    pub(crate) way: Way,
    pub(crate) room: Room,
    holes: Holes,
    at: GuestOffset,
    is_finalized: bool,
}

/// Where layers are merged to.
#[derive(Debug)]
pub(crate) enum Way {
    /// Into the layer above them, which comes to stand on what is left.
    Stream(Relink),
    /// Into their base, which takes the place of the layer above them.
    Commit(Box<Commit>),
}

impl Copier {
    pub(crate) fn new(
        target: Arc<Active>,
        layers: Option<Layers>,
        after: Option<Arc<FrozenMap>>,
        way: Way,
        room: Room,
    ) -> Self {
        let (holes, at) = (Holes::default(), GuestOffset::ZERO);
        Self { target, layers, after, way, room, holes, at, is_finalized: false }
    }

    /// Into a layer that is frozen, or whose disk is not in use: `layers` are the target over all below it.
    ///
    /// # Errors
    /// No room for it; tables that cannot be read.
    pub(crate) fn of_frozen(
        target: Arc<Active>,
        layers: Layers,
        after: Option<Arc<FrozenMap>>,
        relink: Relink,
    ) -> Result<Self> {
        let later = After { map: after.as_deref(), holes: &Holes::default() };
        let demand = layers.demand(GuestRange::new(GuestOffset::ZERO, target.size()), later)?;
        let room = Room::find(&target.path, demand)?;
        Ok(Self::new(target, Some(layers), after, Way::Stream(relink), room))
    }

    /// What the target will stand on.
    pub(crate) fn after(&self) -> After<'_> {
        After { map: self.after.as_deref(), holes: &self.holes }
    }

    /// Copies what lies in `range` into a target that is frozen, or whose disk is not in use, until `most` bytes are written.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write.
    pub(crate) fn copy(&self, layers: &Layers, range: GuestRange, most: u64) -> Result<Progress> {
        match &self.way {
            Way::Stream(_) => layers.stream_range(range, self.after(), most),
            Way::Commit(commit) => commit.copy(layers, range, &self.holes, most),
        }
    }

    /// The next range to be looked at.
    pub(crate) fn window(&self) -> Option<GuestRange> {
        let (at, size) = (self.at.get(), self.target.size());
        (at < size).then(|| GuestRange::new(self.at, (WINDOW - at % WINDOW).min(size - at)))
    }

    /// Everything before `at` is done with.
    pub(crate) fn go_on_at(&mut self, at: GuestOffset) {
        self.at = at;
    }

    /// Brings what was copied into a frozen target to stable storage, and leaves a clean file. `wait` returns once no
    /// request can still see what was replaced. Done once, it is done; after an error it may be tried again.
    ///
    /// # Errors
    /// A host that cannot write or flush.
    pub(crate) fn finalize(&mut self, wait: impl FnOnce(&Way) -> Result<()>) -> Result<()> {
        if !self.is_finalized {
            self.target.changes.commit(&*self.target)?;
            if self.target.changes.has_reclaimable() {
                wait(&self.way)?;
            }
            leave_clean(&self.target, || ())?;
            self.is_finalized = true;
        }
        Ok(())
    }

    /// Ends early: what is copied into a frozen target stays, and nothing is leaked if the host lets it.
    pub(crate) fn leave(&mut self, wait: impl FnOnce(&Way) -> Result<()>) {
        // The active layer of a running disk is finalized by that.
        if self.layers.is_none() || self.is_finalized {
            return;
        }
        let finalized = self.finalize(wait);
        self.let_go();
        if let Err(error) = finalized {
            tracing::warn!(file = %self.target.path.display(), %error, "a merge ended early: clusters may be leaked until `vmstrata check --repair=leaks`");
        }
    }

    /// Lets the target stand on what is left below it, or in the place of the layer above, when all that was copied is on stable
    /// storage.
    ///
    /// # Errors
    /// A host that cannot write or flush: the chain is as before, or as it is to be.
    pub(crate) fn relink(&self) -> Result<()> {
        let relink = match &self.way {
            Way::Stream(relink) => relink,
            Way::Commit(commit) => return commit.take_place(&self.target),
        };
        let flush = || self.target.flush();
        let store = &*self.target.store;
        let write = || -> Result<()> {
            if relink.write_body(store)? {
                flush()?;
            }
            self.target.alloc.exclusively(|| relink.write_sector(store))?;
            flush()
        };
        write().map_err(|error| error.in_file(&self.target.path))
    }

    /// Lets others write what the target's readers do not see, an index for instance: requests that began before may keep
    /// its file open for a while.
    pub(crate) fn let_go(&self) {
        let_go(&*self.target.store, &self.target.path);
        if let Way::Commit(commit) = &self.way {
            commit.let_go();
        }
    }

    /// Where the target is once it has been relinked.
    pub(crate) fn path(&self) -> &Path {
        match &self.way {
            Way::Stream(_) => &self.target.path,
            Way::Commit(commit) => commit.path(),
        }
    }
}

/// Gives up the lock of who writes a layer.
pub(crate) fn let_go(store: &dyn Store, path: &Path) {
    if let Err(error) = store.local().map_or(Ok(()), LocalFile::give_up_writing) {
        tracing::warn!(file = %path.display(), %error, "a merged layer stays locked for a while");
    }
}
