//! How to hide a lost page of clean cache from its guest: the bits to clear, recorded when the snapshot was taken.

use std::ops::Range;

use super::bytes::{Malformed, Put, Take};
use super::error::Result;
use super::tables::{PutPiece, piece_of};
use crate::address::{Frame, PAGE_BITS, Physical};

/// Bits to clear in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Where.
    pub at: Physical,
    /// Bytes there, little-endian: 1, 2, 4 or 8.
    pub width: u8,
    /// The bits that are to become 0.
    pub clear: u64,
}

/// What hides each page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hiding {
    /// In order of frames, with where their masks end.
    frames: Vec<(Frame, usize)>,
    masks: Vec<Mask>,
}

impl Hiding {
    /// From frames, each once, with their masks.
    pub fn new(mut pages: Vec<(Frame, Vec<Mask>)>) -> Self {
        pages.sort_unstable_by_key(|(frame, _)| *frame);
        let mut hiding = Self::default();
        pages.into_iter().for_each(|(frame, masks)| hiding.push(frame, masks));
        hiding
    }

    /// Adds a frame behind all others.
    ///
    /// # Panics
    /// When it does not come behind them.
    pub fn push(&mut self, frame: Frame, masks: impl IntoIterator<Item = Mask>) {
        let is_next = self.frames.last().is_none_or(|(last, _)| *last < frame);
        assert!(is_next, "frames come in order: {frame} does not");
        self.masks.extend(masks);
        self.frames.push((frame, self.masks.len()));
    }

    /// What hides `frame`; `None` where nothing is known to.
    pub fn get(&self, frame: Frame) -> Option<&[Mask]> {
        let index = self.frames.binary_search_by_key(&frame, |(frame, _)| *frame).ok()?;
        Some(self.masks_of(index))
    }

    /// What [`Hiding::get`] says, for one page after another: found at once where they come in order.
    pub fn finder<'a>(&'a self) -> impl FnMut(Frame) -> Option<&'a [Mask]> {
        let mut next = 0;
        move |frame| {
            let is_next = self.frames.get(next).is_some_and(|(known, _)| *known == frame);
            let found = if is_next {
                Ok(next)
            } else {
                self.frames.binary_search_by_key(&frame, |(frame, _)| *frame)
            };
            let index = found.ok()?;
            next = index + 1;
            Some(self.masks_of(index))
        }
    }

    /// The number of pages that can be hidden.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether none can.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// All of them, in order of frames.
    pub fn iter(&self) -> impl Iterator<Item = (Frame, &[Mask])> + '_ {
        self.frames.iter().enumerate().map(|(index, (frame, _))| (*frame, self.masks_of(index)))
    }

    fn masks_of(&self, index: usize) -> &[Mask] {
        let from = index.checked_sub(1).map_or(0, |before| self.frames[before].1);
        &self.masks[from..self.frames[index].1]
    }

    /// Gives `each` what it says of [`super::tables::PIECE_PAGES`] frames after another, where it says anything.
    pub(super) fn encode_pieces(&self, each: &mut PutPiece<'_>) -> Result<()> {
        let mut from = 0;
        for frames in self.frames.chunk_by(|(one, _), (next, _)| piece_of(*one) == piece_of(*next)) {
            let mut piece = Put::default();
            self.encode(from..from + frames.len(), &mut piece);
            each(&piece.0)?;
            from += frames.len();
        }
        Ok(())
    }

    /// Addresses as steps from those of the page before: struct pages lie side by side, so steps repeat.
    fn encode(&self, indices: Range<usize>, put: &mut Put) {
        put.varint(indices.len() as u64);
        let (mut last, mut before) = (0, Vec::new());
        for index in indices {
            let (frame, masks) = (self.frames[index].0, self.masks_of(index));
            put.varint(frame.get() - last);
            last = frame.get();
            put.varint(masks.len() as u64);
            for (index, mask) in masks.iter().enumerate() {
                put.delta(before.get(index).copied().unwrap_or(0), mask.at.get());
                put.u8(mask.width);
                put.varint(mask.clear);
            }
            before = masks.iter().map(|mask| mask.at.get()).collect();
        }
    }

    /// Adds what a piece says, behind all others.
    pub(super) fn decode_more(&mut self, take: &mut Take<'_>) -> Result<(), Malformed> {
        let count = take.varint()?;
        // The masks of the page before lie in front of those of the page.
        let (mut last, mut before) = (0u64, self.masks.len());
        for _ in 0..count {
            let frame = last.checked_add(take.varint()?).filter(|frame| *frame < 1 << (64 - PAGE_BITS));
            let is_next = |frame: &u64| self.frames.last().is_none_or(|(before, _)| before.get() < *frame);
            last = frame.filter(is_next).ok_or(Malformed("frames are out of order"))?;
            let masks = take.varint()?;
            let from = self.masks.len();
            for index in 0..masks {
                let place = usize::try_from(index).ok().and_then(|index| before.checked_add(index));
                let base = place.filter(|place| *place < from).map_or(0, |place| self.masks[place].at.get());
                self.masks.push(decode_mask(take, base)?);
            }
            before = from;
            self.frames.push((Frame::new(last), self.masks.len()));
        }
        Ok(())
    }
}

fn decode_mask(take: &mut Take<'_>, base: u64) -> Result<Mask, Malformed> {
    let (at, width, clear) = (take.delta(base)?, take.u8()?, take.varint()?);
    let fits = match width {
        1 | 2 | 4 => clear >> (8 * u32::from(width)) == 0,
        8 => true,
        _ => false,
    };
    if fits {
        Ok(Mask { at: Physical::new(at), width, clear })
    } else {
        Err(Malformed("a mask is wider than it says"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_mask() -> impl Strategy<Value = Mask> {
        (any::<u64>(), prop::sample::select(vec![1u8, 2, 4, 8]), any::<u64>()).prop_map(
            |(at, width, clear)| Mask {
                at: Physical::new(at),
                width,
                clear: clear >> (64 - 8 * u32::from(width)),
            },
        )
    }

    fn pieces(hiding: &Hiding) -> Vec<Vec<u8>> {
        let mut pieces = Vec::new();
        let mut take = |piece: &[u8]| {
            pieces.push(piece.to_vec());
            Ok(())
        };
        hiding.encode_pieces(&mut take).unwrap();
        pieces
    }

    proptest! {
        #[test]
        fn masks_read_back(
            pages in prop::collection::btree_map(0u64..1 << 52, prop::collection::vec(any_mask(), 0..4), 0..20),
        ) {
            let pages: Vec<_> = pages.into_iter().map(|(at, masks)| (Frame::new(at), masks)).collect();
            let hiding = Hiding::new(pages.iter().rev().cloned().collect());
            let mut read = Hiding::default();
            let pieces = pieces(&hiding);
            for piece in &pieces {
                let mut take = Take(piece);
                read.decode_more(&mut take).unwrap();
                take.end().unwrap();
            }
            prop_assert_eq!(&read, &hiding);
            if let Some(piece) = pieces.last() {
                prop_assert!(read.decode_more(&mut Take(piece)).is_err());
            }
            let mut find = hiding.finder();
            for (frame, masks) in pages.iter().chain(pages.iter().rev()) {
                prop_assert_eq!(hiding.get(*frame), Some(masks.as_slice()));
                prop_assert_eq!(find(*frame), Some(masks.as_slice()));
                prop_assert_eq!(find(Frame::new(1 << 52)), None);
            }
            prop_assert_eq!(hiding.get(Frame::new(1 << 52)), None);
        }
    }

    /// 131,072 clean pages of a gibibyte must not cost megabytes.
    #[test]
    fn masks_of_neighbouring_pages_are_short() {
        let mask = |at: u64| Mask { at: Physical::new(at), width: 8, clear: 8 };
        let page =
            |at: u64| (Frame::new(at), vec![mask(0x1000_0000 + at * 64), mask(0x2000_0000 + at * 104)]);
        let hiding = Hiding::new((0..1000).map(page).collect());
        let [piece] = &pieces(&hiding)[..] else { panic!("one piece") };
        assert!(piece.len() < 11 * 1000, "{}", piece.len());
        assert!(zstd::bulk::compress(piece, 1).unwrap().len() < 200);
    }
}
