//! Opening the file of a memory backend, and making sure that it is the one QEMU has.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::machine::{Backend, MachineError};

/// What QEMU's names of files it makes in a directory begin with.
const MADE_BY_QEMU: &str = "qemu_back_mem.";
/// Descriptors of QEMU that are looked at.
const DESCRIPTORS_MAX: usize = 100_000;

/// Opens the memory of `backend` of the QEMU with process id `pid`, for reading.
pub(super) fn open(backend: &Backend, pid: u32) -> Result<File, MachineError> {
    let refuse = |why: String| MachineError::File { id: backend.id.clone(), path: backend.path.clone(), why };
    let descriptors = descriptors(pid);
    let file = if backend.path.is_dir() {
        let made = made_in(&descriptors, backend);
        let made = made.ok_or_else(|| {
            refuse(
                "a directory, and QEMU's file in it is not to be found: name a file in mem-path instead"
                    .to_owned(),
            )
        })?;
        File::open(made)
    } else if let Some(removed) = removed(&descriptors, backend) {
        File::open(removed)
    } else {
        File::open(&backend.path)
    };
    let file = file.map_err(|error| refuse(error.to_string()))?;
    let metadata = file.metadata().map_err(|error| refuse(error.to_string()))?;
    if metadata.len() < backend.bytes {
        return Err(refuse(format!("has {} bytes of {}", metadata.len(), backend.bytes)));
    }
    if !is_held(&descriptors, pid, &metadata) {
        return Err(refuse(format!(
            "is not the file that QEMU (process {pid}) has: it was replaced since QEMU started, or is another user's"
        )));
    }
    Ok(file)
}

/// The process's open files, as links below `/proc`; none when this user may not look.
fn descriptors(pid: u32) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    entries.take(DESCRIPTORS_MAX).filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// The file that QEMU made, and has unlinked, in the backend's directory.
fn made_in<'a>(descriptors: &'a [PathBuf], backend: &Backend) -> Option<&'a Path> {
    let prefix = format!("{}{}.", MADE_BY_QEMU, backend.id);
    let is_made = |link: &&PathBuf| {
        let Ok(target) = fs::read_link(link) else { return false };
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        target.parent() == Some(&backend.path) && name.starts_with(&prefix)
    };
    descriptors.iter().find(is_made).map(PathBuf::as_path)
}

/// The file that QEMU has open by a path that leads to it no more, as a restored guest's does.
fn removed<'a>(descriptors: &'a [PathBuf], backend: &Backend) -> Option<&'a Path> {
    let name = backend.path.file_name()?.to_str()?;
    if backend.path.exists() {
        return None;
    }
    let is_it = |link: &&PathBuf| {
        let Ok(target) = fs::read_link(link) else { return false };
        let target = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        target.strip_suffix(" (deleted)").unwrap_or(&target) == name
    };
    descriptors.iter().find(is_it).map(PathBuf::as_path)
}

/// Whether the process has the file open. Of a process that cannot be looked into, it is believed if the file is its user's:
/// a QEMU that was taken over must not name another guest's disk, which this process may read and QEMU may not.
///
/// With CAP_DAC_READ_SEARCH the descriptors can be listed, and none followed.
fn is_held(descriptors: &[PathBuf], pid: u32, file: &Metadata) -> bool {
    let mut held = descriptors.iter().filter_map(|link| fs::metadata(link).ok()).peekable();
    if held.peek().is_none() {
        user(pid).is_none_or(|user| user == file.uid())
    } else {
        held.any(|held| (held.dev(), held.ino()) == (file.dev(), file.ino()))
    }
}

/// The effective user of a process; `None` of one that is not to be seen from here.
fn user(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    ids.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(path: PathBuf, bytes: u64) -> Backend {
        Backend { id: "mem".to_owned(), bytes, path }
    }

    #[test]
    fn a_file_that_the_process_does_not_have_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mem");
        let held = File::create(&path).unwrap();
        held.set_len(8192).unwrap();
        let pid = std::process::id();
        open(&backend(path.clone(), 8192), pid).unwrap();
        let short = open(&backend(path.clone(), 8193), pid).unwrap_err().to_string();
        assert!(short.contains("8192 bytes of 8193"), "{short}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, [0; 8192]).unwrap();
        // Nobody but this test has the new file open, and it has closed it.
        let replaced = open(&backend(path.clone(), 8192), std::os::unix::process::parent_id()).unwrap_err();
        assert!(replaced.to_string().contains("was replaced"), "{replaced}");
    }

    #[test]
    fn a_file_of_another_user_is_not_believed_to_be_the_processs() {
        let own = tempfile::NamedTempFile::new().unwrap();
        let metadata = own.as_file().metadata().unwrap();
        let pid = std::process::id();
        assert_eq!(user(pid), Some(metadata.uid()));
        assert!(is_held(&[], pid, &metadata));
        assert!(is_held(&[PathBuf::from("/proc/self/fd/none")], pid, &metadata), "it cannot be followed");
        assert!(is_held(&[], u32::MAX, &metadata), "nothing is known of that process");
        if metadata.uid() == 0 {
            std::os::unix::fs::fchown(own.as_file(), Some(61001), None).unwrap();
            assert!(!is_held(&[], pid, &own.as_file().metadata().unwrap()));
        }
    }

    #[test]
    fn a_file_that_was_removed_is_found_by_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mem");
        let held = File::create(&path).unwrap();
        held.set_len(8192).unwrap();
        fs::remove_file(&path).unwrap();
        let found = open(&backend(path.clone(), 8192), std::process::id()).unwrap();
        assert_eq!(found.metadata().unwrap().ino(), held.metadata().unwrap().ino());
        drop(held);
        drop(found);
        open(&backend(path, 8192), std::process::id()).unwrap_err();
    }

    #[test]
    fn a_file_made_in_a_directory_is_found_by_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("qemu_back_mem.mem.Xyz123");
        fs::write(&made, [7; 4096]).unwrap();
        let _held = File::open(&made).unwrap();
        fs::remove_file(&made).unwrap();
        let none = open(&backend(dir.path().join("."), 4096), std::os::unix::process::parent_id());
        assert!(none.unwrap_err().to_string().contains("name a file in mem-path"));
        let file = open(&backend(dir.path().to_owned(), 4096), std::process::id()).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4096);
    }
}
