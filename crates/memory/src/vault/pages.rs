//! Where each page of a machine is: runs of pages that follow each other in the machine and in an extent.
//!
//! Pages are counted in the order of the layout's blocks, holes left out.

use super::bytes::{Malformed, Put, Take};
use super::error::Result;
use super::extent::MAX_PAGES;
use super::tables::{PIECE_PAGES, PutPiece};
use crate::address::{Frame, PAGE_BYTES};
use crate::class::{ClassMap, PageClass};
use crate::ram::Layout;

/// The index of a page among those that a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PageNumber(pub(super) u64);

/// Where a page's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// The number of the object in the snapshot.
    pub(super) object: u16,
    pub(super) extent: u32,
    /// Index of the page in its extent.
    pub(super) slot: u8,
}

/// What is stored of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// Nothing.
    Absent,
    Zero,
    At(Place),
}

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) class: PageClass,
    pub(super) content: Content,
}

const GIVEN: u64 = 1 << 63;

impl Entry {
    /// In one word that is not 0.
    pub(super) fn to_word(self) -> u64 {
        let (kind, place) = match self.content {
            Content::Absent => (0, Place { object: 0, extent: 0, slot: 0 }),
            Content::Zero => (1, Place { object: 0, extent: 0, slot: 0 }),
            Content::At(place) => (2, place),
        };
        GIVEN
            | kind << 60
            | (self.class as u64) << 56
            | u64::from(place.slot) << 48
            | u64::from(place.object) << 32
            | u64::from(place.extent)
    }

    /// From such a word; `None` for 0 and whatever else is no entry.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let place = Place { object: (word >> 32) as u16, extent: word as u32, slot: (word >> 48) as u8 };
        let class = match word >> 56 & 0xf {
            0 => PageClass::Critical,
            1 => PageClass::Clean,
            2 => PageClass::Free,
            _ => return None,
        };
        let content = match (word >> 60, class) {
            (0b1000, PageClass::Clean | PageClass::Free) => Content::Absent,
            (0b1001, PageClass::Clean | PageClass::Critical) => Content::Zero,
            (0b1010, PageClass::Clean | PageClass::Critical) => Content::At(place),
            _ => return None,
        };
        Some(Self { class, content })
    }

    /// What this entry is `by` pages further on in its run.
    fn after(mut self, by: u64) -> Self {
        if let Content::At(place) = &mut self.content {
            place.slot += by as u8;
        }
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u64,
    entry: Entry,
}

/// Where all pages of a machine are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pages {
    /// In order of `first`, which is 0 for the first.
    runs: Vec<Run>,
    count: u64,
}

impl Pages {
    /// From the words of all pages; the second value is the first page whose word is none.
    pub(super) fn new(words: impl Iterator<Item = u64>) -> Result<Self, PageNumber> {
        let mut pages = Self::default();
        for word in words {
            let entry = Entry::from_word(word).ok_or(PageNumber(pages.count))?;
            pages.push(entry, 1);
        }
        Ok(pages)
    }

    /// Adds a run of pages at the end.
    pub(super) fn push(&mut self, entry: Entry, len: u64) {
        let goes_on = self.runs.last().is_some_and(|run| run.entry.after(self.count - run.first) == entry);
        if !goes_on {
            self.runs.push(Run { first: self.count, entry });
        }
        self.count += len;
    }

    /// The number of pages.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// What is known of a page of the machine.
    pub(super) fn get(&self, page: PageNumber) -> Entry {
        debug_assert!(page.0 < self.count);
        let run = self.runs[self.runs.partition_point(|run| run.first <= page.0) - 1];
        run.entry.after(page.0 - run.first)
    }

    /// Pages of one kind that follow each other, with how many, in order. What is said of the first holds for the others,
    /// each one place further.
    pub(super) fn runs(&self) -> impl Iterator<Item = (PageNumber, u64, Entry)> + '_ {
        let ends = self.runs.iter().skip(1).map(|run| run.first).chain([self.count]);
        self.runs.iter().zip(ends).map(|(run, end)| (PageNumber(run.first), end - run.first, run.entry))
    }

    /// Where pages are stored, each with how many that follow one another.
    pub(super) fn places(&self) -> impl Iterator<Item = (Place, u64)> + '_ {
        self.runs().filter_map(|(_, len, entry)| match entry.content {
            Content::At(place) => Some((place, len)),
            Content::Absent | Content::Zero => None,
        })
    }

    /// The objects that pages lie in, with the classes of those pages; many times each.
    pub(super) fn objects(&self) -> impl Iterator<Item = (u16, PageClass)> + '_ {
        self.runs.iter().filter_map(|run| match run.entry.content {
            Content::At(place) => Some((place.object, run.entry.class)),
            Content::Absent | Content::Zero => None,
        })
    }

    pub(super) fn encode(&self, put: &mut Put) {
        self.runs().for_each(|(_, len, entry)| put_run(put, entry, len));
    }

    /// Gives `each` what it says of [`PIECE_PAGES`] pages after another.
    pub(super) fn encode_pieces(&self, each: &mut PutPiece<'_>) -> Result<()> {
        let mut piece = Put::default();
        for (PageNumber(first), len, entry) in self.runs() {
            let (mut at, end) = (first, first + len);
            while at < end {
                let border = (at / PIECE_PAGES + 1) * PIECE_PAGES;
                let to = end.min(border);
                put_run(&mut piece, entry.after(at - first), to - at);
                at = to;
                if at == border {
                    each(&piece.0)?;
                    piece.0.clear();
                }
            }
        }
        if piece.0.is_empty() { Ok(()) } else { each(&piece.0) }
    }

    /// Reads all that is left, which are `count` pages.
    pub(super) fn decode(take: &mut Take<'_>, count: u64) -> Result<Self, Malformed> {
        let mut pages = Self::default();
        pages.decode_more(take, count)?;
        Ok(pages)
    }

    /// Adds all that is left, which are `count` pages.
    pub(super) fn decode_more(&mut self, take: &mut Take<'_>, count: u64) -> Result<(), Malformed> {
        let end = self.count + count;
        while !take.0.is_empty() {
            let entry = Entry::from_word(take.u64()?).ok_or(Malformed("a page is of no known kind"))?;
            let len = take.varint()?;
            let fits = match entry.content {
                Content::At(place) => len <= (MAX_PAGES as u64).saturating_sub(place.slot.into()),
                _ => true,
            };
            if len == 0 || !fits || len > end - self.count {
                return Err(Malformed("a run of pages is too long"));
            }
            self.push(entry, len);
        }
        if self.count == end { Ok(()) } else { Err(Malformed("it does not have all pages")) }
    }
}

fn put_run(put: &mut Put, entry: Entry, len: u64) {
    put.u64(entry.to_word());
    put.varint(len);
}

/// The page at `frame`, if the machine has it.
pub(super) fn number(layout: &Layout, frame: Frame) -> Option<PageNumber> {
    let start = frame.start()?;
    let mut before = 0;
    for block in layout.blocks() {
        if start < block.start {
            return None;
        }
        if start.get() < block.end() {
            return Some(PageNumber(before + (start.get() - block.start.get()) / PAGE_BYTES as u64));
        }
        before += block.len / PAGE_BYTES as u64;
    }
    None
}

/// The frame of a page that the machine has.
pub(super) fn frame(layout: &Layout, page: PageNumber) -> Frame {
    run(layout, page).0
}

/// The frame of a page that the machine has, and the number of pages from there on to the end of its block.
pub(super) fn run(layout: &Layout, page: PageNumber) -> (Frame, u64) {
    let mut left = page.0;
    for block in layout.blocks() {
        let pages = block.len / PAGE_BYTES as u64;
        if left < pages {
            return (Frame::new(Frame::of(block.start).get() + left), pages - left);
        }
        left -= pages;
    }
    unreachable!("page {} of a machine with fewer", page.0)
}

/// The classes of all pages.
pub(super) fn classes(layout: &Layout, pages: &Pages) -> ClassMap {
    let mut map = ClassMap::new(usize::try_from(layout.frames()).unwrap_or(usize::MAX));
    for (first, len, entry) in pages.runs() {
        // A run may go on above a hole.
        for page in first.0..first.0 + len {
            map.set(frame(layout, PageNumber(page)), 1, entry.class);
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_entry() -> impl Strategy<Value = Entry> {
        let place = (0u16..3, 0u32..2, 0u8..4);
        prop_oneof![
            Just((PageClass::Free, Content::Absent)),
            Just((PageClass::Clean, Content::Absent)),
            Just((PageClass::Clean, Content::Zero)),
            Just((PageClass::Critical, Content::Zero)),
            (prop_oneof![Just(PageClass::Critical), Just(PageClass::Clean)], place).prop_map(
                |(class, (object, extent, slot))| (class, Content::At(Place { object, extent, slot }))
            ),
        ]
        .prop_map(|(class, content)| Entry { class, content })
    }

    proptest! {
        #[test]
        fn pages_read_back(entries in prop::collection::vec(any_entry(), 1..60)) {
            let pages = Pages::new(entries.iter().map(|entry| entry.to_word())).unwrap();
            let mut put = Put::default();
            pages.encode(&mut put);
            let mut take = Take(&put.0);
            let read = Pages::decode(&mut take, entries.len() as u64).unwrap();
            take.end().unwrap();
            prop_assert_eq!(&read, &pages);
            let runs: u64 = read.runs().map(|(_, len, _)| len).sum();
            prop_assert_eq!(runs, entries.len() as u64);
            for (page, entry) in (0..).zip(&entries) {
                prop_assert_eq!(read.get(PageNumber(page)), *entry);
            }
            prop_assert!(Pages::decode(&mut Take(&put.0), entries.len() as u64 + 1).is_err());
            prop_assert!(Pages::decode(&mut Take(&put.0), entries.len() as u64 - 1).is_err());
        }
    }

    #[test]
    fn a_page_that_was_not_given_is_named() {
        let free = Entry { class: PageClass::Free, content: Content::Absent }.to_word();
        assert_eq!(Pages::new([free, 0, free].into_iter()), Err(PageNumber(1)));
    }

    #[test]
    fn critical_pages_are_never_absent_and_free_ones_never_stored() {
        let word = |kind: u64, class: u64| GIVEN | kind << 60 | class << 56;
        assert_eq!(Entry::from_word(word(0, 0)), None);
        assert_eq!(Entry::from_word(word(2, 2)), None);
        assert_eq!(Entry::from_word(word(2, 3)), None);
        assert_eq!(Entry::from_word(word(3, 1)), None);
    }

    #[test]
    fn pages_are_counted_without_the_hole() {
        let layout = Layout::split_at_4g(3 * PAGE_BYTES as u64, 2 * PAGE_BYTES as u64).unwrap();
        for (page, at) in [(0, 0), (1, 1), (2, 1 << 20)] {
            assert_eq!(number(&layout, Frame::new(at)), Some(PageNumber(page)));
            assert_eq!(frame(&layout, PageNumber(page)), Frame::new(at));
        }
        for hole in [2, (1 << 20) - 1, (1 << 20) + 1, u64::MAX] {
            assert_eq!(number(&layout, Frame::new(hole)), None);
        }
    }
}
