//! All pages of a snapshot, extent by extent, on all processors.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use vmstrata_store::on_threads;

use super::super::error::{Result, VaultError};
use super::super::extent::ExtentReader;
use super::super::pages::{self, PageNumber};
use super::Snapshot;
use super::order::{Piece, Want};
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;

/// Bytes of pages that follow one another.
type Pages = [[u8; PAGE_BYTES]];

impl Snapshot {
    /// Gives every page that has bytes to `sink`, from several threads and in no order, each once, together with those that
    /// follow it in the machine and in the store. Pages of zeros and free ones are not given: `sink` starts from zeros.
    /// Returns, in order, the clean pages that have no bytes: not wanted, not stored, or lost. They must be hidden, or read
    /// from the guest's disk.
    ///
    /// # Errors
    /// [`VaultError::PageLost`] when no copy of a page that the guest needs can be read; [`VaultError::Sink`] when `sink`
    /// fails.
    pub fn stream(
        &self,
        want: Want,
        sink: impl Fn(Frame, &Pages) -> io::Result<()> + Sync,
    ) -> Result<Vec<Frame>> {
        let (order, mut lost) = self.order(want);
        let groups: Vec<&[Piece]> = order.extents().collect();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let more_lost = Mutex::new(Vec::new());
        let work = || -> Result<()> {
            let mut reader = ExtentReader::default();
            while !stop.load(Ordering::Relaxed)
                && let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let given = self.give(group, &mut reader, &sink, &more_lost);
                stop.fetch_or(given.is_err(), Ordering::Relaxed);
                given?;
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(2, usize::from).min(groups.len().max(1));
        on_threads(threads, work).into_iter().collect::<Result<()>>()?;
        lost.extend(more_lost.into_inner());
        lost.sort_unstable();
        Ok(lost)
    }

    /// Reads an extent once, and gives all its pages.
    fn give(
        &self,
        group: &[Piece],
        reader: &mut ExtentReader,
        sink: &(impl Fn(Frame, &Pages) -> io::Result<()> + Sync),
        lost: &Mutex<Vec<Frame>>,
    ) -> Result<()> {
        let layout = &self.metadata.info.layout;
        let read = self.sources.read_extent(group[0].extent(), reader);
        let pages = if read.is_ok() { reader.pages().as_chunks().0 } else { &[] };
        for piece in group {
            let (mut number, mut left, mut slot) = (piece.first.0, piece.len, usize::from(piece.place.slot));
            while left > 0 {
                let (frame, in_block) = pages::run(layout, PageNumber(number));
                let len = left.min(in_block);
                let there = pages.get(slot..).unwrap_or_default();
                let there = &there[..there.len().min(len as usize)];
                if !there.is_empty() {
                    sink(frame, there).map_err(|source| VaultError::Sink { frame, source })?;
                }
                let mut absent = (frame.get() + there.len() as u64..frame.get() + len).map(Frame::new);
                if piece.class == PageClass::Clean {
                    lost.lock().extend(absent);
                } else if let Some(frame) = absent.next() {
                    return Err(self.page_lost(frame, &read));
                }
                (number, left, slot) = (number + len, left - len, slot + len as usize);
            }
        }
        Ok(())
    }

    fn page_lost(&self, frame: Frame, read: &Result<(), Vec<String>>) -> VaultError {
        let short = || vec!["its extent has fewer pages".to_owned()];
        let tried = read.as_ref().err().cloned().unwrap_or_else(short);
        VaultError::PageLost { snapshot: self.info().title(), frame, tried }
    }
}
