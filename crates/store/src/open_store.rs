//! A file reference: an open store with what a ring needs of it at hand, and where in its file the store's bytes begin.
//!
//! A layer of a disk is backed by one. All who read a layer ask this for its bytes by their place in the layer, so that a layer may
//! be a whole file or a part of one ([`crate::WindowStore`]).
//!
//! A request on the fast road touches as few cache lines as it can: with a thousand files in turn, each line of each
//! file's store is a miss. Descriptor and alignment stand here beside the reference count that keeps the file open.

use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_types::HostOffset;

use crate::{LocalFile, Store, View};

/// A store that stays open for as long as this lives, as all who use it do.
pub struct OpenStore {
    /// Of [`crate::LocalFile::raw`].
    fd: Option<RawFd>,
    /// `None` when a ring cannot use the store.
    alignment: Option<u32>,
    start: HostOffset,
    may_be_absent: bool,
    /// Made when it is first asked for; then `Some(None)` if there can be none.
    view: Mutex<Option<Option<View>>>,
    store: Arc<dyn Store>,
}

impl OpenStore {
    /// Looks up what a ring needs, once: a store's descriptor and alignment do not change.
    pub fn new(store: Arc<dyn Store>) -> Arc<Self> {
        let local = file_of(&*store);
        let fd = local.and_then(|file| Some(file.raw()?.as_raw_fd()));
        let ring = local.filter(|file| fd.is_some() || file.simulated().is_some());
        let alignment = ring.map(|file| u32::try_from(file.raw_alignment()).expect("blocks are small"));
        let start = local.map_or(HostOffset::ZERO, LocalFile::start);
        let may_be_absent = store.fetch().is_some();
        Arc::new(Self { fd, alignment, start, may_be_absent, view: Mutex::default(), store })
    }

    /// Whether a range must be held ([`crate::Fetch::hold`]) while a ring or a view reads it.
    #[inline]
    pub fn may_be_absent(&self) -> bool {
        self.may_be_absent
    }

    /// Alignment that offset, length and memory of a ring's request must have; `None` when no ring can use the store.
    #[inline]
    pub fn ring_alignment(&self) -> Option<usize> {
        self.alignment.map(|alignment| alignment as usize)
    }

    /// Where in the file the first byte lies.
    #[inline]
    pub fn start(&self) -> HostOffset {
        self.start
    }

    /// Whether [`crate::Ring::pin`] may take it: requests for files that ask for an alignment, or for a part of a file, must be looked
    /// at one by one.
    pub fn may_be_pinned(&self) -> bool {
        self.alignment == Some(1) && self.start == HostOffset::ZERO
    }

    /// The file of this host that has the bytes, or those of them that are here.
    pub(crate) fn file(&self) -> Option<&dyn LocalFile> {
        file_of(&*self.store)
    }

    /// A view of the bytes, if there can be one: up to `end` at least, if the file reaches so far.
    pub fn view(&self, end: HostOffset) -> Option<View> {
        let mut view = self.view.lock();
        let file = self.file()?;
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

fn file_of(store: &dyn Store) -> Option<&dyn LocalFile> {
    store.fetch().map_or_else(|| store.local(), |fetch| Some(fetch.file()))
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
