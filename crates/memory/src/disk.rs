//! A guest's disks at the instant of a snapshot, as far as this crate reads them: who serves them gives readers of them.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::BoxError;
use crate::vault::DiskState;

/// A disk as it was at one instant, which does not change.
pub trait ReadDisk: Send + Sync {
    /// Fills `into` with the bytes from `offset` on, as the guest counts them.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] past its end; what kept them from being read.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Whether bytes can be read, as far as that is known without reading them all: the files that hold them open, and are
    /// long enough.
    ///
    /// # Errors
    /// What stands against it.
    fn check(&self, offset: u64, len: u64) -> io::Result<()>;
}

/// Who has the disks.
pub trait OpenDisk: Debug + Send + Sync {
    /// Opens a disk at a state.
    ///
    /// # Errors
    /// Whatever is in the way; the disk is then done without.
    fn open(&self, state: &DiskState) -> Result<Box<dyn ReadDisk>, BoxError>;
}

/// The disks at the instant of a snapshot, in its order; those that cannot be opened are left out, with a warning.
pub fn open_all(open: &dyn OpenDisk, states: &[DiskState]) -> Vec<Option<Box<dyn ReadDisk>>> {
    let opened = |state: &DiskState| match open.open(state) {
        Ok(disk) => Some(disk),
        Err(error) => {
            tracing::warn!(
                "{} at {} is not read for its pages of cache: {error}",
                state.disk,
                state.snapshot
            );
            None
        }
    };
    states.iter().map(opened).collect()
}

/// A disk's bytes as they are.
impl ReadDisk for File {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(into, offset)
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        let fits = offset.checked_add(len).is_some_and(|end| self.metadata().is_ok_and(|is| is.len() >= end));
        if fits { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}
