//! Where a new index goes, and how it appears there at once.
//!
//! **In the file**: pages after its end, in clusters that nothing refers to; flush; the link and its autoclear bit; flush.
//! The header's sector is written whole. Then the file gets back the time of change that it had: nothing it says has
//! changed, and the time is in the index. A crash before that costs a digest at the next open.
//!
//! **In a sidecar**: a new file beside it, flushed, and named.
//!
//! An index that was there is overwritten if it lies last in the file, else left behind as a hole that stock tools fill.
//! Whoever still reads it sees checksums that do not match.

use std::path::Path;

use vmstrata_qcow2::header::field;
use vmstrata_qcow2::index::{ChainId, Home, IndexLink, PAGE_LEN, Page, PagePointer, Root};
use vmstrata_qcow2::refcount::decode_table_entry;
use vmstrata_qcow2::{Autoclear, Header, Incompatible};
use vmstrata_store::{CacheMode, FileIdentity, FileOptions, FileStore, Gate, Store};
use vmstrata_types::{HostOffset, LayerIndex};

use super::digest::Content;
use super::home::{LinkFound, find_link, root_in_file, root_in_sidecar, sidecar_of};
use crate::chain::{SESSION_MASK, Top};
use crate::draft::Draft;
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::words;
use crate::opener::{Opened, Opener, Role};
use crate::times;

/// A sector is written whole or not at all.
const SECTOR: usize = 512;
/// Bytes written at once.
const BATCH: usize = 256 << 10;

/// Takes the pages of a new index, in order.
pub(super) struct Place {
    home: Home,
    pub(super) store: std::sync::Arc<dyn Store>,
    start: HostOffset,
    next: HostOffset,
    waiting: Vec<u8>,
    len_before: u64,
    link_at: Option<HostOffset>,
    draft: Option<Draft>,
    /// What the file's own generation was.
    pub(super) replaces: u64,
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
            && let Some(place) = Self::in_file(top, content.highest, gate, opener)?
        {
            return Ok(place);
        }
        Self::in_sidecar(top, gate, opener)
    }

    fn in_file(top: &Top, highest: u64, gate: &Gate, opener: &dyn Opener) -> Result<Option<Self>> {
        let Some(head) = &top.head else { return Ok(None) };
        if head.header.incompatible.intersects(Incompatible::DIRTY | Incompatible::CORRUPT) {
            // Refcounts that may be too low do not say what is free.
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
        let boundary = head.header.cluster_bits.size().max(PAGE_LEN as u64);
        let append = HostOffset::new(identity.len.next_multiple_of(boundary));
        let reuse =
            old.filter(|root| root.area.end.get() == identity.len && root.area.start > HostOffset::ZERO);
        let candidates = [reuse.map(|root| (root.area.start, root.len_before)), Some((append, identity.len))];
        for (start, len_before) in candidates.into_iter().flatten() {
            if is_free(&*store, &head.header, start, highest)? {
                return Ok(Some(Self {
                    home: Home::File,
                    link_at: Some(link_at),
                    replaces,
                    len_before,
                    ..Self::new(store, start)
                }));
            }
        }
        Ok(None)
    }

    fn in_sidecar(top: &Top, gate: &Gate, opener: &dyn Opener) -> Result<Self> {
        let old = root_in_sidecar(&top.path, gate, opener).ok().flatten();
        let path = sidecar_of(&top.path);
        let draft = Draft::beside(&path)?;
        let file = draft.file.try_clone().while_trying("make the index's file")?;
        let options = FileOptions { lock: None, cache: CacheMode::Host, ..FileOptions::ACTIVE };
        let store = std::sync::Arc::new(FileStore::new(file, &path, &options)?);
        // The root comes last, in the first page.
        let start = HostOffset::new(PAGE_LEN as u64);
        Ok(Self {
            draft: Some(draft),
            replaces: old.map_or(0, |(root, _)| root.generation),
            ..Self::new(store, start)
        })
    }

    fn new(store: std::sync::Arc<dyn Store>, start: HostOffset) -> Self {
        Self {
            home: Home::Sidecar,
            store,
            start,
            next: start,
            waiting: Vec::new(),
            len_before: 0,
            link_at: None,
            draft: None,
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
        self.home != Home::File || self.store.raw().is_some()
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

    /// Writes the root and makes the index found; returns the root and the bytes written.
    ///
    /// # Errors
    /// Whatever the host reports; there is then no new index, or all of it.
    pub(super) fn finish(mut self, top: &Top, root: Root, mtime_ns: i64) -> Result<(Root, u64)> {
        let (root, crc) = self.write_root(root)?;
        let bytes = root.area.end - root.area.start;
        self.store.flush().while_trying("flush the index")?;
        if let Some(draft) = self.draft {
            draft.publish(&sidecar_of(&top.path), true)?;
            return Ok((root, bytes));
        }
        let link = IndexLink { root: root.at, generation: root.generation, root_crc: crc };
        let header = &top.head.as_ref().expect("only qcow2 files take an index").header;
        let link_at = self.link_at.expect("found when the place was chosen");
        write_link(&*self.store, header, link_at, Some(link))?;
        times::put_back(&*self.store, mtime_ns)?;
        Ok((root, bytes))
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

/// Writes or clears the link and its autoclear bit, in one sector if they share one, and flushes.
///
/// # Errors
/// Whatever the host reports, and a process that has begun to write the image.
pub(super) fn write_link(
    store: &dyn Store,
    header: &Header,
    link_at: HostOffset,
    link: Option<IndexLink>,
) -> Result<()> {
    let mut sector = [0; SECTOR];
    store.read_exact(&mut sector, HostOffset::ZERO).while_trying("read the header")?;
    let bits_at = usize::try_from(field::AUTOCLEAR).expect("in the first sector");
    let bits: &mut [u8; 8] = sector[bits_at..].first_chunk_mut().expect("in the first sector");
    let mut autoclear = Autoclear::from_bits_retain(u64::from_be_bytes(*bits));
    if autoclear.bits() & SESSION_MASK != 0
        || autoclear.bits() | Autoclear::INDEX.bits() != header.autoclear.bits() | Autoclear::INDEX.bits()
    {
        return Err(ErrorKind::Changed.into());
    }
    autoclear.set(Autoclear::INDEX, link.is_some());
    *bits = autoclear.bits().to_be_bytes();
    let data = IndexLink::encode(link);
    let start = usize::try_from(link_at.get()).expect("within the header");
    match sector.get_mut(start..start + data.len()) {
        Some(place) => place.copy_from_slice(&data),
        // A stock tool moved the link out of the first sector. It may be written after the bit or before: a link
        // that does not fit its root is no link.
        None => store.write_all(&data, link_at).while_trying("write the header")?,
    }
    store.write_all(&sector, HostOffset::ZERO).while_trying("write the header")?;
    store.flush().while_trying("flush the header")
}

/// Whether the file can be written from `at` on: a cluster boundary above all that is named, and refcounts of 0.
///
/// # Errors
/// Refcounts that cannot be read or break the format.
pub(super) fn is_free(store: &dyn Store, header: &Header, at: HostOffset, highest: u64) -> Result<bool> {
    Ok(at.is_aligned(header.cluster_bits) && at.get() > highest && free_from(store, header, at)?)
}

/// Whether every cluster from `at` on has refcount 0.
fn free_from(store: &dyn Store, header: &Header, at: HostOffset) -> Result<bool> {
    let bits = header.cluster_bits;
    let per_block = header.refcount_order.entries_per_block(bits) as u64;
    let first = at.get() >> bits.get();
    let mut table = vec![0; header.refcount_table_entries() * 8];
    store.read_exact(&mut table, header.refcount_table_offset).while_trying("read the refcount table")?;
    let mut block = vec![0; usize::try_from(bits.size()).expect("at most 2 MiB")];
    for (number, raw) in (0u64..).zip(words(&table)).skip((first / per_block) as usize) {
        let entry = decode_table_entry(raw, bits);
        let Some(block_at) = entry.map_err(|entry| ErrorKind::Entry { table: "refcount table", entry })?
        else {
            continue;
        };
        store.read_exact(&mut block, block_at).while_trying("read a refcount block")?;
        let skip = first.saturating_sub(number * per_block);
        if (skip..per_block).any(|index| header.refcount_order.get(&block, index as usize) != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}
