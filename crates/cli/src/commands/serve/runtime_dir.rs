//! Where volatile journals live: a directory of this user's own, in memory, that outlives the server but not the host.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// The directory `chosen`, or the default one, made if it is missing.
///
/// # Errors
/// When it cannot be made, is not this user's, or lets others write: a journal is replayed into the disk.
pub fn prepare(chosen: Option<&Path>) -> Result<PathBuf> {
    let dir = chosen.map_or_else(default_dir, Path::to_owned);
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.with_context(|| {
        format!("runtime directory {}: cannot be made; choose one with --runtime-dir", dir.display())
    })?;
    check_owner(&dir)?;
    Ok(dir)
}

fn default_dir() -> PathBuf {
    let user = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    match user {
        Some(dir) if !rustix::process::geteuid().is_root() => Path::new(&dir).join("vmstrata"),
        _ => PathBuf::from("/run/vmstrata"),
    }
}

fn check_owner(dir: &Path) -> Result<()> {
    let metadata = fs::metadata(dir).with_context(|| format!("runtime directory {}", dir.display()))?;
    let own = metadata.uid() == rustix::process::geteuid().as_raw();
    ensure!(
        own,
        "runtime directory {}: belongs to another user; choose one with --runtime-dir",
        dir.display()
    );
    let open_to_others = metadata.permissions().mode() & 0o022 != 0;
    ensure!(!open_to_others, "runtime directory {}: others may write to it; chmod go-w it", dir.display());
    Ok(())
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
        assert!(error.to_string().contains("others may write"), "{error:#}");
    }

    #[test]
    fn a_file_in_its_place_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = prepare(Some(file.path())).unwrap_err();
        assert!(format!("{error:#}").contains("--runtime-dir"), "{error:#}");
    }
}
