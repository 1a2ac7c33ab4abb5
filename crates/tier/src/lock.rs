//! Locks on files of this host, which a dying process may still hold.

use std::fs::{File, TryLockError};
use std::io;
use std::time::{Duration, Instant};

/// Locks a file for this process, waiting for one that ends and lets go of it late. Whether that could be done.
pub(crate) fn lock_within(file: &File, patience: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}
