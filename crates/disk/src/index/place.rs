//! Where a new index goes, and how it appears there at once.
//!
//! **In the file**: pages after its end, in clusters that nothing refers to; flush; the link and its autoclear bit; flush.
//! The header's sector is written whole. Then the file gets back the time of change that it had: nothing it says has
//! changed, and the time is in the index. A crash before that costs a digest at the next open.
//!
//! **In a sidecar**: a new file beside it, or where else the opener has it, flushed, and named.
//!
//! An index that was there is overwritten if it lies last in the file, else left behind as a hole that stock tools fill.
//! Whoever still reads it sees checksums that do not match. What a killed process left at the end is overwritten, too. A
//! failure leaves the file as long as it was: it may be for want of room that it came to this.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::Incompatible;
use vmstrata_qcow2::index::{ChainId, Home, IndexLink, PAGE_LEN, Page, PagePointer, Root};
use vmstrata_store::{CacheMode, FileIdentity, FileOptions, FileStore, Gate, LocalFile, Store};
use vmstrata_types::{HostOffset, LayerIndex};

use super::digest::Content;
use super::free::Used;
use super::home::{LinkFound, find_link, is_sidecar, root_in_file, root_in_sidecar};
use super::link::write_link;
use crate::access;
use crate::atomic_file::AtomicFile;
use crate::chain::Top;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::names::is_published;
use crate::opener::{Opened, Opener, Role};
use crate::times;

/// Bytes written at once.
const BATCH: usize = 256 << 10;

/// Takes the pages of a new index, in order.
pub(super) struct Place {
    home: Home,
    pub(super) store: Arc<dyn Store>,
    start: HostOffset,
    next: HostOffset,
    waiting: Vec<u8>,
    len_before: u64,
    link_at: Option<HostOffset>,
    /// A sidecar, and its path.
    draft: Option<(AtomicFile, PathBuf)>,
    undo: Option<Undo>,
    /// What the file's own generation was.
    pub(super) replaces: u64,
}

/// Makes a layer's file, when dropped, no longer than it was, and as old.
struct Undo {
    store: Arc<dyn Store>,
    len: u64,
    mtime_ns: i64,
    is_done: bool,
}

impl Undo {
    /// The index is whole: it stays.
    fn disarm(&mut self) {
        self.is_done = true;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let cut = || -> Result<()> {
            if self.store.len().while_trying("read the file's length")? > self.len {
                self.store.set_len(self.len).while_trying("cut off what was begun")?;
            }
            times::put_back(&*self.store, self.mtime_ns)
        };
        if let Err(error) = cut() {
            tracing::warn!(%error, "an index that could not be written leaves its pages behind; the next one takes their place");
        }
    }
}

impl Place {
    /// Chooses the file of the layer in `top` if it can take an index, else a sidecar.
    ///
    /// # Errors
    /// Neither can be written.
    pub(super) fn choose(top: &Top, content: &Content, gate: &Gate, opener: &dyn Opener) -> Result<Self> {
        if top.opened.identity.file.ino == 0 {
            return Err(ErrorKind::NotIndexable { reason: "a block device has no end to add it at" }.into());
        }
        if content.whole
            && let Some(place) = Self::in_file(top, content, gate, opener)?
        {
            return Ok(place);
        }
        Self::in_sidecar(top, gate, opener)
    }

    fn in_file(top: &Top, content: &Content, gate: &Gate, opener: &dyn Opener) -> Result<Option<Self>> {
        let Some(head) = &top.head else { return Ok(None) };
        // Refcounts that may be too low do not say what is free; version 2 has no bit that tools would clear.
        let unsure = head.header.incompatible.intersects(Incompatible::DIRTY | Incompatible::CORRUPT);
        if unsure || head.header.version < 3 {
            return Ok(None);
        }
        let Some(LinkFound { at: link_at, .. }) = find_link(&*top.opened.store, &head.header)? else {
            return Ok(None);
        };
        let Some(Opened { store, identity }) = open_to_index(&top.path, gate, opener)? else {
            return Ok(None);
        };
        let state = |identity: FileIdentity| (identity.file, identity.len, identity.mtime_ns);
        if state(identity) != state(top.opened.identity) {
            return Err(ErrorKind::Changed.into());
        }
        if times::put_back(&*store, identity.mtime_ns).is_err() {
            // Only a file's owner may do that; others must leave the file as it is.
            return Ok(None);
        }
        let old = root_in_file(&*store, head).ok().flatten();
        let replaces = old.as_ref().map_or(0, |root| root.generation);
        let used = Used::of(&*store, head, content)?;
        let Some((start, len_before)) = spot(&*store, &used, identity.len, old.as_ref())? else {
            return Ok(None);
        };
        let (len, mtime_ns) = (identity.len, identity.mtime_ns);
        let undo = Undo { store: Arc::clone(&store), len, mtime_ns, is_done: false };
        Ok(Some(Self {
            home: Home::File,
            link_at: Some(link_at),
            undo: Some(undo),
            replaces,
            len_before,
            ..Self::new(store, start)
        }))
    }

    fn in_sidecar(top: &Top, gate: &Gate, opener: &dyn Opener) -> Result<Self> {
        let old = root_in_sidecar(&top.path, gate, opener).ok().flatten();
        let path = sidecar_for(&top.path, gate, opener)?;
        let there = is_sidecar(&path).while_trying("examine").map_err(|error| error.in_file(&path))?;
        if there == Some(false) {
            return Err(Error::from(ErrorKind::SidecarTaken).in_file(&path));
        }
        let draft = AtomicFile::beside(&path)?;
        if !is_published(&top.path) {
            access::copy(&top.path, &draft.file)?;
        }
        let file = draft.file.try_clone().while_trying("make the index's file")?;
        let options = FileOptions { lock: None, cache: CacheMode::Host, ..FileOptions::ACTIVE };
        let store = Arc::new(FileStore::new(file, &path, &options)?);
        // The root comes last, in the first page.
        let start = HostOffset::new(PAGE_LEN as u64);
        Ok(Self {
            draft: Some((draft, path)),
            replaces: old.map_or(0, |(root, _)| root.generation),
            ..Self::new(store, start)
        })
    }

    fn new(store: Arc<dyn Store>, start: HostOffset) -> Self {
        Self {
            home: Home::Sidecar,
            store,
            start,
            next: start,
            waiting: Vec::new(),
            len_before: 0,
            link_at: None,
            draft: None,
            undo: None,
            replaces: 0,
        }
    }

    pub(super) fn home(&self) -> Home {
        self.home
    }

    /// Bytes that the layer's own file will have when `pages` more pages, and the root, were added.
    pub(super) fn len_after(&self, file_len: u64, pages: u64) -> u64 {
        match self.home {
            Home::File => self.next.get() + (pages + 1) * PAGE_LEN as u64,
            Home::Sidecar | Home::None => file_len,
        }
    }

    /// Whether the layer's time of change can be put back after its file was written.
    pub(super) fn keeps_time(&self) -> bool {
        self.home != Home::File || self.store.local().and_then(LocalFile::raw).is_some()
    }

    /// Adds a page.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(super) fn put(
        &mut self,
        chain: &ChainId,
        layer: LayerIndex,
        generation: u64,
        page: &Page,
    ) -> Result<PagePointer> {
        let pointer = PagePointer::new(chain, layer, self.next, generation as u32, page);
        self.waiting.extend_from_slice(page);
        self.next = self.next + PAGE_LEN as u64;
        if self.waiting.len() >= BATCH {
            self.write_waiting()?;
        }
        Ok(pointer)
    }

    fn write_waiting(&mut self) -> Result<()> {
        let at = HostOffset::new(self.next.get() - self.waiting.len() as u64);
        self.store.write_all(&self.waiting, at).while_trying("write the index").map_err(|e| e.at(at))?;
        self.waiting.clear();
        Ok(())
    }

    /// Writes the root and makes the index found; returns the root as it was written.
    ///
    /// # Errors
    /// Whatever the host reports; there is then no new index, or all of it.
    pub(super) fn finish(mut self, top: &Top, root: Root, mtime_ns: i64) -> Result<Root> {
        let (root, crc) = self.write_root(root)?;
        self.store.flush().while_trying("flush the index")?;
        if let Some((draft, path)) = self.draft.take() {
            draft.publish(&path, true)?;
            return Ok(root);
        }
        let link = IndexLink { root: root.at, generation: root.generation, root_crc: crc };
        let header = &top.head.as_ref().expect("only qcow2 files take an index").header;
        let link_at = self.link_at.expect("found when the place was chosen");
        write_link(&*self.store, header, link_at, Some(link))?;
        self.undo.iter_mut().for_each(Undo::disarm);
        times::put_back(&*self.store, mtime_ns)?;
        Ok(root)
    }

    fn write_root(&mut self, mut root: Root) -> Result<(Root, u32)> {
        root.len_before = self.len_before;
        if self.home == Home::Sidecar {
            root.at = HostOffset::ZERO;
            root.area = HostOffset::ZERO..self.next;
            let (page, crc) = root.encode();
            self.write_waiting()?;
            self.store.write_all(&page[..], root.at).while_trying("write the index")?;
            return Ok((root, crc));
        }
        root.at = self.next;
        root.area = self.start..self.next + PAGE_LEN as u64;
        let (page, crc) = root.encode();
        self.waiting.extend_from_slice(&page[..]);
        self.next = root.area.end;
        self.write_waiting()?;
        if self.store.len().while_trying("read the file's length")? > root.area.end.get() {
            // What is left of a longer index that lay here.
            self.store.set_len(root.area.end.get()).while_trying("cut off the old index")?;
        }
        Ok((root, crc))
    }
}

/// Where in a file of `len` bytes an index goes, and where the file ends without it: at the place of the one it had, or behind
/// what is in use; `None` if that is not free.
fn spot(store: &dyn Store, used: &Used, len: u64, old: Option<&Root>) -> Result<Option<(HostOffset, u64)>> {
    let old = old.filter(|root| root.area.end.get() == len && used.is_free_from(root.area.start));
    let usual = match old {
        Some(root) => (root.area.start, used.len_without(store, root)?),
        None => (used.place_behind(len), len),
    };
    if !used.is_free_from(usual.0) {
        return Ok(None);
    }
    let first = used.first_free().filter(|&first| first < usual.0);
    Ok(Some(first.map_or(usual, |first| (first, first.get()))))
}

/// Where the sidecar of a layer lies.
///
/// # Errors
/// [`ErrorKind::NotIndexable`]: a layer that may have none has none in its file either.
pub(super) fn sidecar_for(layer: &Path, gate: &Gate, opener: &dyn Opener) -> Result<PathBuf> {
    let reason = "a published layer of a tiered disk has one on the hosts that serve the disk only";
    opener.sidecar(layer, gate).ok_or_else(|| ErrorKind::NotIndexable { reason }.into())
}

/// Opens a layer's file for an index; `None` where it may not be written.
///
/// # Errors
/// Someone else is at it, for a moment or to change it: no reason for a file beside it.
fn open_to_index(path: &Path, gate: &Gate, opener: &dyn Opener) -> Result<Option<Opened>> {
    match opener.open(path, Role::Indexed, gate) {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if error.is_conflict() => Err(error),
        Err(_) => Ok(None),
    }
}
