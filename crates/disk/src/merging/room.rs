//! Whether the host's file system has room for what is about to be copied, and for those who write meanwhile.
//!
//! Dropping layers frees space in the end, and takes some before. A file system that is full fails guests' writes, so a merge
//! that would fill it is refused before it copies anything, and ends when others have filled it meanwhile: what was copied until
//! then stays, and is not copied again.

use std::path::{Path, PathBuf};

use super::MergeFault;
use crate::error::{Error, Result};

/// Of the file system, this part is left to others; never more than [`RESERVE_MAX`], nor than what is copied: on a file system
/// that is nearly full, what costs little is the way out.
const RESERVE_PART: u64 = 64;
const RESERVE_MAX: u64 = 1 << 30;

/// Space in a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Space {
    total: u64,
    available: u64,
}

/// The room that one merge leaves to others.
#[derive(Debug)]
pub(crate) struct Room {
    /// A file of the file system.
    path: PathBuf,
    demand: u64,
    reserve: u64,
}

impl Space {
    /// Of the file system that the file at `path` grows in; `None` where that cannot be told.
    fn at(path: &Path) -> Option<Self> {
        // A block device does not grow.
        if !path.metadata().ok()?.is_file() {
            return None;
        }
        let found = rustix::fs::statvfs(path).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Some(Self { total: bytes(found.f_blocks), available: bytes(found.f_bavail) })
    }

    fn reserve(self, demand: u64) -> u64 {
        (self.total / RESERVE_PART).min(RESERVE_MAX).min(demand)
    }
}

/// Bytes that the file at `path` can grow by; `None` where that cannot be told.
pub fn available_bytes(path: &Path) -> Option<u64> {
    Space::at(path).map(|space| space.available)
}

impl Room {
    /// Makes sure that the file at `path` can grow by `demand` bytes.
    ///
    /// # Errors
    /// [`MergeFault::NoSpace`].
    pub(crate) fn find(path: &Path, demand: u64) -> Result<Self> {
        let space = Space::at(path).filter(|_| demand > 0);
        let reserve = space.map_or(0, |space| space.reserve(demand));
        let room = Self { path: path.to_owned(), demand, reserve };
        match space {
            Some(space) if space.available < demand.saturating_add(reserve) => Err(room.missing(space)),
            _ => Ok(room),
        }
    }

    /// Makes sure that the file system has not filled up meanwhile.
    ///
    /// # Errors
    /// [`MergeFault::NoSpace`].
    pub(crate) fn check(&self) -> Result<()> {
        match Space::at(&self.path) {
            Some(space) if space.available < self.reserve => Err(self.missing(space)),
            _ => Ok(()),
        }
    }

    /// Bytes that will be copied, if the guest does not write them meanwhile.
    pub(crate) fn demand(&self) -> u64 {
        self.demand
    }

    fn missing(&self, space: Space) -> Error {
        let (demand, reserve) = (self.demand, self.reserve);
        Error::from(MergeFault::NoSpace { demand, reserve, available: space.available }).in_file(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_to_others_is_a_part_and_no_more_than_is_copied() {
        let of = |total: u64, demand: u64| Space { total, available: 0 }.reserve(demand);
        assert_eq!(of(64 << 20, 20 << 20), 1 << 20);
        assert_eq!(of(64 << 20, 65_536), 65_536);
        assert_eq!(of(1 << 50, 1 << 40), 1 << 30);
    }

    #[test]
    fn more_than_there_is_is_refused_and_nothing_always_fits() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let refused = Room::find(file.path(), 1 << 60).unwrap_err().to_string();
        assert!(refused.contains("there is no room"), "{refused}");
        Room::find(file.path(), 0).unwrap().check().unwrap();
    }
}
