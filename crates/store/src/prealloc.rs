//! Preallocation past the end of a file that is about to grow.
//!
//! ext4 allocates at writeback, and reserves each block at the first write to it: 64 KiB take 25 µs, and 15 µs where the blocks
//! are allocated (Linux 6.18). Preallocated blocks also lie together.
//!
//! A hint: failures are ignored.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, fallocate, fstatfs};

/// The most that is preallocated to a file.
const LEN_MAX: u64 = 64 << 20;
/// Less is not worth it.
const LEN_MIN: u64 = 1 << 20;
/// At most this part of the free space is preallocated.
const PART_OF_FREE: u64 = 64;
/// `f_type` of the file system that gains by it, and of ext2 and ext3, which refuse. Others allocate at the write, or at no
/// cost, or preallocate slowly.
pub(crate) const EXT4: i64 = 0xEF53;

/// Preallocates about `len` bytes past the end of `file`; its length stays. [`crate::LocalFile::free_prealloc`] undoes it.
pub fn past_end(file: &File, len: u64) {
    let len = len.min(LEN_MAX);
    if len < LEN_MIN {
        return;
    }
    let Ok(found) = fstatfs(file) else { return };
    let free = found.f_bavail.saturating_mul(found.f_bsize as u64);
    if found.f_type == EXT4
        && len <= free / PART_OF_FREE
        && let Ok(end) = file.metadata().map(|metadata| metadata.len())
    {
        let _ = fallocate(file, FallocateFlags::KEEP_SIZE, end, len);
    }
}

/// Frees what is allocated to `file` past its end, where the file system can tell.
///
/// # Errors
/// Whatever the kernel reports.
pub(crate) fn free(file: &File) -> io::Result<()> {
    let metadata = file.metadata()?;
    let len = metadata.len();
    // The block that the end lies in belongs to both.
    if metadata.is_file()
        && extents_from(file, len.next_multiple_of(metadata.blksize().max(1)))
            .is_ok_and(|extents| extents > 0)
    {
        // The same length: blocks past it go nevertheless.
        file.set_len(len)?;
    }
    Ok(())
}

/// How many extents are allocated to `file` from `start` on, also past its end, which `SEEK_DATA` never tells.
fn extents_from(file: &File, start: u64) -> io::Result<u32> {
    /// `struct fiemap` of linux/fiemap.h, without room for extents: they are counted.
    #[repr(C)]
    struct Fiemap {
        start: u64,
        length: u64,
        flags: u32,
        mapped_extents: u32,
        extent_count: u32,
        reserved: u32,
    }
    const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B;
    let mut map =
        Fiemap { start, length: u64::MAX - start, flags: 0, mapped_extents: 0, extent_count: 0, reserved: 0 };
    // SAFETY: the kernel reads and writes the structure, and nothing behind it, as it has room for no extents.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) };
    if done == 0 { Ok(map.mapped_extents) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preallocated_blocks_are_freed() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("a")).unwrap();
        file.set_len(100_000).unwrap();
        std::io::Write::write_all(&mut &file, &[7; 100_000]).unwrap();
        file.sync_all().unwrap();
        let allocated = || file.metadata().unwrap().blocks() * 512;
        let before = allocated();
        past_end(&file, LEN_MIN - 1);
        assert_eq!(allocated(), before, "too little");
        past_end(&file, 8 << 20);
        let is_ext4 = fstatfs(&file).unwrap().f_type == EXT4;
        assert_eq!(allocated() >= before + (8 << 20), is_ext4);
        assert_eq!(file.metadata().unwrap().len(), 100_000);
        free(&file).unwrap();
        assert_eq!((allocated(), file.metadata().unwrap().len()), (before, 100_000));
    }

    #[test]
    fn preallocated_blocks_of_a_file_with_holes_are_freed() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("a")).unwrap();
        if fstatfs(&file).unwrap().f_type != EXT4 {
            return;
        }
        std::io::Write::write_all(&mut &file, &[7; 5000]).unwrap();
        file.set_len((1 << 30) + 1).unwrap();
        let allocated = || file.metadata().unwrap().blocks() * 512;
        past_end(&file, 8 << 20);
        assert!(allocated() >= 8 << 20);
        free(&file).unwrap();
        assert!(allocated() < 1 << 20, "{}", allocated());
        assert_eq!(file.metadata().unwrap().len(), (1 << 30) + 1);
    }

    #[test]
    fn a_file_without_preallocation_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, &[7; 300_000]).unwrap();
        file.sync_all().unwrap();
        let changed = || file.metadata().map(|metadata| (metadata.mtime(), metadata.mtime_nsec())).unwrap();
        let before = changed();
        free(&file).unwrap();
        assert_eq!(changed(), before);
    }
}
