//! All pages of a snapshot, extent by extent, on all processors.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::super::error::{Result, VaultError};
use super::super::pages::{self, PageNumber};
use super::Snapshot;
use super::order::{Piece, Want};
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;

impl Snapshot {
    /// Gives every page that has bytes to `sink`, from several threads and in no order, each once. Pages of zeros and free
    /// ones are not given: `sink` starts from zeros. Returns, in order, the clean pages that have no bytes: not wanted, not
    /// stored, or lost. They must be hidden, or read from the guest's disk.
    ///
    /// # Errors
    /// [`VaultError::PageLost`] when no copy of a page that the guest needs can be read; [`VaultError::Sink`] when `sink`
    /// fails.
    pub fn stream(
        &self,
        want: Want,
        sink: impl Fn(Frame, &[u8; PAGE_BYTES]) -> io::Result<()> + Sync,
    ) -> Result<Vec<Frame>> {
        let (order, mut lost) = self.order(want);
        let groups: Vec<&[Piece]> = order.extents().collect();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let more_lost = Mutex::new(Vec::new());
        let work = || -> Result<()> {
            while !stop.load(Ordering::Relaxed)
                && let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let given = self.give(group, &sink, &more_lost);
                stop.fetch_or(given.is_err(), Ordering::Relaxed);
                given?;
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(2, usize::from).min(groups.len().max(1));
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| VaultError::Worker)?)
        })?;
        lost.extend(more_lost.into_inner());
        lost.sort_unstable();
        Ok(lost)
    }

    /// Reads an extent once, and gives all its pages.
    fn give(
        &self,
        group: &[Piece],
        sink: &(impl Fn(Frame, &[u8; PAGE_BYTES]) -> io::Result<()> + Sync),
        lost: &Mutex<Vec<Frame>>,
    ) -> Result<()> {
        let layout = &self.metadata.info.layout;
        let first = group[0].place;
        let extent = self.extent(first.object, first.extent);
        for piece in group {
            for by in 0..piece.len {
                let frame = pages::frame(layout, PageNumber(piece.first.0 + by));
                let slot = usize::from(piece.place.slot) + by as usize;
                let page = extent.as_ref().ok().and_then(|extent| extent.as_chunks().0.get(slot));
                match page {
                    Some(page) => sink(frame, page).map_err(|source| VaultError::Sink { frame, source })?,
                    None if piece.class == PageClass::Clean => lost.lock().push(frame),
                    None => {
                        let tried =
                            extent.err().unwrap_or_else(|| vec!["its extent has fewer pages".to_owned()]);
                        return Err(VaultError::PageLost { snapshot: self.info().title(), frame, tried });
                    }
                }
            }
        }
        Ok(())
    }
}
