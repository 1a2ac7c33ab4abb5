//! A disk as its bytes, in a file or on a block device.
//!
//! A file gets its name when it is whole, and has holes where the disk has zeros. A device has no such moment: it is written where it
//! is, after all backups have been found sound, and everything on it that the disk does not have is made zeros, up to the
//! disk's end. No other process may have it open meanwhile.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use vmstrata_disk::{AtomicFile, IoContext as _, Result};
use vmstrata_store::{Access, FileOptions, FileStore, Store};
use vmstrata_types::HostOffset;

use crate::REGION_BYTES;
use crate::fault::BackupFault;
use crate::region::Region;

/// Zeros written at once where the device has no better way.
const ZEROS: usize = 1 << 20;

/// What the bytes go to.
pub(crate) struct RawDisk<'a> {
    store: &'a FileStore,
    size: u64,
    is_device: bool,
    /// Everything before this offset is written.
    done: u64,
}

/// Whether a path leads to a block device.
pub(crate) fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}

/// Opens a device that no other process uses and the disk fits on, and locks it, for those who open devices otherwise, and lock
/// them as images.
///
/// # Errors
/// A device in use, or too small; whatever the host reports.
pub(crate) fn open_device(path: &Path, size: u64) -> Result<FileStore> {
    let file =
        vmstrata_store::open_device(path).while_trying("open the device, which nothing else may use")?;
    let options = FileOptions { lock_patience: Duration::ZERO, ..FileOptions::ACTIVE };
    let device = FileStore::new(file, path, &options)?;
    check_room(&device, size)?;
    Ok(device)
}

/// Refuses what the disk does not fit on.
///
/// # Errors
/// That; whatever the host reports.
pub(crate) fn check_room(device: &dyn Store, size: u64) -> Result<()> {
    let found = device.len().while_trying("find the device's size")?;
    if found < size { Err(BackupFault::DeviceTooSmall { found, size }.into()) } else { Ok(()) }
}

/// A draft's bytes.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn store_of(draft: &AtomicFile, path: &Path) -> Result<FileStore> {
    let file = draft.file.try_clone().while_trying("open the new file")?;
    let options = FileOptions { access: Access::ReadWrite, lock: None, ..FileOptions::FROZEN };
    Ok(FileStore::new(file, path, &options)?)
}

/// Makes zeros of a range that may have held other bytes.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn make_zeros(store: &dyn Store, at: u64, len: u64) -> Result<()> {
    let write = || {
        let zeros = vec![0; ZEROS.min(len as usize)];
        (at..at + len).step_by(ZEROS).try_for_each(|from| {
            let len = (at + len - from).min(ZEROS as u64) as usize;
            store.write_all(&zeros[..len], HostOffset::new(from))
        })
    };
    let knows_no_way = |error: &io::Error| {
        // Devices without the operation answer with any of these.
        let errno = rustix::io::Errno::from_io_error(error);
        [Some(rustix::io::Errno::INVAL), Some(rustix::io::Errno::NODEV)].contains(&errno)
            || error.kind() == io::ErrorKind::Unsupported
    };
    let made = match store.punch_hole(HostOffset::new(at), len) {
        Err(error) if knows_no_way(&error) => write(),
        made => made,
    };
    made.while_trying("write zeros")
}

impl<'a> RawDisk<'a> {
    pub(crate) fn new(store: &'a FileStore, size: u64, is_device: bool) -> Self {
        Self { store, size, is_device, done: 0 }
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
            self.store.write_all(&data[..len], HostOffset::new(at.get())).while_trying("write the disk")?;
            self.done = at.get() + len as u64;
        }
        Ok(())
    }

    /// Makes zeros of the rest, and brings all of a device to stable storage.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn finish(mut self) -> Result<()> {
        if !self.is_device {
            return self.store.set_len(self.size).while_trying("write the disk");
        }
        self.zero_up_to(self.size)?;
        self.store.flush().while_trying("flush the device")
    }

    /// A new file is zeros where it is not written.
    fn zero_up_to(&mut self, end: u64) -> Result<()> {
        while self.is_device && self.done < end {
            let len = (end - self.done).min(REGION_BYTES);
            make_zeros(self.store, self.done, len)?;
            self.done += len;
        }
        Ok(())
    }
}
