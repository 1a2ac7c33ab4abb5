//! Getting pages of a snapshot from the disks of its guest.

use std::collections::HashSet;
use std::io;
use std::time::Instant;

use parking_lot::Mutex;

use super::later::Later;
use super::reader::{self, Wanted};
use crate::address::{Frame, PAGE_BYTES};
use crate::disk::ReadDisk;
use crate::vault::{DiskState, Refill, VaultError};

/// Reads pages of clean cache that a snapshot does not hold from the disks at the same instant. Whatever it gives is
/// what the page was.
pub struct Refiller<'a> {
    /// In order of frames.
    table: &'a [(Frame, Refill)],
    /// As the snapshot counts them.
    disks: Vec<Option<Box<dyn ReadDisk>>>,
    /// Pages whose place had other bytes.
    changed: Mutex<HashSet<Frame>>,
}

impl<'a> Refiller<'a> {
    /// Of pages as [`Snapshot::refill`] has them, and `disks` in the order of the snapshot's; pages of one that is `None`
    /// cannot be had.
    ///
    /// [`Snapshot::refill`]: crate::vault::Snapshot::refill
    pub fn new(table: &'a [(Frame, Refill)], disks: Vec<Option<Box<dyn ReadDisk>>>) -> Self {
        Self { table, disks, changed: Mutex::default() }
    }

    fn find(&self, frame: Frame) -> Option<&Refill> {
        let index = self.table.binary_search_by_key(&frame, |(frame, _)| *frame).ok()?;
        Some(&self.table[index].1)
    }

    /// Gives those of `frames`, which are in order, that can be had to `sink`, from several threads and in no order, each
    /// once; nothing is read after `until`. Returns the others, in order.
    ///
    /// # Errors
    /// [`VaultError::Sink`] when `sink` fails.
    pub fn pages(
        &self,
        frames: &[Frame],
        until: Option<Instant>,
        sink: impl Fn(Frame, &[u8; PAGE_BYTES]) -> io::Result<()> + Sync,
    ) -> Result<Vec<Frame>, VaultError> {
        let wanted = frames.iter().filter_map(|&frame| {
            let refill = self.find(frame)?;
            Some(Wanted { frame, pieces: &refill.pieces })
        });
        let given = Mutex::new(Vec::new());
        reader::read(&self.disks(), wanted.collect(), until, |wanted, page| {
            let frame = wanted.frame;
            if self.find(frame).is_some_and(|refill| refill.is(page)) {
                sink(frame, page).map_err(|source| VaultError::Sink { frame, source })?;
                given.lock().push(frame);
            } else {
                self.changed.lock().insert(frame);
            }
            Ok::<_, VaultError>(())
        })?;
        let mut given = given.into_inner();
        given.sort_unstable();
        let missing = frames.iter().filter(|frame| given.binary_search(frame).is_err());
        Ok(missing.copied().collect())
    }

    /// Leaves for later what of `frames`, which are in order, can be read then; with the others, in order. Their places are
    /// checked now, as a guest that runs cannot be told any more that it does not have a page.
    pub fn later(self, frames: &[Frame], states: &[DiskState]) -> (Later, Vec<Frame>) {
        let changed = self.changed.lock();
        let unchanged = frames.iter().filter(|frame| !changed.contains(frame));
        let places: Vec<(Frame, &Refill)> =
            unchanged.filter_map(|&frame| Some((frame, self.find(frame)?))).collect();
        drop(changed);
        let wanted: Vec<Wanted<'_>> =
            places.iter().map(|&(frame, refill)| Wanted { frame, pieces: &refill.pieces }).collect();
        let readable = reader::readable(&self.disks(), &wanted);
        let later: Vec<(Frame, Refill)> = places
            .into_iter()
            .zip(readable)
            .filter(|(_, is_readable)| *is_readable)
            .map(|((frame, refill), _)| (frame, refill.clone()))
            .collect();
        let mut left = later.iter().map(|(frame, _)| *frame).peekable();
        let hidden = frames.iter().filter(|frame| left.next_if_eq(frame).is_none()).copied().collect();
        (Later::new(later, self.disks, states), hidden)
    }

    fn disks(&self) -> Vec<Option<&dyn ReadDisk>> {
        self.disks.iter().map(Option::as_deref).collect()
    }
}

impl std::fmt::Debug for Refiller<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let open = self.disks.iter().flatten().count();
        f.debug_struct("Refiller").field("pages", &self.table.len()).field("disks", &open).finish()
    }
}
