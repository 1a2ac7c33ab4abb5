//! Where the bytes of clean pages lie on the guest's disks, so that they need no copy.

use smallvec::SmallVec;

use super::bytes::{Malformed, Put, Take};
use super::object::Hash;
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
}

impl Refill {
    /// For a page with these bytes, which lie in `pieces`; what those leave of it is zeros.
    pub fn new(page: &[u8; PAGE_BYTES], pieces: impl Into<DiskPieces>) -> Self {
        Self { hash: super::object::hash(page), pieces: pieces.into() }
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

/// Writes the table, which is in order of frames.
pub(super) fn encode(table: &[(Frame, Refill)], put: &mut Put) {
    put.varint(table.len() as u64);
    let (mut last, mut end) = (0, 0);
    for (frame, refill) in table {
        put.varint(frame.get() - last);
        last = frame.get();
        put.varint(refill.pieces.len() as u64);
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

/// Reads the table of a snapshot of so many disks.
pub(super) fn decode(take: &mut Take<'_>, disks: usize) -> Result<Vec<(Frame, Refill)>, Malformed> {
    let count = take.varint()?;
    // Each page has a hash at the end.
    if count > (take.0.len() / size_of::<Hash>()) as u64 {
        return Err(Malformed("it ends too early"));
    }
    let mut table = Vec::with_capacity(count as usize);
    let (mut last, mut end) = (0u64, 0);
    for index in 0..count {
        let step = take.varint()?;
        let frame = last.checked_add(step).filter(|frame| *frame < 1 << (64 - PAGE_BITS));
        last = frame.filter(|_| step > 0 || index == 0).ok_or(Malformed("frames are out of order"))?;
        let mut pieces = DiskPieces::new();
        for _ in 0..take.varint()? {
            let piece = decode_piece(take, end)?;
            end = piece.offset.wrapping_add(piece.len.into());
            pieces.push(piece);
        }
        if !fit(&pieces, disks) {
            return Err(Malformed("a page does not fit its pieces on disk"));
        }
        table.push((Frame::new(last), Refill { hash: [0; 16], pieces }));
    }
    for (_, refill) in &mut table {
        refill.hash = take.id()?;
    }
    Ok(table)
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
        ]
        .into_iter()
        .map(|(at, pieces)| (Frame::new(at), Refill::new(&page(at as u8), pieces)))
        .collect();
        let mut put = Put::default();
        encode(&table, &mut put);
        let mut take = Take(&put.0);
        assert_eq!(decode(&mut take, 2).unwrap(), table);
        take.end().unwrap();
        assert!(decode(&mut Take(&put.0), 1).is_err(), "a disk that is not there");
        for len in 0..put.0.len() {
            assert!(decode(&mut Take(&put.0[..len]), 2).is_err(), "{len}");
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
