//! Giving all of a guest's memory pages of the host, before it is held.
//!
//! QEMU reads every page before it tracks writes, which takes seconds where pages must be made first, and ends QEMU where
//! there is no room for them. So they are made here: the guest still runs, and no room is an error.

use std::fs::File;
use std::ptr;
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::error::CaptureError;
use super::memory::{Files, MachineRam};
use super::take::cancelled;

/// Bytes populated at once: pages of any size divide it, and a cancel waits for no more.
const CHUNK: u64 = 1 << 30;

/// Makes the host have a page for each of `ram`.
///
/// # Errors
/// [`CaptureError::Live`] when there is no room; [`CaptureError::Cancelled`].
pub(super) fn populate(ram: &MachineRam, cancel: &AtomicBool) -> Result<(), CaptureError> {
    let (files, mut offset): (&Files, u64) = (ram.files(), 0);
    while let Some((file, within, follow)) = files.find(offset) {
        cancelled(cancel)?;
        let len = follow.min(CHUNK);
        populate_range(file, within, len).map_err(|error| CaptureError::Live {
            why: format!("the host cannot have all of its memory at once ({error}): is its /dev/shm full?"),
        })?;
        offset += len;
    }
    Ok(())
}

fn populate_range(file: &File, offset: u64, len: u64) -> Result<(), Errno> {
    let len = usize::try_from(len).map_err(|_| Errno::NOMEM)?;
    // SAFETY: a new mapping at an address that the kernel chooses; nothing in this process refers to it.
    let map = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, offset)? };
    // SAFETY: the mapping made above, which is only asked to be there.
    let populated = unsafe { madvise(map, len, Advice::LinuxPopulateRead) };
    // SAFETY: the mapping made above, to which there are no references.
    unsafe { munmap(map, len)? };
    populated
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::address::Physical;
    use crate::ram::{Block, Layout};

    #[test]
    fn every_page_of_every_file_is_there_afterwards() {
        let files = [3 << 20, 1 << 20].map(|bytes| {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            // A file may be longer than its backend.
            file.set_len(4 << 20).unwrap();
            (file, bytes)
        });
        let held = files.each_ref().map(|(file, _)| file.try_clone().unwrap());
        let block = Block { start: Physical::new(0), len: 4 << 20, file_offset: 0 };
        let ram = MachineRam::new(files.into(), Layout::new(vec![block]).unwrap());
        populate(&ram, &AtomicBool::new(false)).unwrap();
        assert_eq!(held.map(|file| file.metadata().unwrap().blocks() * 512), [3 << 20, 1 << 20]);
        let cancelled = populate(&ram, &AtomicBool::new(true));
        assert!(matches!(cancelled, Err(CaptureError::Cancelled)));
    }
}
