//! Guests' memory, mapped here, that a frontend may take away.
//!
//! Files that can be sealed against shrinking are; for the others (tmpfs, hugetlbfs, memfds made without seals) a
//! [`Guard`] puts empty memory in their place when they shrink.

use vm_memory::MmapRegion;
use vmstrata_store::Guard;

/// A shared mapping whose file may shrink.
#[derive(Debug)]
pub(super) struct GuardedMapping {
    // Released before the mapping goes.
    _guard: Guard,
    mapping: MmapRegion<()>,
}

impl GuardedMapping {
    /// Guards `mapping`; `None` when too many are.
    pub(super) fn new(mapping: MmapRegion<()>) -> Option<Self> {
        // SAFETY: the whole of a mapping that this owns, and that only raw copies and atomics touch.
        let guard = unsafe { Guard::new(mapping.as_ptr(), mapping.size()) }?;
        Some(Self { _guard: guard, mapping })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vm_memory::FileOffset;

    use super::*;

    #[test]
    fn memory_taken_away_reads_as_zeros() {
        const LEN: usize = 1 << 20;
        let file = File::from(memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, LEN as u64).unwrap();
        let twin = file.try_clone().unwrap();
        let mapping = MmapRegion::from_file(FileOffset::new(file, 0), LEN).unwrap();
        let guarded = GuardedMapping::new(mapping).unwrap();
        let last = guarded.as_ptr().wrapping_add(LEN - 1);
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
}
