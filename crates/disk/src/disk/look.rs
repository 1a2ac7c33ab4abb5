//! Looking at the files of frozen layers: whether they are what they were, also where no request reads them.
//!
//! A file that is being changed changes on; the chain is read anew when one look finds it as the last one did.

use std::collections::HashMap;
use std::path::Path;

use vmstrata_store::{FileIdentity, Gate};

use crate::files::same_state;
use crate::layers::Layers;

/// What the looks so far have found.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// The layer that is looked at next.
    next: usize,
    /// Files that are not what they were, as they were found last; `None` for one that is gone.
    pub(super) differing: HashMap<Box<Path>, Option<FileIdentity>>,
    /// Those that the chain could not be read anew with.
    pub(super) told: HashMap<Box<Path>, Option<FileIdentity>>,
}

impl Looked {
    /// Looks at some layers; one that was found changed before and is as it was then, unless the chain could not be read anew
    /// with it, and how it is.
    pub(super) fn find_changed(
        &mut self,
        layers: &Layers,
        most: usize,
    ) -> Option<(Box<Path>, Option<FileIdentity>)> {
        let map = layers.frozen.as_ref()?;
        let opener = layers.resources.files().opener();
        let mut changed = None;
        if self.next >= map.layers().len() {
            self.next = 0;
        }
        for layer in map.layers().skip(self.next).take(most) {
            self.next += 1;
            let now = opener.identity(&layer.path, &Gate::unrestricted()).ok();
            if now.is_some_and(|now| same_state(&now, &layer.identity)) {
                self.differing.remove(&layer.path);
                self.told.remove(&layer.path);
            } else if self.told.get(&layer.path) != Some(&now)
                && self.differing.insert(layer.path.clone(), now) == Some(now)
                && changed.is_none()
            {
                changed = Some((layer.path.clone(), now));
            }
        }
        changed
    }
}
