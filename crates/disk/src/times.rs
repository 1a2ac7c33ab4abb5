//! Times of change of files, by which others tell whether a file was changed.

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use vmstrata_store::{LocalFile, Store};

use crate::error::{IoContext as _, Result};

/// Gives a file back the time of change it had.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn put_back(store: &dyn Store, mtime_ns: i64) -> Result<()> {
    let (second, ns) = (mtime_ns.div_euclid(1_000_000_000), mtime_ns.rem_euclid(1_000_000_000));
    let put = || set(store, Timespec { tv_sec: second, tv_nsec: ns });
    // Else all who have the file open take it for changed by another program.
    put().or_else(|_| put()).or_else(|_| put())
}

/// Lets a file be changed now.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn touch(store: &dyn Store) -> Result<()> {
    set(store, Timespec { tv_sec: 0, tv_nsec: UTIME_NOW })
}

fn set(store: &dyn Store, last_modification: Timespec) -> Result<()> {
    let Some(fd) = store.local().and_then(LocalFile::raw) else { return Ok(()) };
    let times = Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification };
    rustix::fs::futimens(fd, &times).map_err(std::io::Error::from).while_trying("set the time of change")
}
