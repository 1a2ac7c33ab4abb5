//! Building the indices of a served disk's chain, a layer a step.

use std::sync::Arc;

use vmstrata_disk::index::{IndexOutcome, IndexedFile};
use vmstrata_disk::{Disk, Indexing};
use vmstrata_job::{Next, Step, Work};

use super::Kind;
use crate::error::Error;

/// The kind of [`IndexBuild`].
pub(crate) const INDEX_BUILD: Kind =
    Kind { name: "index_build", unit: "layers", removes_files: false, yields: true };

/// See the module documentation. The disk's own file is left alone: it is being written.
#[derive(Debug)]
pub(crate) struct IndexBuild {
    indexing: Indexing,
}

impl IndexBuild {
    /// Reads the chain's headers. `keep_unread` keeps the indices that hold without reading their pages.
    ///
    /// # Errors
    /// A chain that cannot be read.
    pub(crate) fn new(disk: &Arc<Disk>, keep_unread: bool) -> Result<Self, Error> {
        Ok(Self { indexing: Indexing::of_disk(disk, keep_unread)? })
    }
}

impl Work for IndexBuild {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        self.indexing.layers() as u64
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        Ok(if self.indexing.is_done() { Next::End } else { Next::Step(()) })
    }

    fn apply(&mut self, (): (), _: u64) -> Result<Step, Error> {
        let Some(IndexedFile { outcome, .. }) = self.indexing.step()? else { return Ok(Step::default()) };
        Ok(match outcome {
            IndexOutcome::Kept(_) | IndexOutcome::NotNeeded => Step::default(),
            IndexOutcome::Built { bytes, .. } => Step { bytes, ..Step::default() },
            IndexOutcome::Failed(error) => Step { failure: Some(error.to_string()), ..Step::default() },
        })
    }
}
