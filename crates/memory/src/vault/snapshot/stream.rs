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
        let wanted = group.iter().fold(0, |wanted, piece| wanted | piece.places());
        let (have, tried) = self.sources.read_extent(group[0].extent(), wanted, reader);
        let pages = reader.pages().as_chunks().0;
        for piece in group {
            let (mut number, mut left, mut slot) = (piece.first.0, piece.len, usize::from(piece.place.slot));
            while left > 0 {
                let (frame, in_block) = pages::run(layout, PageNumber(number));
                let there = u64::from((have >> slot).trailing_ones()).min(left).min(in_block);
                if there > 0 {
                    sink(frame, &pages[slot..slot + there as usize])
                        .map_err(|source| VaultError::Sink { frame, source })?;
                } else if piece.class == PageClass::Clean {
                    lost.lock().push(frame);
                } else {
                    let snapshot = self.info().title();
                    return Err(VaultError::PageLost { snapshot, frame, tried });
                }
                let done = there.max(1);
                (number, left, slot) = (number + done, left - done, slot + done as usize);
            }
        }
        Ok(())
    }
}
