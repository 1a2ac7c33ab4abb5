//! Which clean pages of a guest the snapshot of its disks holds, byte for byte.

use std::collections::HashSet;
use std::convert::Infallible;

use parking_lot::Mutex;

use super::claims::{CleanPage, claims, pages_on};
use super::reader::{self, Wanted};
use crate::address::{Frame, PAGE_BYTES};
use crate::disk::ReadDisk;
use crate::introspect::{DiskIndex, Pages};
use crate::ram::Ram;
use crate::vault::Refill;

/// Pages by which a disk of the guest is known among those of the snapshot.
const SAMPLES: usize = 64;

/// Clean pages with where they are on disk.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// In order of frames.
    pages: Vec<(Frame, Refill)>,
}

impl Found {
    /// How to get a page from there.
    pub fn get(&self, frame: Frame) -> Option<&Refill> {
        let index = self.pages.binary_search_by_key(&frame, |(frame, _)| *frame).ok()?;
        Some(&self.pages[index].1)
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

/// Finds the clean pages of a guest on `disks`, which are at the same instant as `ram` and in the snapshot's order. Pages
/// of zeros are left out: they cost nothing anyway.
///
/// Which of the guest's disks is which of these, nobody says: it is the one that has its pages.
pub fn find(ram: &dyn Ram, pages: &Pages, disks: &[Option<Box<dyn ReadDisk>>]) -> Found {
    let disks: Vec<Option<&dyn ReadDisk>> = disks.iter().map(Option::as_deref).collect();
    let search = Search { ram, pages, disks: &disks };
    let mut found = Found::default();
    for disk in (0..pages.disks.len()).filter_map(|disk| u32::try_from(disk).ok()) {
        let wanted = pages_on(pages, DiskIndex(disk));
        if let Some(index) = search.pair(&wanted) {
            found.pages.extend(search.confirmed(&wanted, index));
        }
    }
    found.pages.sort_unstable_by_key(|(frame, _)| *frame);
    found
}

struct Search<'a> {
    ram: &'a dyn Ram,
    pages: &'a Pages,
    disks: &'a [Option<&'a dyn ReadDisk>],
}

impl Search<'_> {
    /// The disk that most of some pages are on, if any are.
    fn pair(&self, wanted: &[CleanPage]) -> Option<u16> {
        let step = wanted.len().div_ceil(SAMPLES).max(1);
        let sample: Vec<CleanPage> = wanted.iter().step_by(step).copied().collect();
        let hits = |&index: &u16| self.confirmed(&sample, index).len();
        let disks = 0..u16::try_from(self.disks.len()).unwrap_or(u16::MAX);
        let hits = disks.map(|index| (hits(&index), index)).filter(|(hits, _)| *hits > 0);
        hits.max_by_key(|(hits, index)| (*hits, std::cmp::Reverse(*index))).map(|(_, index)| index)
    }

    /// Those of `wanted` that are on a disk, in no order.
    fn confirmed(&self, wanted: &[CleanPage], index: u16) -> Vec<(Frame, Refill)> {
        let Some(Some(disk)) = self.disks.get(usize::from(index)) else { return Vec::new() };
        let claims = claims(self.ram, self.pages, wanted, (*disk, index));
        let hot: HashSet<Frame> =
            claims.iter().filter(|claim| claim.is_hot).map(|claim| claim.frame).collect();
        let wanted = claims.iter().map(|claim| Wanted { frame: claim.frame, pieces: &claim.pieces });
        let confirmed = Mutex::new(Vec::new());
        let Ok(()) = reader::read(self.disks, wanted.collect(), None, |wanted, page| {
            if self.is(wanted.frame, page) {
                let refill = Refill::new(page, wanted.pieces).hot(hot.contains(&wanted.frame));
                confirmed.lock().push((wanted.frame, refill));
            }
            Ok::<(), Infallible>(())
        });
        confirmed.into_inner()
    }

    /// Whether a page is that, and not all zeros.
    fn is(&self, frame: Frame, page: &[u8; PAGE_BYTES]) -> bool {
        let mut buffer = [0; PAGE_BYTES];
        let bytes = frame.start().and_then(|start| self.ram.view(start, &mut buffer).ok());
        bytes.is_some_and(|bytes| bytes == page) && *page != [0; PAGE_BYTES]
    }
}
