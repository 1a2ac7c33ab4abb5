//! A file and its manifest cannot be replaced in one step: the new manifest lies beside the old one first, then the file is
//! replaced, then the manifest. A reader that finds both takes the one that describes the file.

use std::path::{Path, PathBuf};

use vmstrata_disk::{IoContext as _, Result};
use vmstrata_store::Place;

use crate::manifest::{Manifest, manifest_path};
use crate::verify::check_file;

/// What is added to a manifest's name while the file that it is of is not there yet.
const NEW_SUFFIX: &str = ".new";

/// The manifest of a backup that gets its name at any moment.
#[derive(Debug)]
pub(crate) struct Coming {
    new: PathBuf,
    path: PathBuf,
}

impl Coming {
    /// Of the backup at `file`.
    fn of(file: &Path) -> Self {
        let path = manifest_path(file);
        let mut new = path.as_os_str().to_owned();
        new.push(NEW_SUFFIX);
        Self { new: new.into(), path }
    }

    /// Writes `manifest` to where it does not count before `file` is the one that it describes.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn write(manifest: &Manifest, file: &Path) -> Result<Self> {
        let coming = Self::of(file);
        manifest.write(&coming.new, true)?;
        Ok(coming)
    }

    /// The file has its name: the manifest gets its own.
    ///
    /// # Errors
    /// Whatever the host reports: the backup is whole all the same.
    pub(crate) fn arrive(self) -> Result<()> {
        let arrive = || {
            let place = Place::of(&self.path)?;
            Place::of(&self.new)?.rename(&place)?;
            place.directory().sync()
        };
        arrive().while_trying("name the backup's manifest").map_err(|error| error.in_file(&self.path))
    }

    /// The file did not get its name.
    pub(crate) fn leave(self) {
        // One that stays describes no file, and the next backup replaces it.
        let _ = Place::of(&self.new).and_then(|new| new.remove());
    }
}

impl Manifest {
    /// Reads and checks the manifest of the backup at `file`. One that a killed process did not come to name counts if the
    /// file is the one it describes: then all of the file is read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn of(file: &Path) -> Result<Self> {
        let Coming { new, path } = Coming::of(file);
        match Self::read(&new) {
            Ok(manifest) if check_file(file, &manifest, &mut |_| true).is_ok() => Ok(manifest),
            _ => Self::read(&path),
        }
    }
}
