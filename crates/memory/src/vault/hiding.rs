//! The table of what hides clean pages that are lost.

use super::bytes::{Malformed, Put, Take};
use super::error::Result;
use super::tables::{PutPiece, piece_of};
use crate::address::{Frame, PAGE_BITS, Physical};
use crate::hide::{Clear, Hide, Hiding};

/// Gives `each` what `hiding` says of the folios that begin in [`super::tables::PIECE_PAGES`] frames after another, where it says
/// anything.
pub(super) fn encode_pieces(hiding: &Hiding, each: &mut PutPiece<'_>) -> Result<()> {
    let folios: Vec<Hide<'_>> = hiding.iter().collect();
    folios.chunk_by(|one, next| piece_of(one.first) == piece_of(next.first)).try_for_each(|folios| {
        let mut piece = Put::default();
        encode(folios, &mut piece);
        each(&piece.0)
    })
}

/// Addresses as steps from those of the folio before: struct pages lie side by side, so steps repeat.
fn encode(folios: &[Hide<'_>], put: &mut Put) {
    put.varint(folios.len() as u64);
    let (mut last, mut before): (u64, &[Clear]) = (0, &[]);
    for hide in folios {
        put.varint(hide.first.get() - last);
        last = hide.first.get();
        put.varint(hide.pages.into());
        put.varint(hide.clears.len() as u64);
        for (index, clear) in hide.clears.iter().enumerate() {
            put.delta(before.get(index).map_or(0, |before| before.at.get()), clear.at.get());
            put.varint(clear.mask);
        }
        before = hide.clears;
    }
}

/// Adds what a piece says to `hiding`, behind all others.
pub(super) fn decode_more(hiding: &mut Hiding, take: &mut Take<'_>) -> Result<(), Malformed> {
    let (mut last, mut before) = (0u64, Vec::new());
    for _ in 0..take.varint()? {
        let first = last.checked_add(take.varint()?).filter(|frame| *frame < 1 << (64 - PAGE_BITS));
        last = first.ok_or(Malformed("a frame is out of bounds"))?;
        let pages = u32::try_from(take.varint()?).map_err(|_| Malformed("a folio is too long"))?;
        let mut clears = Vec::new();
        for index in 0..take.varint()? {
            let base = usize::try_from(index).ok().and_then(|index| before.get(index));
            let at = take.delta(base.map_or(0, |clear: &Clear| clear.at.get()))?;
            clears.push(Clear { at: Physical::new(at), mask: take.varint()? });
        }
        let added = hiding.push(Frame::new(last), pages, &clears);
        added.ok_or(Malformed("folios are out of order, or nothing hides one"))?;
        before = clears;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_clear() -> impl Strategy<Value = Clear> {
        (any::<u64>(), any::<u64>()).prop_map(|(at, mask)| Clear { at: Physical::new(at), mask })
    }

    fn pieces(hiding: &Hiding) -> Vec<Vec<u8>> {
        let mut pieces = Vec::new();
        let mut take = |piece: &[u8]| {
            pieces.push(piece.to_vec());
            Ok(())
        };
        encode_pieces(hiding, &mut take).unwrap();
        pieces
    }

    proptest! {
        #[test]
        fn clears_read_back(
            folios in prop::collection::btree_map(
                0u64..1 << 45, (1u32..64, prop::collection::vec(any_clear(), 1..4)), 0..20,
            ),
        ) {
            let mut hiding = Hiding::default();
            for (at, (pages, clears)) in &folios {
                hiding.push(Frame::new(at * 64), *pages, clears).unwrap();
            }
            let mut read = Hiding::default();
            let pieces = pieces(&hiding);
            for piece in &pieces {
                let mut take = Take(piece);
                decode_more(&mut read, &mut take).unwrap();
                take.end().unwrap();
            }
            prop_assert_eq!(&read, &hiding);
            if let Some(piece) = pieces.last() {
                prop_assert!(decode_more(&mut read, &mut Take(piece)).is_err(), "out of order");
            }
            for (at, (pages, clears)) in &folios {
                for (frame, is_in) in [(at * 64, true), (at * 64 + u64::from(*pages) - 1, true), (at * 64 + 64, false)] {
                    let found = hiding.of(Frame::new(frame)).filter(|hide| hide.first.get() == at * 64);
                    prop_assert_eq!(found.map(|hide| hide.clears), is_in.then_some(clears.as_slice()));
                }
            }
        }
    }

    #[test]
    fn a_folio_that_nothing_hides_is_malformed() {
        let piece = |pages: u64, clears: u64| {
            let mut put = Put::default();
            [1, 5, pages, clears].into_iter().for_each(|value| put.varint(value));
            (0..clears).for_each(|_| put.bytes(&[2, 8]));
            decode_more(&mut Hiding::default(), &mut Take(&put.0))
        };
        assert_eq!(piece(1, 1), Ok(()));
        assert!(piece(1, 0).is_err() && piece(0, 1).is_err() && piece(1 << 32, 1).is_err());
    }

    /// 131,072 clean pages of a gibibyte must not cost megabytes.
    #[test]
    fn clears_of_neighbouring_pages_are_short() {
        let clear = |at: u64| Clear { at: Physical::new(at), mask: 8 };
        let page = |at: u64| (Frame::new(at), [clear(0x1000_0000 + at * 64), clear(0x2000_0000 + at * 104)]);
        let hiding: Hiding = (0..1000).map(page).collect();
        let [piece] = &pieces(&hiding)[..] else { panic!("one piece") };
        assert!(piece.len() < 11 * 1000, "{}", piece.len());
        assert!(zstd::bulk::compress(piece, 1).unwrap().len() < 200);
    }
}
