//! A directory on which disks are mounted as files.

use std::io;
use std::path::{Path, PathBuf};

use vmstrata_api as api;
use vmstrata_types::path_from_text;

use super::{SpecError, check_path};

/// A mount of all disks and their snapshots to open. Files are read; the disks' states of now are written only where that is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuseSpec {
    /// Where to mount.
    pub directory: PathBuf,
    /// Whether disks may be written.
    pub rw: bool,
    /// Whether they may be beside writers that come in by other exports that say so, too.
    pub share: bool,
    /// Whether other users than the server's may read.
    pub allow_other: bool,
}

impl TryFrom<api::FuseSpec> for FuseSpec {
    type Error = SpecError;

    fn try_from(asked: api::FuseSpec) -> Result<Self, SpecError> {
        let api::FuseSpec { directory, rw, share, allow_other } = asked;
        check_path("directory", &directory)?;
        Ok(Self { directory: path_from_text(&directory), rw, share, allow_other })
    }
}

impl From<&FuseSpec> for api::FuseSpec {
    fn from(spec: &FuseSpec) -> Self {
        let FuseSpec { directory, rw, share, allow_other } = spec.clone();
        Self { directory: directory.display().to_string(), rw, share, allow_other }
    }
}

impl FuseSpec {
    /// The same, its path seen from `directory`.
    #[must_use]
    pub(crate) fn seen_from(self, directory: &Path) -> Self {
        Self { directory: directory.join(&self.directory), ..self }
    }

    /// The same with an absolute path.
    ///
    /// # Errors
    /// This process's own directory is gone, and the path is relative.
    pub(crate) fn absolute(self) -> io::Result<Self> {
        Ok(Self { directory: std::path::absolute(&self.directory)?, ..self })
    }
}
