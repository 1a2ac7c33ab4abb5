//! States that were named by their files, of which the files themselves say nothing.
//!
//! What is known of a snapshot is in the layer above it: its name, when it was taken, and the format of its file.

use std::path::Path;

use vmstrata_store::Gate;

use super::list::{State, list};
use crate::chain::OpenOptions;
use crate::error::Result;
use crate::opener::{LocalFiles, Opener as _};

impl State {
    /// The state whose newest layer is the file at `path`, of which nothing else is known.
    pub fn of_file(path: &Path) -> Self {
        Self { path: path.to_owned(), format: None, info: None }
    }

    /// The state with what the chain of a `newer` one says of it, if it is one of that chain's layers. Reads headers only.
    ///
    /// # Errors
    /// A file that is not there; otherwise as [`list`].
    pub fn as_known_to(self, newer: &Self, options: &OpenOptions) -> Result<Self> {
        if self.info.is_some() {
            return Ok(self);
        }
        let file = |path: &Path| LocalFiles.identity(path, &Gate::unrestricted()).map(|found| found.file);
        let own = file(&self.path)?;
        for layer in list(&newer.path, &OpenOptions { format: newer.format, ..options.clone() })? {
            if file(&layer.layer)? == own {
                return Ok(Self { format: self.format.or(Some(layer.format)), info: layer.info, ..self });
            }
        }
        Ok(self)
    }

    /// When it was taken, in ns since 1970, if known: no two snapshots have the same.
    pub fn taken_ns(&self) -> Option<u64> {
        self.info.as_ref().map(|info| info.taken_ns)
    }
}
