//! A store with what a ring needs of it at hand.
//!
//! A request on the fast road touches as few cache lines as it can: with a thousand files in turn, each line of each
//! file's store is a miss. Descriptor and alignment stand here beside the reference count that keeps the file open.

use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_types::HostOffset;

use crate::{Store, View};

/// A store that stays open for as long as this lives, as all who use it do.
pub struct OpenStore {
    /// Of [`crate::LocalFile::raw`].
    fd: Option<RawFd>,
    /// `None` when a ring cannot use the store.
    alignment: Option<u32>,
    may_be_absent: bool,
    /// Made when it is first asked for; then `Some(None)` if there can be none.
    view: Mutex<Option<Option<View>>>,
    store: Arc<dyn Store>,
}

impl OpenStore {
    /// Looks up what a ring needs, once: a store's descriptor and alignment do not change.
    pub fn new(store: Arc<dyn Store>) -> Arc<Self> {
        let fetch = store.fetch();
        let local = fetch.map_or_else(|| store.local(), |fetch| Some(fetch.file()));
        let fd = local.and_then(|file| Some(file.raw()?.as_raw_fd()));
        let ring = local.filter(|file| fd.is_some() || file.simulated().is_some());
        let alignment = ring.map(|file| u32::try_from(file.raw_alignment()).expect("blocks are small"));
        let may_be_absent = fetch.is_some();
        Arc::new(Self { fd, alignment, may_be_absent, view: Mutex::default(), store })
    }

    /// Whether a range must be asked for with [`Store::fetch`] before a ring reads it.
    #[inline]
    pub fn may_be_absent(&self) -> bool {
        self.may_be_absent
    }

    /// Alignment that offset, length and memory of a ring's request must have; `None` when no ring can use the store.
    #[inline]
    pub fn ring_alignment(&self) -> Option<usize> {
        self.alignment.map(|alignment| alignment as usize)
    }

    /// A view of the bytes, if there can be one: up to `end` at least, if the file reaches so far.
    pub fn view(&self, end: HostOffset) -> Option<View> {
        let mut view = self.view.lock();
        let file = self.store.local()?;
        if let Some(short) = view.get_or_insert_with(|| file.view())
            && !short.reaches(end)
            && let Ok(len) = self.store.len()
        {
            *view = Some(short.grown(len).or_else(|| file.view()));
        }
        view.clone()?
    }

    /// The descriptor for a ring.
    ///
    /// # Panics
    /// When the store has none.
    pub(crate) fn ring_fd(&self) -> RawFd {
        self.fd.expect("a store that a ring can use")
    }
}

impl Deref for OpenStore {
    type Target = dyn Store;
    fn deref(&self) -> &(dyn Store + 'static) {
        &*self.store
    }
}

impl fmt::Debug for OpenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}
