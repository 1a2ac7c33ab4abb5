//! Files that a ring holds on to.
//!
//! Place in the data flow: `disk` pins the files it reads most, once, and names them by [`PinnedFile`] from then on. A
//! request for a pinned file touches nothing that belongs to that file in user space, neither its store nor a reference
//! count: with a thousand files in turn, each of those would be a cache miss.
//!
//! Invariant: an index is given to one file only between two calls of [`crate::Ring::unpin_all`], and no entry that names
//! it waits to be submitted across that call.

use std::num::NonZeroU32;
use std::sync::Arc;

use io_uring::Submitter;

use crate::OpenStore;

/// A file that a ring holds on to; good until the ring's next [`crate::Ring::unpin_all`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedFile(pub(super) NonZeroU32);

/// The file of a ring's request.
#[derive(Debug)]
pub enum RingFile {
    /// One that the request keeps open.
    Open(Arc<OpenStore>),
    /// One that the ring keeps open.
    Pinned(PinnedFile),
}

impl From<Arc<OpenStore>> for RingFile {
    fn from(store: Arc<OpenStore>) -> Self {
        Self::Open(store)
    }
}

/// Length of the table of files, 8 bytes each; its first place stays free.
const TABLE_LEN: u32 = 4096;

/// The ring's table of files.
#[derive(Debug, Default)]
pub(super) enum Pins {
    /// No file was pinned yet.
    #[default]
    Unused,
    /// The next free place.
    Next(NonZeroU32),
    /// The kernel has no such table (before Linux 5.19), or allows this process none.
    Unavailable,
}

impl Pins {
    /// Takes `store` in; `None` when it has no descriptor, or there is no room.
    pub(super) fn add(&mut self, submitter: &Submitter<'_>, store: &OpenStore) -> Option<PinnedFile> {
        store.ring_alignment()?;
        if matches!(self, Self::Unused) {
            let made = submitter.register_files_sparse(TABLE_LEN).is_ok();
            *self = if made { Self::Next(NonZeroU32::MIN) } else { Self::Unavailable };
        }
        let Self::Next(next) = self else { return None };
        if next.get() == TABLE_LEN {
            return None;
        }
        let place = *next;
        submitter.register_files_update(place.get(), &[store.ring_fd()]).ok()?;
        *next = place.saturating_add(1);
        Some(PinnedFile(place))
    }

    /// Lets go of every file; requests under way keep theirs until they are done.
    pub(super) fn clear(&mut self, submitter: &Submitter<'_>) {
        if let Self::Next(next) = self {
            let none = vec![-1; next.get() as usize];
            let cleared = submitter.register_files_update(0, &none).is_ok();
            *self = if cleared { Self::Next(NonZeroU32::MIN) } else { Self::Unavailable };
        }
    }
}
