//! How to tell a guest, before it resumes, that pages of its file cache are gone (PARS §5.4, with what today's kernels need).
//!
//! Clearing the page's up-to-date flag alone corrupts files: every buffer head has a flag of its own, and so has every
//! block in iomap's state. A [`Hide`] lists all of them, as physical addresses and masks, so that restoring a snapshot
//! needs no introspection. They lie in critical pages: apply them once those are in place.

use crate::address::{Frame, Physical};

/// Bits to clear in one little-endian word of eight bytes of guest memory: `word &= !mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clear {
    /// Where the word begins; a multiple of eight, so it lies in one page.
    pub at: Physical,
    /// The bits to clear.
    pub mask: u64,
}

impl Clear {
    /// Bytes of the word.
    pub const BYTES: u8 = 8;
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
    /// All of these must be done.
    pub clears: &'a [Clear],
}

/// The [`Hide`]s of a guest, in order of their frames, none overlapping another.
#[derive(Clone, Debug, Default)]
pub struct Hides {
    folios: Vec<Folio>,
    clears: Vec<Clear>,
}

#[derive(Clone, Copy, Debug)]
struct Folio {
    first: Frame,
    pages: u32,
    /// Index after its last entry of `clears`; the previous folio's is its first.
    clears_end: usize,
}

impl Hides {
    /// Adds what hides the `pages` pages from `first` on.
    ///
    /// # Panics
    /// When the folio does not lie after all others, or there is nothing to clear.
    pub fn push(&mut self, first: Frame, pages: u32, clears: &[Clear]) {
        let after = self.folios.last().map_or(0, |last| last.first.get() + u64::from(last.pages));
        assert!(first.get() >= after && pages > 0, "folios come in order: {first} after {after:#x}");
        assert!(!clears.is_empty(), "a folio without a flag cannot be hidden");
        self.clears.extend_from_slice(clears);
        self.folios.push(Folio { first, pages, clears_end: self.clears.len() });
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
        let folio = self.folios[index];
        (frame.get() - folio.first.get() < u64::from(folio.pages)).then(|| self.at(index))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn clear(at: u64) -> Clear {
        Clear { at: Physical::new(at), mask: 4 }
    }

    #[test]
    fn a_page_is_hidden_with_its_whole_folio() {
        let mut hides = Hides::default();
        hides.push(Frame::new(3), 1, &[clear(0x100), clear(0x200)]);
        hides.push(Frame::new(8), 4, &[clear(0x300)]);
        assert_eq!(hides.of(Frame::new(3)).unwrap().clears, [clear(0x100), clear(0x200)]);
        let large = hides.of(Frame::new(11)).unwrap();
        assert_eq!((large.first, large.pages, large.clears), (Frame::new(8), 4, &[clear(0x300)][..]));
        for none in [0, 2, 4, 7, 12] {
            assert_eq!(hides.of(Frame::new(none)), None, "frame {none}");
        }
        assert_eq!(hides.iter().count(), hides.len());
    }

    #[test]
    #[should_panic(expected = "folios come in order")]
    fn overlapping_folios_are_a_bug() {
        let mut hides = Hides::default();
        hides.push(Frame::new(8), 4, &[clear(0)]);
        hides.push(Frame::new(11), 1, &[clear(0)]);
    }
}
