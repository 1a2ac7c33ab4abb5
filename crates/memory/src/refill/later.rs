//! Pages of cache that are read from the guest's disks while it runs.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::reader::{self, Wanted};
use crate::address::{Frame, PAGE_BYTES};
use crate::disk::ReadDisk;
use crate::vault::{DiskPiece, DiskState, Refill};

/// The most pages that are read along with one that the guest waits for.
const GROUP_PAGES: usize = 64;

/// Pages whose bytes lie on the guest's disks.
///
/// What a disk has is given even where it is not what the page was: the guest would read the same had the page been hidden.
pub struct Later {
    /// In order of their places, those side by side in a group.
    pages: Vec<(Frame, Refill)>,
    /// `[group]`: its first page.
    groups: Vec<usize>,
    /// Index into `pages`.
    index: HashMap<Frame, usize>,
    disks: Vec<Option<Box<dyn ReadDisk>>>,
    /// `[disk]`: what it is called, and whether was said that it has changed.
    names: Vec<(String, AtomicBool)>,
}

impl Later {
    pub(super) fn new(
        mut pages: Vec<(Frame, Refill)>,
        disks: Vec<Option<Box<dyn ReadDisk>>>,
        states: &[DiskState],
    ) -> Self {
        pages.sort_by_key(|(_, refill)| refill.pieces.first().map(|piece| (piece.disk, piece.offset)));
        let mut groups: Vec<usize> = Vec::new();
        for at in 0..pages.len() {
            let goes_on = groups.last().is_some_and(|first| at - first < GROUP_PAGES)
                && is_next(&pages[at - 1].1.pieces, &pages[at].1.pieces);
            groups.extend((!goes_on).then_some(at));
        }
        let index = pages.iter().enumerate().map(|(index, (frame, _))| (*frame, index)).collect();
        let names = states.iter().map(|state| (state.disk.clone(), AtomicBool::new(false))).collect();
        Self { pages, groups, index, disks, names }
    }

    /// The pages, in the order in which they are best read: hot ones first.
    pub fn frames(&self) -> impl Iterator<Item = Frame> {
        let of = |is_hot: bool| self.pages.iter().filter(move |(_, refill)| refill.is_hot == is_hot);
        of(true).chain(of(false)).map(|(frame, _)| *frame)
    }

    /// Gives a page, and those beside it on the disk. Gives nothing that is not one of [`Later::frames`].
    ///
    /// # Errors
    /// When the page cannot be read now; what `give` says.
    pub fn read(
        &self,
        frame: Frame,
        give: &mut dyn FnMut(Frame, &[u8; PAGE_BYTES]) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(&index) = self.index.get(&frame) else { return Ok(()) };
        let group = &self.pages[self.group(index)];
        let batch: Vec<Wanted<'_>> = group.iter().map(wanted).collect();
        let disks: Vec<Option<&dyn ReadDisk>> = self.disks.iter().map(Option::as_deref).collect();
        let mut is_given = false;
        reader::read_batch(
            &disks,
            &batch,
            &|| false,
            &mut |wanted: &Wanted<'_>, page: &[u8; PAGE_BYTES]| {
                is_given |= wanted.frame == frame;
                self.compare(wanted.frame, page);
                give(wanted.frame, page)
            },
        )?;
        if !is_given {
            let page = reader::alone(&disks, wanted(&self.pages[index]).pieces)?;
            self.compare(frame, &page);
            give(frame, &page)?;
        }
        Ok(())
    }

    /// The pages that are read along with the page `index`.
    fn group(&self, index: usize) -> Range<usize> {
        let next = self.groups.partition_point(|first| *first <= index);
        self.groups[next - 1]..self.groups.get(next).copied().unwrap_or(self.pages.len())
    }

    /// Says once of each disk that it has other bytes than it had.
    fn compare(&self, frame: Frame, page: &[u8; PAGE_BYTES]) {
        let (_, refill) = &self.pages[self.index[&frame]];
        if refill.is(page) {
            return;
        }
        let disk = refill.pieces.first().and_then(|piece| self.names.get(usize::from(piece.disk)));
        if let Some((disk, is_told)) = disk
            && !is_told.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "{disk}: {frame} of the guest's cache is not what the snapshot's memory had of it: the guest gets what the disk has"
            );
        }
    }
}

fn wanted((frame, refill): &(Frame, Refill)) -> Wanted<'_> {
    Wanted { frame: *frame, pieces: &refill.pieces }
}

/// Whether a page begins on disk where the other ends.
fn is_next(one: &[DiskPiece], next: &[DiskPiece]) -> bool {
    let (Some(last), Some(first)) = (one.last(), next.first()) else { return false };
    last.disk == first.disk && last.offset.checked_add(last.len.into()) == Some(first.offset)
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("pages", &self.pages.len()).finish_non_exhaustive()
    }
}
