//! Where volatile journals live: a directory of this user's own, in memory, that outlives the server but not the host.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, RuntimeDirFault};

/// The directory `chosen`, or the default one, made if it is missing.
///
/// # Errors
/// When it cannot be made, is not this user's, or lets others write: a journal is replayed into the disk.
pub(crate) fn prepare(chosen: Option<&Path>) -> Result<PathBuf, Error> {
    let dir = chosen.map_or_else(default_dir, Path::to_owned);
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    match made.map_err(RuntimeDirFault::Make).and_then(|()| check_owner(&dir)) {
        Ok(()) => Ok(dir),
        Err(fault) => Err(Error::RuntimeDir { path: dir, fault }),
    }
}

/// Where servers of this user have their journals and their control socket unless told otherwise.
pub fn default_dir() -> PathBuf {
    let user = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    match user {
        Some(dir) if !rustix::process::geteuid().is_root() => Path::new(&dir).join("vmstrata"),
        _ => PathBuf::from("/run/vmstrata"),
    }
}

fn check_owner(dir: &Path) -> Result<(), RuntimeDirFault> {
    let metadata = fs::metadata(dir).map_err(RuntimeDirFault::Make)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        Err(RuntimeDirFault::Foreign)
    } else if metadata.permissions().mode() & 0o022 != 0 {
        Err(RuntimeDirFault::OpenToOthers)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_directory_is_made_for_the_user_alone() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("a/b");
        assert_eq!(prepare(Some(&dir)).unwrap(), dir);
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        prepare(Some(&dir)).unwrap();
    }

    #[test]
    fn a_directory_others_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = prepare(Some(dir.path())).unwrap_err();
        assert!(error.to_string().contains("others may write"), "{error}");
    }

    #[test]
    fn a_file_in_its_place_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = prepare(Some(file.path())).unwrap_err();
        assert!(error.to_string().contains("--runtime-dir"), "{error}");
    }
}
