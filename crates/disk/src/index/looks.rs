//! What is known of the files of a chain whose indices are looked at.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use vmstrata_store::FileIdentity;

use super::IndexLayer;
use super::digest::Seen;

/// What was learnt of files on the way, so that several indices of one chain can be loaded at the cost of one.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    pub(super) identities: HashMap<PathBuf, FileIdentity>,
    pub(super) seen: HashMap<PathBuf, Option<Seen>>,
    /// Files that turned out to be something else than an index says, whatever their time of change.
    pub(super) doubted: HashSet<PathBuf>,
}

impl Looks {
    /// Nothing learnt yet, but that time and length of some files do not tell enough.
    pub(crate) fn doubting(doubted: HashSet<PathBuf>) -> Self {
        Self { doubted, ..Self::default() }
    }

    /// Takes in what a layer is like now.
    pub(super) fn learn(&mut self, layer: &IndexLayer) {
        self.identities.insert(layer.path.clone(), layer.identity);
        self.seen.insert(layer.path.clone(), Some(Seen::as_recorded(&layer.record)));
    }
}
