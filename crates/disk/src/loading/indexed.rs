//! Looking for an index on the way down a chain.
//!
//! The newest frozen layer's index knows all that is below, and no other file need be opened. Where it does not hold,
//! that of an older layer may: each layer on the way is asked, but for those above one that was changed.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_store::Gate;

use crate::chain::{OpenOptions, Top};
use crate::error::Result;
use crate::index::{self, Found, Index, Looks};
use crate::opener::Opener;

/// See the module documentation.
pub(super) struct Search<'a> {
    opener: &'a Arc<dyn Opener>,
    /// `None` when there is nothing to look for.
    gate: Option<Gate>,
    looks: Looks,
    /// A layer further down that was changed: until it is passed, no index can hold.
    changed: Option<PathBuf>,
    has_met_changes: bool,
}

impl<'a> Search<'a> {
    /// A search in the chain below `top`; of files in `doubted`, no index is believed without their digest.
    ///
    /// # Errors
    /// A directory that cannot be opened.
    pub(super) fn new(
        top: &Top,
        options: &OpenOptions,
        doubted: HashSet<PathBuf>,
        opener: &'a Arc<dyn Opener>,
    ) -> Result<Self> {
        // A disk without backing files needs no gate, whatever its directory is.
        let is_chain = top.head.as_ref().is_some_and(|head| head.backing_name.is_some());
        let gate = if is_chain { Some(options.gate(&top.path)?) } else { None };
        let looks = Looks::doubting(doubted);
        Ok(Self { opener, gate, looks, changed: None, has_met_changes: false })
    }

    /// Whether there was an index that did not hold because a layer was changed.
    pub(super) fn has_met_changes(&self) -> bool {
        self.has_met_changes
    }

    /// The index of `layer`, if all of it holds. Layers are asked from the top down.
    pub(super) fn ask(&mut self, layer: &Top) -> Option<Arc<Index>> {
        if let Some(changed) = &self.changed {
            if *changed == layer.path {
                self.changed = None;
            }
            return None;
        }
        let gate = self.gate.as_ref()?;
        if layer.is_in_session() || layer.window.is_some() {
            return None;
        }
        match index::load(layer, gate, self.opener, &mut self.looks) {
            Found::Whole(index) => Some(Arc::from(index)),
            Found::ChangedFrom(changed) => {
                tracing::warn!(layer = %layer.path.display(), changed = %changed.display(), "the index on disk is not used: a layer was changed since; `vmstrata index build` makes it anew");
                self.has_met_changes = true;
                self.changed = (changed != layer.path).then_some(changed);
                None
            }
            Found::Nothing => None,
        }
    }
}
