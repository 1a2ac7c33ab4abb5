//! Reading a page of the memory from its sources.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{HERE, LazyMemory, PageError, STRIPES, page_of};
use crate::address::{Frame, PAGE_BYTES};
use crate::ram::Block;

/// How often a page that cannot be read is tried again.
const RETRY: Duration = Duration::from_millis(250);

impl LazyMemory {
    /// Sees to it that a page is in the local file.
    pub(in super::super) fn fetch(&self, page: u64, patience: Duration) -> Result<(), PageError> {
        if self.is_here(page) {
            return Ok(());
        }
        let _waits = (patience > Duration::ZERO).then(|| Waits::new(&self.waiting));
        let _reads = self.reading[(page / STRIPES % STRIPES) as usize].lock();
        let start = Instant::now();
        loop {
            let Err(error) = self.ask(page) else {
                self.lost.lock().remove(&page);
                return Ok(());
            };
            // Who waited in vain once need not again.
            if !matches!(error, PageError::Lost { .. }) || start.elapsed() >= patience || self.is_lost(page) {
                self.lost.lock().insert(page);
                return Err(error);
            }
            std::thread::sleep(RETRY.min(patience));
        }
    }

    fn is_lost(&self, page: u64) -> bool {
        self.lost.lock().contains(&page)
    }

    /// Asks the sources for a page, once.
    fn ask(&self, page: u64) -> Result<(), PageError> {
        let first = match self.origin[page as usize].load(Ordering::Acquire) {
            HERE => return Ok(()),
            first => usize::from(first) - 1,
        };
        let frame = frame_of(&self.blocks, page);
        let sources = self.sources.read().clone();
        let mut tried = Vec::new();
        for source in sources.iter().skip(first) {
            match source.read(frame, &mut |frame, bytes| self.place(frame, bytes)) {
                Ok(()) if self.is_here(page) => return Ok(()),
                Ok(()) => tried.push("it is not where it should be".to_owned()),
                Err(error) => tried.push(error.to_string()),
            }
        }
        if self.is_here(page) { Ok(()) } else { Err(PageError::Lost { frame, tried }) }
    }

    /// Puts a page that a source had into the local file, unless one is there.
    fn place(&self, frame: Frame, bytes: &[u8; PAGE_BYTES]) -> io::Result<()> {
        let Some(page) = page_of(&self.blocks, frame) else { return Ok(()) };
        let _one = self.placing.lock();
        if self.is_here(page) {
            return Ok(());
        }
        let at = page * PAGE_BYTES as u64;
        let mut cleared = *bytes;
        let bytes = if self.clears.apply(at, &mut cleared) { &cleared } else { bytes };
        self.local.write_all_at(bytes, at)?;
        self.is_now_here(page);
        Ok(())
    }
}

/// Counts a read that waits.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The frame of a page of the backends.
fn frame_of(blocks: &[Block], page: u64) -> Frame {
    let at = page * PAGE_BYTES as u64;
    let after = blocks.partition_point(|block| block.file_offset <= at);
    let block = blocks[after - 1];
    Frame::new(Frame::of(block.start).get() + page - block.file_offset / PAGE_BYTES as u64)
}
