//! Which pages of guest memory the device wrote, for a frontend that copies the guest while it runs
//! (vhost-user specification, "Migration").
//!
//! The frontend shares a bitmap, one bit a page of 4 KiB of guest memory, and clears what it has copied. A bit
//! is set after its page was written and before the driver hears of it; so a page is either copied after the
//! write, or marked again.
//!
//! Without a log nothing of this costs anything. QEMU also refuses to save a guest's state whose device has
//! no log, so memory snapshots need it as well.

use std::fs::File;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use super::guarded::GuardedMapping;
use super::shared_file::SharedFile;

/// Bytes of guest memory a bit stands for, whatever the guest's pages are (`VHOST_LOG_PAGE`).
const PAGE: u64 = 4096;

/// Why a log was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum DirtyError {
    #[error("the dirty log of {len:#x} bytes at {offset:#x} does not fit its file of {file_len:#x} bytes")]
    TooSmall { offset: u64, len: u64, file_len: u64 },
    #[error("too much memory is shared with this process: no room for a dirty log")]
    TooMany,
    #[error("cannot map the dirty log: {0}")]
    Map(std::io::Error),
}

/// The frontend's bitmap.
#[derive(Debug)]
pub(super) struct DirtyLog {
    first: NonNull<u8>,
    len: u64,
    _mapping: GuardedMapping,
}

// SAFETY: the pointer leads into the mapping; all access is atomic.
unsafe impl Send for DirtyLog {}
// SAFETY: as above.
unsafe impl Sync for DirtyLog {}

impl DirtyLog {
    /// Maps `len` bytes at `offset` of `file`.
    ///
    /// # Errors
    /// When the file is shorter, cannot be mapped, or is no [`SharedFile`].
    pub(super) fn attach(file: File, offset: u64, len: u64) -> Result<Self, DirtyError> {
        let file = SharedFile::new(file).map_err(DirtyError::Map)?;
        let file_len = file.len().map_err(DirtyError::Map)?;
        let too_small = DirtyError::TooSmall { offset, len, file_len };
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > file_len) {
            return Err(too_small);
        }
        let mapping = GuardedMapping::new(file, offset, len as usize).map_err(DirtyError::Map)?;
        let mapping = mapping.ok_or(DirtyError::TooMany)?;
        Ok(Self { first: mapping.start(), len, _mapping: mapping })
    }

    /// Marks the pages of `len` bytes at guest address `guest`. What the bitmap does not cover is ignored.
    pub(super) fn mark(&self, guest: u64, len: u64) {
        let Some(last) = len.checked_sub(1) else { return };
        let (first, last) = (guest / PAGE, guest.saturating_add(last) / PAGE);
        for page in first..=last.min((self.len * 8).saturating_sub(1)) {
            // SAFETY: `page / 8` is below the length of the bitmap.
            let byte = unsafe { self.first.add((page / 8) as usize) };
            // SAFETY: mapped as long as `self`; the frontend, too, changes it atomically.
            let byte = unsafe { AtomicU8::from_ptr(byte.as_ptr()) };
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::memfd;
    use super::*;
    use std::os::unix::fs::FileExt;

    fn bits(file: &File) -> [u8; 4] {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 16).unwrap();
        bytes
    }

    #[test]
    fn every_page_touched_is_marked_and_no_other() {
        let file = memfd(64);
        let log = DirtyLog::attach(file.try_clone().unwrap(), 16, 4).unwrap();
        log.mark(4096, 1);
        assert_eq!(bits(&file), [0b10, 0, 0, 0]);
        log.mark(3 * 4096 - 1, 2);
        assert_eq!(bits(&file), [0b1110, 0, 0, 0]);
        log.mark(15 * 4096, 0);
        log.mark(10 * 4096 + 5, 6 * 4096);
        assert_eq!(bits(&file), [0b1110, 0b1111_1100, 1, 0]);
    }

    #[test]
    fn what_lies_outside_the_bitmap_is_left_alone() {
        let file = memfd(64);
        let log = DirtyLog::attach(file.try_clone().unwrap(), 16, 4).unwrap();
        log.mark(31 * 4096, 1 << 40);
        log.mark(32 * 4096, 4096);
        log.mark(u64::MAX - 10, 100);
        let mut bytes = [0; 64];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes[19], 0x80);
        assert!(bytes.iter().enumerate().all(|(at, &byte)| at == 19 || byte == 0));
    }

    #[test]
    fn a_log_that_does_not_fit_its_file_is_refused() {
        for (offset, len) in [(0, 65), (60, 5), (u64::MAX, 2), (0, 0)] {
            assert!(matches!(DirtyLog::attach(memfd(64), offset, len), Err(DirtyError::TooSmall { .. })));
        }
    }
}
