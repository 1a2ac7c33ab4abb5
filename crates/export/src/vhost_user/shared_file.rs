//! Which files of a frontend's are taken for memory: memfds, and files on tmpfs or hugetlbfs.
//!
//! An access to mapped memory whose file system does not answer never ends, and with it the thread that made it: the workers
//! of all disks copy into guests' memory. Of the kernel's own memory the page is there, or is made at once.
//!
//! The question must not be put to the file system, as a hostile one would not answer it: fstatfs(2), fstat(2) and
//! even lseek(2) are requests to a FUSE server. Names prove nothing, and the mounts of memfds are in no list. But the kernel
//! keeps seals for files of its shared memory and its huge pages, and for no others, and F_GET_SEALS looks at the file's own
//! operations only (`memfd_file_seals_ptr()` in mm/memfd.c). A file on tmpfs has seals, too: one that forbids more of them.

use std::fs::File;
use std::io;

use rustix::fs::{fcntl_get_seals, fstat};

/// A file that is the kernel's own memory.
#[derive(Debug)]
pub(super) struct SharedFile(File);

impl SharedFile {
    /// Takes a frontend's file.
    ///
    /// # Errors
    /// When it is anything else.
    pub(super) fn new(file: File) -> io::Result<Self> {
        match fcntl_get_seals(&file) {
            Ok(_) => Ok(Self(file)),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the file is no memfd, and not on tmpfs or hugetlbfs",
            )),
        }
    }

    /// Takes any file, of a frontend that is trusted with the threads of this process.
    pub(super) fn trusted(file: File) -> Self {
        Self(file)
    }

    /// Its bytes.
    ///
    /// # Errors
    /// Whatever the system reports.
    pub(super) fn len(&self) -> io::Result<u64> {
        Ok(u64::try_from(fstat(&self.0)?.st_size).unwrap_or(0))
    }

    pub(super) fn file(&self) -> &File {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, memfd_create, openat};

    use super::*;

    #[test]
    fn memory_of_the_kernel_is_taken_with_and_without_seals() {
        for flags in [MemfdFlags::empty(), MemfdFlags::ALLOW_SEALING, MemfdFlags::HUGETLB] {
            SharedFile::new(memfd_create("guest", flags | MemfdFlags::CLOEXEC).unwrap().into()).unwrap();
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let on_tmpfs = openat(CWD, "/dev/shm", flags, Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(SharedFile::new(on_tmpfs.into()).unwrap().len().unwrap(), 0);
    }

    #[test]
    fn other_files_are_refused() {
        for path in ["/dev/null", "/dev/zero", "/proc/self/mem", "/proc/self/exe"] {
            assert!(SharedFile::new(File::open(path).unwrap()).is_err(), "{path}");
        }
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(SharedFile::new(File::from(std::os::fd::OwnedFd::from(reader))).is_err());
    }
}
