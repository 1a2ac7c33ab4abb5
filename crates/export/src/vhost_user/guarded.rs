//! Guests' memory, mapped here, that a frontend may take away.
//!
//! Files that can be sealed against shrinking are; for the others (tmpfs, hugetlbfs, memfds made without seals) a
//! [`Guard`] puts empty memory in their place when they shrink.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::fs::{SealFlags, fcntl_add_seals, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::param::page_size;
use vmstrata_store::Guard;

use super::shared_file::SharedFile;

/// `f_type` of hugetlbfs, and of memfds with huge pages.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A part of a file, mapped shared, which the file's owner may cut off.
#[derive(Debug)]
pub(super) struct GuardedMapping {
    // Released before the mapping goes.
    _guard: Guard,
    mapping: Mapping,
    /// Bytes of the mapping before the part.
    lead: usize,
}

impl GuardedMapping {
    /// Maps `len` bytes at `offset`, which the file has; `None` when too many mappings are guarded. The file cannot be shrunk
    /// from now on, if it takes seals. Its descriptor is closed: a frontend may share hundreds.
    ///
    /// # Errors
    /// A file that cannot be mapped shared.
    pub(super) fn new(file: SharedFile, offset: u64, len: usize) -> io::Result<Option<Self>> {
        let file = file.file();
        refuse_shrinking(file);
        // All of the last page, too: what is put in a mapping's place, and unmapped, must be whole pages.
        let page = page_size_of(file)?;
        let lead = (offset % page as u64) as usize;
        let size = lead.checked_add(len).and_then(|size| size.checked_next_multiple_of(page));
        let size = size.ok_or(io::ErrorKind::InvalidInput)?;
        let mapping = Mapping::new(file, offset - lead as u64, size)?;
        // SAFETY: the whole of a mapping that this owns, and that only raw copies and atomics touch.
        let guard = unsafe { Guard::new(mapping.start.as_ptr(), size) };
        Ok(guard.map(|guard| Self { _guard: guard, mapping, lead }))
    }

    /// Where the part begins.
    pub(super) fn start(&self) -> NonNull<u8> {
        // SAFETY: the mapping has `lead` bytes before the part.
        unsafe { self.mapping.start.add(self.lead) }
    }
}

/// Whole pages of a file, mapped shared.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: memory of the process, wherever it is used from.
unsafe impl Send for Mapping {}
// SAFETY: as above; callers that ask for its address see to who accesses it when.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, offset: u64, size: usize) -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe { mmap(std::ptr::null_mut(), size, access, flags, file, offset)? };
        let start = NonNull::new(start.cast()).expect("a mapping is nowhere at null");
        Ok(Self { start, size })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: all of a mapping of ours, which is no longer used.
        if let Err(errno) = unsafe { munmap(self.start.as_ptr().cast(), self.size) } {
            tracing::error!(%errno, "cannot unmap memory of a guest");
        }
    }
}

/// Bytes that a mapping of the file is a multiple of.
fn page_size_of(file: &File) -> io::Result<usize> {
    let system = fstatfs(file)?;
    let is_huge = u64::try_from(system.f_type).is_ok_and(|magic| magic == HUGETLBFS_MAGIC);
    let page = if is_huge { usize::try_from(system.f_bsize).unwrap_or(0) } else { page_size() };
    if page.is_power_of_two() { Ok(page) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Seals a memfd against shrinking, so that our accesses to its mapping cannot fault. Files that take no
/// seals (tmpfs, hugetlbfs, a memfd made without them) are accepted as they are.
pub(super) fn refuse_shrinking(file: impl AsFd) {
    if let Err(errno) = fcntl_add_seals(file, SealFlags::SHRINK) {
        tracing::trace!(%errno, "shared memory file takes no seal against shrinking");
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn memory_taken_away_reads_as_zeros() {
        const LEN: usize = 1 << 20;
        let file = File::from(memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, LEN as u64).unwrap();
        let twin = file.try_clone().unwrap();
        let guarded = GuardedMapping::new(SharedFile::new(file).unwrap(), 0, LEN).unwrap().unwrap();
        let last = guarded.start().as_ptr().wrapping_add(LEN - 1);
        // SAFETY: inside the mapping.
        unsafe { last.write_volatile(7) };
        ftruncate(&twin, 0).unwrap();
        // SAFETY: inside the mapping, whose guard makes the access succeed.
        assert_eq!(unsafe { last.read_volatile() }, 0);
        // SAFETY: as above.
        unsafe { last.write_volatile(9) };
        // SAFETY: as above.
        assert_eq!(unsafe { last.read_volatile() }, 9, "and can be written");
    }

    /// Nothing can be put in the place of a part of a huge page, nor can one be unmapped.
    #[test]
    fn a_part_of_huge_pages_taken_away_reads_as_zeros_and_is_unmapped() {
        const LEN: usize = 4 << 20;
        let file = File::from(memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).unwrap());
        let huge = page_size_of(&file).unwrap();
        assert!(huge > page_size());
        ftruncate(&file, 2 * LEN.next_multiple_of(huge) as u64).unwrap();
        let twin = file.try_clone().unwrap();
        let guarded =
            GuardedMapping::new(SharedFile::new(file).unwrap(), huge as u64 / 2, 0x3000).unwrap().unwrap();
        let first = guarded.start();
        assert_eq!(first.addr().get() % huge, huge / 2);
        // Where the host has no huge pages to give, the first access fails by itself.
        ftruncate(&twin, 0).unwrap();
        // SAFETY: inside the mapping, whose guard makes the access succeed.
        assert_eq!(unsafe { first.read_volatile() }, 0);
        drop(guarded);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("memfd:huge"), "{maps}");
    }
}
