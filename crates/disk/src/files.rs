//! The open files of frozen layers, bounded in number.
//!
//! A file is opened on first use and stays open while there is room. Beyond that, the one that was not used for
//! longest, about, is closed; requests under way keep theirs until they are done.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_store::{FileId, FileIdentity, Gate, LocalFile, OpenStore, Permission, Store, is_held};

use crate::error::{Error, ErrorKind, Result};
use crate::layer::Layer;
use crate::opener::{Opened, Opener, Role};
use crate::window::part_of;

/// Whether a file is what it was, as far as a look at it tells. (The change time is no witness: it also moves when a
/// file is linked or gets another owner. Nor is the length: an index makes a file longer and puts its time back.)
pub(crate) fn same_state(now: &FileIdentity, then: &FileIdentity) -> bool {
    (now.file, now.mtime_ns) == (then.file, then.mtime_ns)
}

/// A file whose time has changed may be taking an index, which puts the time back: it is looked at again after this pause, so
/// many times once no process writes it, and for so long in all.
const INDEXING_PAUSE: Duration = Duration::from_millis(20);
const INDEXING_LOOKS: u32 = 25;
const INDEXING_MAX: Duration = Duration::from_secs(30);

/// Whether a process has the file open for writing, as one does that copies into a layer or adds an index.
pub(crate) fn is_being_written(store: &dyn Store) -> bool {
    let written = [Permission::Write, Permission::WriteUnchanged];
    store
        .local()
        .and_then(LocalFile::raw)
        .is_some_and(|fd| written.iter().any(|&permission| is_held(fd, permission).unwrap_or(false)))
}

/// The open files of frozen layers, bounded in number.
#[derive(Debug)]
pub(crate) struct FileTable {
    opener: Arc<dyn Opener>,
    max_open: usize,
    open: Mutex<Clock>,
}

#[derive(Debug, Default)]
struct Clock {
    layers: Vec<Weak<Layer>>,
    hand: usize,
}

impl FileTable {
    pub(crate) fn new(opener: Arc<dyn Opener>, max_open: usize) -> Self {
        Self { opener, max_open: max_open.max(1), open: Mutex::default() }
    }

    pub(crate) fn opener(&self) -> &Arc<dyn Opener> {
        &self.opener
    }

    /// The layer's file, opened now if need be.
    ///
    /// # Errors
    /// The file cannot be opened, or is not the file it was when the chain was read.
    pub(crate) fn store(&self, layer: &Arc<Layer>) -> Result<Arc<OpenStore>> {
        if let Some(store) = layer.open_file() {
            return Ok(store);
        }
        // Not under the lock: others open other files meanwhile.
        let file = OpenStore::new(self.open_same(layer)?);
        let mut clock = self.open.lock();
        if let Some(store) = layer.open_file() {
            return Ok(store);
        }
        self.put(&mut clock, layer, &file);
        Ok(file)
    }

    /// The gate let the file through when the chain was read; it must still be the same file.
    fn open_same(&self, layer: &Layer) -> Result<Arc<dyn Store>> {
        let (began, mut looks) = (Instant::now(), INDEXING_LOOKS);
        loop {
            let opened = self.opener.open(&layer.path, Role::Frozen, &Gate::unrestricted())?;
            if same_state(&opened.identity, &layer.identity) {
                let in_file = |error: Error| error.in_file(&layer.path);
                let opened = part_of(opened, layer.window).map_err(in_file)?;
                layer.confirm(&*opened.store, opened.identity.len).map_err(in_file)?;
                return Ok(opened.store);
            }
            let is_replaced = opened.identity.file != layer.identity.file;
            if is_replaced || looks == 0 || began.elapsed() > INDEXING_MAX {
                return Err(Error::from(ErrorKind::Changed).in_file(&layer.path));
            }
            looks -= u32::from(!is_being_written(&*opened.store));
            std::thread::sleep(INDEXING_PAUSE);
        }
    }

    /// The open file of a layer, if it is one of ours.
    pub(crate) fn open_store(&self, file: FileId) -> Option<Arc<OpenStore>> {
        let clock = self.open.lock();
        let mut layers = clock.layers.iter().filter_map(Weak::upgrade);
        layers.find(|layer| layer.identity.file == file)?.open_file()
    }

    /// Takes in a file that was opened to read the chain.
    pub(crate) fn adopt(&self, layer: &Arc<Layer>, opened: &Opened) {
        let mut clock = self.open.lock();
        if layer.open_file().is_none() {
            self.put(&mut clock, layer, &OpenStore::new(Arc::clone(&opened.store)));
        }
    }

    fn put(&self, clock: &mut Clock, layer: &Arc<Layer>, file: &Arc<OpenStore>) {
        while clock.layers.len() >= self.max_open {
            clock.close_one();
        }
        layer.put_file(Some(Arc::clone(file)));
        clock.layers.push(Arc::downgrade(layer));
    }

    /// Files open now.
    pub(crate) fn open_count(&self) -> usize {
        let mut clock = self.open.lock();
        clock.layers.retain(|layer| layer.strong_count() > 0);
        clock.layers.len()
    }
}

impl Clock {
    /// Closes the file that was not used for longest, about; requests under way keep theirs until they are done.
    fn close_one(&mut self) {
        for _ in 0..=2 * self.layers.len() {
            self.hand %= self.layers.len();
            let Some(layer) = self.layers[self.hand].upgrade() else {
                self.layers.swap_remove(self.hand);
                return;
            };
            if !layer.take_used() {
                layer.put_file(None);
                self.layers.swap_remove(self.hand);
                return;
            }
            self.hand += 1;
        }
        let layer = self.layers.swap_remove(self.hand % self.layers.len());
        if let Some(layer) = layer.upgrade() {
            layer.put_file(None);
        }
    }
}
