//! Where the bytes of clean pages lie on the guest's disks, so that they need no copy.

use smallvec::SmallVec;

use super::bytes::{Malformed, Put, Take};
use super::error::Result;
use super::object::Hash;
use super::tables::{PutPiece, piece_of};
use crate::address::{Frame, PAGE_BITS, PAGE_BYTES};

/// A part of a page on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskPiece {
    /// Index of the disk among those of the snapshot.
    pub disk: u16,
    /// Byte of the disk as the guest sees it.
    pub offset: u64,
    /// Bytes.
    pub len: u16,
}

/// The parts of a page; of most pages one, which then needs no memory of its own.
pub type DiskPieces = SmallVec<[DiskPiece; 1]>;

/// How to get a page from the guest's disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refill {
    /// Of the whole page.
    hash: Hash,
    /// From the page's first byte on; what they leave of the page is zeros.
    pub pieces: DiskPieces,
    /// Whether the guest is likely to need the page soon: its kernel kept it longer than others.
    pub is_hot: bool,
}

/// Added to a page's number of pieces, which is always less, if the page is hot.
const HOT: u64 = 1 << 13;

impl Refill {
    /// For a page with these bytes, which lie in `pieces`; what those leave of it is zeros.
    pub fn new(page: &[u8; PAGE_BYTES], pieces: impl Into<DiskPieces>) -> Self {
        Self { hash: super::object::hash(page), pieces: pieces.into(), is_hot: false }
    }

    /// The same, of a page that is hot if `is_hot`.
    #[must_use]
    pub fn hot(self, is_hot: bool) -> Self {
        Self { is_hot, ..self }
    }

    /// Whether `page` is what was there when the snapshot was taken.
    pub fn is(&self, page: &[u8; PAGE_BYTES]) -> bool {
        super::object::hash(page) == self.hash
    }
}

/// Whether pieces fit a page.
pub(super) fn fit(pieces: &[DiskPiece], disks: usize) -> bool {
    let bytes: usize = pieces.iter().map(|piece| usize::from(piece.len)).sum();
    let sound = |piece: &DiskPiece| {
        piece.len > 0
            && usize::from(piece.disk) < disks
            && piece.offset.checked_add(piece.len.into()).is_some_and(|end| end < 1 << 63)
    };
    bytes <= PAGE_BYTES && pieces.iter().all(sound)
}

/// Gives `each` what a table, which is in order of frames, says of [`PIECE_PAGES`](super::tables::PIECE_PAGES) frames after
/// another, where it says anything.
pub(super) fn encode_pieces(table: &[(Frame, Refill)], each: &mut PutPiece<'_>) -> Result<()> {
    table.chunk_by(|(one, _), (next, _)| piece_of(*one) == piece_of(*next)).try_for_each(|piece| {
        let mut put = Put::default();
        encode(piece, &mut put);
        each(&put.0)
    })
}

fn encode(table: &[(Frame, Refill)], put: &mut Put) {
    put.varint(table.len() as u64);
    let (mut last, mut end) = (0, 0);
    for (frame, refill) in table {
        put.varint(frame.get() - last);
        last = frame.get();
        put.varint(refill.pieces.len() as u64 | if refill.is_hot { HOT } else { 0 });
        for piece in &refill.pieces {
            put.varint(piece.disk.into());
            put.delta(end, piece.offset);
            put.varint(piece.len.into());
            end = piece.offset + u64::from(piece.len);
        }
    }
    // Hashes do not shrink, and would hide from the compressor what does.
    table.iter().for_each(|(_, refill)| put.bytes(&refill.hash));
}

/// Adds a piece, behind all others, of the table of a snapshot of so many disks.
pub(super) fn decode_more(
    table: &mut Vec<(Frame, Refill)>,
    take: &mut Take<'_>,
    disks: usize,
) -> Result<(), Malformed> {
    let count = take.varint()?;
    // Each page has a hash at the end.
    if count > (take.0.len() / size_of::<Hash>()) as u64 {
        return Err(Malformed("it ends too early"));
    }
    let first = table.len();
    let (mut last, mut end) = (0u64, 0);
    for _ in 0..count {
        let frame = last.checked_add(take.varint()?).filter(|frame| *frame < 1 << (64 - PAGE_BITS));
        let is_next = |frame: &u64| table.last().is_none_or(|(before, _)| before.get() < *frame);
        last = frame.filter(is_next).ok_or(Malformed("frames are out of order"))?;
        let mut pieces = DiskPieces::new();
        let count = take.varint()?;
        for _ in 0..count & !HOT {
            let piece = decode_piece(take, end)?;
            end = piece.offset.wrapping_add(piece.len.into());
            pieces.push(piece);
        }
        if !fit(&pieces, disks) {
            return Err(Malformed("a page does not fit its pieces on disk"));
        }
        table.push((Frame::new(last), Refill { hash: [0; 16], pieces, is_hot: count & HOT != 0 }));
    }
    for (_, refill) in &mut table[first..] {
        refill.hash = take.id()?;
    }
    Ok(())
}

fn decode_piece(take: &mut Take<'_>, end: u64) -> Result<DiskPiece, Malformed> {
    let (disk, offset, len) = (take.varint()?, take.delta(end)?, take.varint()?);
    let (Ok(disk), Ok(len)) = (disk.try_into(), len.try_into()) else {
        return Err(Malformed("a piece on disk is too long"));
    };
    Ok(DiskPiece { disk, offset, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(disk: u16, offset: u64, len: u16) -> DiskPiece {
        DiskPiece { disk, offset, len }
    }

    #[test]
    fn tables_read_back() {
        let page = |fill: u8| [fill; PAGE_BYTES];
        let table: Vec<_> = [
            (0, vec![piece(0, 1 << 40, 4096)]),
            (1, vec![piece(0, (1 << 40) + 4096, 4096)]),
            (9, vec![piece(1, 1024, 1024), piece(0, 0, 1024), piece(1, 2048, 2048)]),
            (10, vec![]),
            (1024, vec![piece(0, 1 << 40, 4096)]),
        ]
        .into_iter()
        .map(|(at, pieces)| (Frame::new(at), Refill::new(&page(at as u8), pieces).hot(at % 2 == 1)))
        .collect();
        let mut pieces = Vec::new();
        let mut take_piece = |piece: &[u8]| {
            pieces.push(piece.to_vec());
            Ok(())
        };
        encode_pieces(&table, &mut take_piece).unwrap();
        let [first, second] = &pieces[..] else { panic!("two pieces") };
        let decode = |piece: &[u8], disks: usize| {
            let (mut read, mut take) = (Vec::new(), Take(piece));
            decode_more(&mut read, &mut take, disks)?;
            take.end().map(|()| read)
        };
        assert_eq!([decode(first, 2).unwrap(), decode(second, 2).unwrap()].concat(), table);
        let mut twice = table.clone();
        assert!(decode_more(&mut twice, &mut Take(second), 2).is_err(), "frames that are there");
        assert!(decode(first, 1).is_err(), "a disk that is not there");
        for len in 0..first.len() {
            assert!(decode(&first[..len], 2).is_err(), "{len}");
        }
        assert!(table[2].1.is(&page(9)) && !table[2].1.is(&page(8)));
    }

    #[test]
    fn pieces_fit_a_page() {
        assert!(fit(&[piece(0, 0, 4096)], 1) && fit(&[], 0));
        assert!(!fit(&[piece(0, 0, 4096), piece(0, 0, 1)], 1));
        assert!(!fit(&[piece(0, 0, 0)], 1) && !fit(&[piece(1, 0, 1)], 1));
        assert!(!fit(&[piece(0, u64::MAX, 1)], 1));
    }
}
