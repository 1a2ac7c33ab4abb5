//! Struct pages that were read in one piece, and their members.

use crate::address::{Frame, Virtual};

/// Struct pages that were read in one piece.
pub(super) struct Chunk<'b> {
    /// The frame of the first of them.
    pub first: Frame,
    /// Where the first of them lies.
    pub at: Virtual,
    /// `[struct page][byte]`.
    pub bytes: &'b [u8],
    /// Bytes of each.
    pub stride: usize,
}

impl Chunk<'_> {
    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() / self.stride
    }

    /// Bytes of a struct page; all ones where there are none.
    fn array<const N: usize>(&self, index: usize, offset: usize) -> [u8; N] {
        let rest = self.bytes.get(index * self.stride + offset..);
        rest.and_then(|rest| rest.first_chunk()).copied().unwrap_or([u8::MAX; N])
    }

    /// Eight bytes as a number.
    pub(super) fn u64(&self, index: usize, offset: usize) -> u64 {
        u64::from_le_bytes(self.array(index, offset))
    }

    /// Four bytes.
    pub(super) fn u32(&self, index: usize, offset: usize) -> u32 {
        u32::from_le_bytes(self.array(index, offset))
    }

    /// One byte.
    pub(super) fn u8(&self, index: usize, offset: usize) -> u8 {
        let [byte] = self.array(index, offset);
        byte
    }
}
