//! A restored disk as its bytes, in a file or on a block device.
//!
//! A file gets its name when it is whole, and has holes where the disk has zeros. A device has no such moment: it is written where it
//! is, after all backups have been found sound, and everything on it that the disk does not have is made zeros, up to the
//! disk's end. No other process may have it open meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::Path;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use vmstrata_disk::{IoContext as _, Result};
use vmstrata_store::{FileOptions, FileStore};

use crate::REGION_BYTES;
use crate::fault::BackupFault;
use crate::region::Region;

/// Zeros written at once where the device has no better way.
const ZEROS: usize = 1 << 20;

/// What the bytes go to.
pub(crate) struct RawDisk<'a> {
    file: &'a File,
    size: u64,
    is_device: bool,
    /// Everything before this offset is written.
    done: u64,
    zeros_by_writing: bool,
}

/// Whether a path leads to a block device.
pub(crate) fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}

/// Opens a device that no other process uses and the disk fits on, and locks it.
///
/// # Errors
/// A device in use, or too small; whatever the host reports.
pub(crate) fn open_device(path: &Path, size: u64) -> Result<(File, FileStore)> {
    let file =
        vmstrata_store::open_device(path).while_trying("open the device, which nothing else may use")?;
    let found = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(io::Error::from);
    let found = found.while_trying("find the device's size")?;
    if found < size {
        return Err(BackupFault::DeviceTooSmall { found, size }.into());
    }
    // For those who open devices otherwise, and lock them as images.
    let again = file.try_clone().while_trying("open the device")?;
    let options = FileOptions { lock_patience: Duration::ZERO, ..FileOptions::ACTIVE };
    let lock = FileStore::new(again, path, &options)?;
    Ok((file, lock))
}

impl<'a> RawDisk<'a> {
    pub(crate) fn new(file: &'a File, size: u64, is_device: bool) -> Self {
        Self { file, size, is_device, done: 0, zeros_by_writing: false }
    }

    /// Writes the next region: what it does not store is zeros.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn put(&mut self, region: &Region) -> Result<()> {
        for (at, data) in region.stored() {
            let Some(data) = data else { continue };
            self.zero_up_to(at.get())?;
            let len = data.len().min(usize::try_from(self.size - at.get()).unwrap_or(usize::MAX));
            self.file.write_all_at(&data[..len], at.get()).while_trying("write the disk")?;
            self.done = at.get() + len as u64;
        }
        Ok(())
    }

    /// Makes zeros of the rest, and brings all of it to stable storage.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn finish(mut self) -> Result<()> {
        if !self.is_device {
            return self.file.set_len(self.size).while_trying("write the disk");
        }
        self.zero_up_to(self.size)?;
        self.file.sync_all().while_trying("flush the device")
    }

    /// A new file is zeros where it is not written.
    fn zero_up_to(&mut self, end: u64) -> Result<()> {
        while self.is_device && self.done < end {
            let len = (end - self.done).min(REGION_BYTES);
            if self.zeros_by_writing || !self.zero_range(self.done, len)? {
                self.zeros_by_writing = true;
                self.write_zeros(self.done, len)?;
            }
            self.done += len;
        }
        Ok(())
    }

    /// Has the device make zeros; false if it knows no way.
    fn zero_range(&self, at: u64, len: u64) -> Result<bool> {
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.file.as_fd(), flags, at, len) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL | rustix::io::Errno::NODEV) => {
                Ok(false)
            }
            Err(errno) => Err(io::Error::from(errno)).while_trying("write zeros"),
        }
    }

    fn write_zeros(&self, at: u64, len: u64) -> Result<()> {
        let zeros = vec![0; ZEROS.min(len as usize)];
        for part in (0..len).step_by(ZEROS) {
            let len = (len - part).min(ZEROS as u64) as usize;
            self.file.write_all_at(&zeros[..len], at + part).while_trying("write zeros")?;
        }
        Ok(())
    }
}
