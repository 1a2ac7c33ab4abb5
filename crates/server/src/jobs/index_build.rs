//! Building the indices of a served disk's chain, a layer a step.

use std::path::{Path, PathBuf};

use vmstrata_disk::Format;
use vmstrata_disk::index::{IndexBuilder, IndexOptions, IndexOutcome};

use super::{Step, Work};
use crate::error::Error;

/// See the module documentation. The disk's own file is left alone: it is being written.
#[derive(Debug)]
pub(crate) struct IndexBuild {
    builder: IndexBuilder,
    next: usize,
}

impl IndexBuild {
    /// Reads the chain's headers.
    ///
    /// # Errors
    /// A chain that cannot be read.
    pub(crate) fn new(path: &Path, format: Option<Format>, allow_backing: &[PathBuf]) -> Result<Self, Error> {
        let options =
            IndexOptions { allow_backing: allow_backing.to_vec(), format, ..IndexOptions::default() };
        Ok(Self { builder: IndexBuilder::new(path, &options)?, next: 0 })
    }
}

impl Work for IndexBuild {
    type Action = ();
    const KIND: &'static str = "index_build";
    const UNIT: &'static str = "layers";

    fn total(&self) -> u64 {
        self.builder.layers() as u64
    }

    fn select(&mut self) -> Result<Option<()>, Error> {
        Ok((self.next < self.builder.layers()).then_some(()))
    }

    fn apply(&mut self, (): ()) -> Result<Step, Error> {
        self.next += 1;
        let Some(file) = self.builder.step() else { return Ok(Step::default()) };
        Ok(match file.outcome {
            IndexOutcome::Kept | IndexOutcome::NotNeeded => Step::default(),
            IndexOutcome::Built { bytes, .. } => Step { bytes, failure: None },
            IndexOutcome::Failed(error) => Step { bytes: 0, failure: Some(error.to_string()) },
        })
    }
}
