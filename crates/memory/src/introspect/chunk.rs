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

    /// Eight bytes of a struct page as a number; all ones where there are none.
    pub(super) fn u64(&self, index: usize, offset: usize) -> u64 {
        let at = index * self.stride + offset;
        self.bytes
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .map_or(u64::MAX, |word| u64::from_le_bytes(*word))
    }

    /// Four bytes.
    pub(super) fn u32(&self, index: usize, offset: usize) -> u32 {
        let at = index * self.stride + offset;
        self.bytes
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .map_or(u32::MAX, |word| u32::from_le_bytes(*word))
    }

    /// One byte.
    pub(super) fn u8(&self, index: usize, offset: usize) -> u8 {
        self.bytes.get(index * self.stride + offset).copied().unwrap_or(u8::MAX)
    }
}
