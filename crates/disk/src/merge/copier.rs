//! The target of a merge while it is copied into, and how it comes to stand on what is left.

use std::sync::Arc;

use vmstrata_types::{GuestOffset, GuestRange};

use super::relink::Relink;
use super::room::Room;
use crate::active::Active;
use crate::changes::CommitTarget as _;
use crate::disk::leave_clean;
use crate::error::Result;
use crate::layers::Layers;
use crate::map::FrozenMap;

/// Guest bytes looked at in one step.
pub(super) const WINDOW: u64 = 4 << 20;

/// The target, the way to what lies below it, and what will be left of that.
#[derive(Debug)]
pub(crate) struct Copier {
    pub(crate) target: Arc<Active>,
    /// The target over all layers below it; `None` when it is the active layer of a running disk, which has them.
    pub(crate) layers: Option<Layers>,
    pub(crate) after: Option<Arc<FrozenMap>>,
    pub(crate) relink: Relink,
    pub(crate) room: Room,
    at: GuestOffset,
}

impl Copier {
    pub(crate) fn new(
        target: Arc<Active>,
        layers: Option<Layers>,
        after: Option<Arc<FrozenMap>>,
        relink: Relink,
        room: Room,
    ) -> Self {
        Self { target, layers, after, relink, room, at: GuestOffset::ZERO }
    }

    /// The next range to be looked at.
    pub(super) fn window(&self) -> Option<GuestRange> {
        let (at, size) = (self.at.get(), self.target.size());
        (at < size).then(|| GuestRange::new(self.at, WINDOW.min(size - at)))
    }

    /// Everything before `at` is done with.
    pub(super) fn go_on_at(&mut self, at: GuestOffset) {
        self.at = at;
    }

    /// Brings what was copied into a frozen target to stable storage, and leaves a clean file. `wait` returns once no
    /// request can still see what was replaced.
    ///
    /// # Errors
    /// A host that cannot write or flush.
    pub(crate) fn settle(&self, wait: impl FnOnce()) -> Result<()> {
        self.target.changes.commit(&*self.target)?;
        leave_clean(&self.target, wait)
    }

    /// Lets the target stand on what is left below it, when all that was copied is on stable storage.
    ///
    /// # Errors
    /// A host that cannot write or flush: the target stands on the one or on the other.
    pub(crate) fn relink(&self) -> Result<()> {
        let flush = || self.target.flush();
        let store = &*self.target.store;
        let write = || -> Result<()> {
            if self.relink.write_body(store)? {
                flush()?;
            }
            self.target.alloc.exclusively(|| self.relink.write_sector(store))?;
            flush()
        };
        write().map_err(|error| error.in_file(&self.target.path))
    }

    /// Lets others write what the target's readers do not see, an index for instance: requests that began before may keep
    /// its file open for a while.
    pub(crate) fn let_go(&self) {
        if let Err(error) = self.target.store.give_up_writing() {
            tracing::warn!(file = %self.target.path.display(), %error, "a merged layer stays locked for a while");
        }
    }
}
