//! How to tell a guest, before it resumes, that pages of its file cache are gone (PARS §5.4, with what today's kernels need).
//!
//! Clearing the page's up-to-date flag alone corrupts files: every buffer head has a flag of its own, and so has every
//! block in iomap's state. A [`Hide`] lists all of them, as physical addresses and masks, so that restoring a snapshot
//! needs no introspection. They lie in critical pages: apply them once those are in place.

use crate::address::{Frame, Physical};

/// Bits to clear in one little-endian word of eight bytes of guest memory: `word &= !mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clear {
    /// Where the word begins.
    pub at: Physical,
    /// The bits to clear.
    pub mask: u64,
}

impl Clear {
    /// Bytes of the word.
    pub const BYTES: u64 = 8;
}

/// What hides one folio (one page, or several that the guest manages as one) from the guest.
///
/// A folio is hidden as a whole: when one of its pages is lost, all are gone for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hide<'a> {
    /// Its first page.
    pub first: Frame,
    /// Number of its pages, at least 1.
    pub pages: u32,
    /// All of these must be done; at least one.
    pub clears: &'a [Clear],
}

impl Hide<'_> {
    /// The frame after its last page.
    pub fn end(&self) -> u64 {
        self.first.get() + u64::from(self.pages)
    }
}

/// What hides the clean pages of a guest: folios in order of their frames, none overlapping another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hiding {
    folios: Vec<Folio>,
    clears: Vec<Clear>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Folio {
    first: Frame,
    pages: u32,
    /// Index after its last entry of `clears`; the previous folio's is its first.
    clears_end: usize,
}

impl Hiding {
    /// Adds what hides the `pages` pages from `first` on; `None` when the folio does not lie after all others, or there is
    /// nothing to clear.
    #[must_use]
    pub fn push(&mut self, first: Frame, pages: u32, clears: &[Clear]) -> Option<()> {
        let after = self.folios.last().map_or(0, |last| last.first.get() + u64::from(last.pages));
        first.get().checked_add(pages.into())?;
        (first.get() >= after && pages > 0 && !clears.is_empty()).then_some(())?;
        self.clears.extend_from_slice(clears);
        self.folios.push(Folio { first, pages, clears_end: self.clears.len() });
        Some(())
    }

    /// Number of folios.
    pub fn len(&self) -> usize {
        self.folios.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }

    /// What hides the folio that `frame` belongs to.
    pub fn of(&self, frame: Frame) -> Option<Hide<'_>> {
        let index = self.folios.partition_point(|folio| folio.first <= frame).checked_sub(1)?;
        Some(self.at(index)).filter(|hide| frame.get() < hide.end())
    }

    /// All of them, in order of their frames.
    pub fn iter(&self) -> impl Iterator<Item = Hide<'_>> + '_ {
        (0..self.folios.len()).map(|index| self.at(index))
    }

    fn at(&self, index: usize) -> Hide<'_> {
        let Folio { first, pages, clears_end } = self.folios[index];
        let start = index.checked_sub(1).map_or(0, |previous| self.folios[previous].clears_end);
        Hide { first, pages, clears: &self.clears[start..clears_end] }
    }
}

/// Single pages in order, each with what hides it.
impl<C: AsRef<[Clear]>> FromIterator<(Frame, C)> for Hiding {
    fn from_iter<I: IntoIterator<Item = (Frame, C)>>(pages: I) -> Self {
        let mut hiding = Self::default();
        for (frame, clears) in pages {
            hiding
                .push(frame, 1, clears.as_ref())
                .expect("pages come in order, each with something to clear");
        }
        hiding
    }
}
