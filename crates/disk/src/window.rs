//! A layer that is a part of a raw file, as `offset` and `size` of a `json:` description say.
//!
//! Only the base of a chain can be one. Its path names the whole file, so all that opens a layer by its path asks for its window,
//! too; and the file is never written, removed, or taken for a state of the disk.

use std::sync::Arc;

use vmstrata_store::WindowStore;
use vmstrata_types::HostOffset;

use crate::error::{ErrorKind, Result};
use crate::opener::Opened;

/// Raw files are counted in sectors: the last one reads as if padded with zeros.
pub(crate) const SECTOR: u64 = 512;

/// See the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: HostOffset,
    /// Bytes; `None` for all up to the file's end.
    pub(crate) len: Option<u64>,
}

impl Window {
    /// Its bytes in a file of so many.
    ///
    /// # Errors
    /// [`ErrorKind::Window`]: the file ends before it, as QEMU refuses it.
    pub(crate) fn len_in(self, file_len: u64) -> Result<u64> {
        let file_len = file_len.next_multiple_of(SECTOR);
        let there = file_len.checked_sub(self.start.get());
        match (there, self.len) {
            (Some(there), None) => Ok(there),
            (Some(there), Some(len)) if len <= there => Ok(len),
            (_, len) => {
                let end = HostOffset::new(self.start.get().saturating_add(len.unwrap_or(0)));
                Err(ErrorKind::Window { end, file_len }.into())
            }
        }
    }
}

/// What `window` is of an open file: all of it if there is none.
///
/// # Errors
/// As [`Window::len_in`].
pub(crate) fn part_of(opened: Opened, window: Option<Window>) -> Result<Opened> {
    let Some(window) = window else { return Ok(opened) };
    let len = window.len_in(opened.identity.len)?;
    Ok(Opened { store: Arc::new(WindowStore::new(opened.store, window.start, len)), ..opened })
}
