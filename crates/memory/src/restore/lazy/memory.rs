//! A machine's memory, some of it still to be read: a local file, and sources for what is not in it yet.

mod fetch;
mod fill;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rustix::fs::{FallocateFlags, fallocate};

use super::source::PageSource;
use crate::address::{Frame, PAGE_BYTES};
use crate::ram::{Block, Layout};
use crate::restore::clears::Clears;

/// Locks for pages that are being read: neighbours share one, as they are read together. A power of two.
const STRIPES: u64 = 64;

/// Of a page: it is in the local file. Other values are 1 + the index of the first source to ask.
const HERE: u8 = 0;

/// Why a page is not had.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// No source has it, or none can read it.
    #[error("{frame} cannot be read: {}", tried.join("; "))]
    Lost {
        /// The page.
        frame: Frame,
        /// What each source said.
        tried: Vec<String>,
    },
    /// The machine has no such bytes.
    #[error("the machine has no {len} bytes at {at:#x} of its memory")]
    Range {
        /// Offset in the backends, one after the other.
        at: u64,
        /// Bytes.
        len: usize,
    },
    /// The local file failed.
    #[error("the local file of the guest's memory")]
    Local(#[from] io::Error),
}

/// How much of a memory is still to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Pages that are not here yet.
    pub pages: u64,
    /// Pages that had to be read from a source when the guest was started, those it did not wait for included.
    pub of: u64,
    /// Pages of those left that could not be read when they were tried last.
    pub lost: u64,
}

/// A machine's memory: its backends one after the other, in pages.
#[derive(Debug)]
pub struct LazyMemory {
    /// Zeros where nothing was written yet.
    local: File,
    /// In order of their offsets.
    blocks: Vec<Block>,
    /// `[page]`
    origin: Vec<AtomicU8>,
    left: AtomicU64,
    of: u64,
    clears: Clears,
    /// In the order in which the background reads them.
    order: Vec<u64>,
    /// Asked in order; emptied when nothing is left.
    sources: RwLock<Vec<Arc<dyn PageSource>>>,
    reading: [Mutex<()>; STRIPES as usize],
    placing: Mutex<()>,
    /// Reads that wait for a source.
    waiting: AtomicUsize,
    lost: Mutex<BTreeSet<u64>>,
    patience: Duration,
}

impl LazyMemory {
    /// A memory of zeros that lies as `layout` says, in `local`, which is empty. A page that cannot be read is tried for
    /// `patience` before that is an error.
    ///
    /// # Errors
    /// When the file cannot be made that long.
    pub fn new(local: File, layout: &Layout, patience: Duration) -> io::Result<Self> {
        let mut blocks = layout.blocks().to_vec();
        blocks.sort_by_key(|block| block.file_offset);
        local.set_len(layout.bytes())?;
        let pages = layout.bytes() / PAGE_BYTES as u64;
        Ok(Self {
            local,
            blocks,
            origin: (0..pages).map(|_| AtomicU8::new(HERE)).collect(),
            left: AtomicU64::new(0),
            of: 0,
            clears: Clears::default(),
            order: Vec::new(),
            sources: RwLock::default(),
            reading: [const { Mutex::new(()) }; STRIPES as usize],
            placing: Mutex::new(()),
            waiting: AtomicUsize::new(0),
            lost: Mutex::default(),
            patience,
        })
    }

    /// Adds a source, and the pages that it is the first to be asked for, in the order in which they are read in the background;
    /// those of an earlier source stay with that.
    pub fn add(&mut self, source: Arc<dyn PageSource>, pages: impl IntoIterator<Item = Frame>) {
        let sources = self.sources.get_mut();
        sources.push(source);
        let first = u8::try_from(sources.len()).expect("a few sources");
        for frame in pages {
            let Some(page) = page_of(&self.blocks, frame) else { continue };
            let origin = self.origin[page as usize].get_mut();
            if *origin == HERE {
                *origin = first;
                *self.left.get_mut() += 1;
                self.of += 1;
                self.order.push(page);
            }
        }
    }

    /// Puts a page in that no source has; before [`LazyMemory::clear`].
    pub(super) fn put(&self, frame: Frame, bytes: &[u8; PAGE_BYTES]) -> io::Result<()> {
        let page = page_of(&self.blocks, frame).ok_or(io::ErrorKind::InvalidInput)?;
        self.local.write_all_at(bytes, page * PAGE_BYTES as u64)
    }

    /// Gives a page up that is not here: it is zeros from now on. False if it is here.
    pub(super) fn give_up(&mut self, frame: Frame) -> bool {
        let Some(page) = page_of(&self.blocks, frame) else { return false };
        let origin = self.origin[page as usize].get_mut();
        let was_left = std::mem::replace(origin, HERE) != HERE;
        *self.left.get_mut() -= u64::from(was_left);
        self.of -= u64::from(was_left);
        was_left
    }

    /// Has bits cleared: in pages that are here at once, in others when they are read.
    pub(super) fn clear(&mut self, clears: Clears) -> io::Result<()> {
        self.clears = clears;
        for page in self.clears.pages() {
            if *self.origin[page as usize].get_mut() == HERE {
                self.clears.apply_to(page, &self.local, page * PAGE_BYTES as u64)?;
            }
        }
        Ok(())
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        (self.origin.len() * PAGE_BYTES) as u64
    }

    /// How much is still to be read.
    pub fn left(&self) -> Left {
        let mut lost = self.lost.lock();
        // Some came along with others.
        lost.retain(|page| !self.is_here(*page));
        Left { pages: self.left.load(Ordering::Acquire), of: self.of, lost: lost.len() as u64 }
    }

    /// Fills `into` from `at` on, from sources where it must.
    ///
    /// # Errors
    /// [`PageError`] when a part of it cannot be had.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), PageError> {
        for page in self.pages(at, into.len())? {
            self.fetch(page, self.patience)?;
        }
        Ok(self.local.read_exact_at(into, at)?)
    }

    /// Takes what the guest wrote.
    ///
    /// # Errors
    /// As [`LazyMemory::read`], for pages of which only a part is written.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), PageError> {
        let pages = self.pages(at, bytes.len())?;
        self.fetch_cut(at, bytes.len())?;
        let _one = self.placing.lock();
        self.local.write_all_at(bytes, at)?;
        pages.for_each(|page| self.is_now_here(page));
        Ok(())
    }

    /// Makes whole pages zeros that the guest has no more use for.
    ///
    /// # Errors
    /// As [`LazyMemory::write`].
    pub fn discard(&self, at: u64, len: u64) -> Result<(), PageError> {
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let pages = self.pages(at, bytes)?;
        self.fetch_cut(at, bytes)?;
        let _one = self.placing.lock();
        fallocate(&self.local, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)
            .map_err(io::Error::from)?;
        pages.for_each(|page| self.is_now_here(page));
        Ok(())
    }

    fn pages(&self, at: u64, len: usize) -> Result<std::ops::Range<u64>, PageError> {
        let end = at.checked_add(len as u64).filter(|end| *end <= self.bytes());
        let end = end.ok_or(PageError::Range { at, len })?;
        Ok(at / PAGE_BYTES as u64..end.div_ceil(PAGE_BYTES as u64))
    }

    /// Reads the pages of a range that it covers a part of.
    fn fetch_cut(&self, at: u64, len: usize) -> Result<(), PageError> {
        let end = at + len as u64;
        for cut in [at, end].into_iter().filter(|cut| !cut.is_multiple_of(PAGE_BYTES as u64)) {
            self.fetch(cut / PAGE_BYTES as u64, self.patience)?;
        }
        Ok(())
    }

    fn is_here(&self, page: u64) -> bool {
        self.origin[page as usize].load(Ordering::Acquire) == HERE
    }

    /// To be called by who holds `placing`, with the page in the local file.
    fn is_now_here(&self, page: u64) {
        if self.origin[page as usize].swap(HERE, Ordering::AcqRel) != HERE {
            self.left.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The page of the backends that is at `frame`, if the machine has it.
pub(super) fn page_of(blocks: &[Block], frame: Frame) -> Option<u64> {
    let start = frame.start()?;
    let block = blocks.iter().find(|block| block.start <= start && start.get() < block.end())?;
    Some((block.file_offset + (start.get() - block.start.get())) / PAGE_BYTES as u64)
}
