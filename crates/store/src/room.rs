//! Room for a file that is about to grow, past its end.
//!
//! Where a file system allocates what was written to the page cache only when it leaves it, it accounts for each block at the
//! first write: of 64 KiB on ext4 that write takes 25 µs, and 15 µs where the blocks are there (Linux 6.18). The blocks also lie
//! together then, whoever else writes to the same file system.
//!
//! All of this is a wish: where it cannot be granted, files grow as they always do.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, fallocate, fstatfs};

/// The most that is set aside for a file.
const ROOM_MAX: u64 = 64 << 20;
/// Less is not worth it.
const ROOM_MIN: u64 = 1 << 20;
/// What is set aside is at most this part of what is free.
const PART_OF_FREE: u64 = 64;
/// `f_type` of the file system that gains by it (and of ext2 and ext3, which refuse). Others allocate at the write, or at no cost, or take long to set anything aside.
pub(crate) const EXT4: i64 = 0xEF53;

/// Allocates room past the end of `file` for about `len` more bytes; its length stays. [`give_back`] undoes it.
pub fn set_aside(file: &File, len: u64) {
    let len = len.min(ROOM_MAX);
    if len < ROOM_MIN {
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

/// Gives back what is allocated to `file` past its end, where the file system can tell.
///
/// # Errors
/// Whatever the kernel reports.
pub(crate) fn give_back(file: &File) -> io::Result<()> {
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
    fn what_is_set_aside_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("a")).unwrap();
        file.set_len(100_000).unwrap();
        std::io::Write::write_all(&mut &file, &[7; 100_000]).unwrap();
        file.sync_all().unwrap();
        let allocated = || file.metadata().unwrap().blocks() * 512;
        let before = allocated();
        set_aside(&file, ROOM_MIN - 1);
        assert_eq!(allocated(), before, "too little");
        set_aside(&file, 8 << 20);
        let is_ext4 = fstatfs(&file).unwrap().f_type == EXT4;
        assert_eq!(allocated() >= before + (8 << 20), is_ext4);
        assert_eq!(file.metadata().unwrap().len(), 100_000);
        give_back(&file).unwrap();
        assert_eq!((allocated(), file.metadata().unwrap().len()), (before, 100_000));
    }

    /// The room fits into what the holes leave free.
    #[test]
    fn a_file_with_holes_gives_its_room_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("a")).unwrap();
        if fstatfs(&file).unwrap().f_type != EXT4 {
            return;
        }
        std::io::Write::write_all(&mut &file, &[7; 5000]).unwrap();
        file.set_len((1 << 30) + 1).unwrap();
        let allocated = || file.metadata().unwrap().blocks() * 512;
        set_aside(&file, 8 << 20);
        assert!(allocated() >= 8 << 20);
        give_back(&file).unwrap();
        assert!(allocated() < 1 << 20, "{}", allocated());
        assert_eq!(file.metadata().unwrap().len(), (1 << 30) + 1);
    }

    #[test]
    fn a_file_without_room_is_left_as_it_is() {
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, &[7; 300_000]).unwrap();
        file.sync_all().unwrap();
        let changed = || file.metadata().map(|metadata| (metadata.mtime(), metadata.mtime_nsec())).unwrap();
        let before = changed();
        give_back(&file).unwrap();
        assert_eq!(changed(), before);
    }
}
