//! A guest's memory, read where its hypervisor keeps it.
//!
//! A machine's memory is a few blocks of guest-physical addresses; each lies at some offset of a file (a memory backend
//! of QEMU, a file of a snapshot). [`Layout`] knows the blocks, [`Ram`] reads bytes of them.

use std::io;

use serde::{Deserialize, Serialize};

use crate::address::{Frame, PAGE_BYTES, Physical};

/// Guest-physical memory that lies in one piece, in the guest and in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Where it begins in the guest; a page boundary.
    pub start: Physical,
    /// Bytes; whole pages, at least one.
    pub len: u64,
    /// Where it begins in the file; a page boundary.
    pub file_offset: u64,
}

impl Block {
    /// The first address after it. Valid for blocks of a [`Layout`], which do not reach 2^64.
    pub const fn end(&self) -> u64 {
        self.start.get() + self.len
    }
}

/// The blocks of a machine's memory, in order of their addresses, none overlapping another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Block>", into = "Vec<Block>")]
pub struct Layout {
    blocks: Vec<Block>,
}

/// Why blocks are no layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// There is no memory in it.
    #[error("no memory block")]
    Empty,
    /// A block that is not made of whole pages, or that ends past 2^63.
    #[error("memory block at {0} is not made of whole pages below 2^63")]
    Shape(Physical),
    /// Two blocks hold the same address.
    #[error("two memory blocks hold {0}")]
    Overlap(Physical),
}

impl TryFrom<Vec<Block>> for Layout {
    type Error = LayoutError;

    fn try_from(blocks: Vec<Block>) -> Result<Self, LayoutError> {
        Self::new(blocks)
    }
}

impl From<Layout> for Vec<Block> {
    fn from(layout: Layout) -> Self {
        layout.blocks
    }
}

impl Layout {
    /// Blocks in any order.
    ///
    /// # Errors
    /// [`LayoutError`] names the block that is wrong.
    pub fn new(mut blocks: Vec<Block>) -> Result<Self, LayoutError> {
        let whole = |bytes: u64| bytes.is_multiple_of(PAGE_BYTES as u64);
        let below = |start: u64, len: u64| start.checked_add(len).is_some_and(|end| end <= 1 << 63);
        for block in &blocks {
            let sound = block.len > 0
                && [block.start.get(), block.len, block.file_offset].into_iter().all(whole)
                && below(block.start.get(), block.len)
                && below(block.file_offset, block.len);
            if !sound {
                return Err(LayoutError::Shape(block.start));
            }
        }
        blocks.sort_by_key(|block| block.start);
        if let Some(pair) = blocks.windows(2).find(|pair| pair[0].end() > pair[1].start.get()) {
            return Err(LayoutError::Overlap(pair[1].start));
        }
        if blocks.is_empty() { Err(LayoutError::Empty) } else { Ok(Self { blocks }) }
    }

    /// QEMU's q35 or pc machine with `bytes` of memory in one file: what does not fit below `below_4g` lies above 4 GiB.
    ///
    /// # Errors
    /// As [`Layout::new`], for sizes that are not made of whole pages.
    pub fn split_at_4g(bytes: u64, below_4g: u64) -> Result<Self, LayoutError> {
        let low = bytes.min(below_4g);
        let mut blocks = vec![Block { start: Physical::new(0), len: low, file_offset: 0 }];
        if bytes > low {
            blocks.push(Block { start: Physical::new(1 << 32), len: bytes - low, file_offset: low });
        }
        Self::new(blocks)
    }

    /// What QEMU's `q35` does with `bytes` of memory in one file, unless told otherwise.
    ///
    /// # Errors
    /// As [`Layout::split_at_4g`].
    pub fn q35(bytes: u64) -> Result<Self, LayoutError> {
        Self::split_at_4g(bytes, if bytes >= 0xb000_0000 { 0x8000_0000 } else { 0xb000_0000 })
    }

    /// What QEMU's `pc` does with `bytes` of memory in one file, unless told otherwise.
    ///
    /// # Errors
    /// As [`Layout::split_at_4g`].
    pub fn pc(bytes: u64) -> Result<Self, LayoutError> {
        Self::split_at_4g(bytes, if bytes >= 0xe000_0000 { 0xc000_0000 } else { 0xe000_0000 })
    }

    /// The blocks, in order of their addresses.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Where `at` lies in the file, and how many bytes of its block follow; `None` where there is no memory.
    pub fn find(&self, at: Physical) -> Option<(u64, u64)> {
        let after = self.blocks.partition_point(|block| block.start <= at);
        let block = self.blocks.get(after.checked_sub(1)?)?;
        let within = at.get() - block.start.get();
        (within < block.len).then(|| (block.file_offset + within, block.len - within))
    }

    /// The number of frames up to the end of the highest block, holes included.
    pub fn frames(&self) -> u64 {
        self.blocks.last().map_or(0, |block| block.end() / PAGE_BYTES as u64)
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.len).sum()
    }

    /// Whether there is memory at `frame`.
    pub fn holds(&self, frame: Frame) -> bool {
        frame.start().is_some_and(|start| self.find(start).is_some())
    }
}

/// Why memory was not read.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The guest has no memory there: what led to the address is wrong.
    #[error("the guest has no memory at {at} ({len} bytes)")]
    Hole {
        /// The first byte wanted.
        at: Physical,
        /// The number of bytes wanted.
        len: usize,
    },
    /// The file did not give it.
    #[error("reading the guest's memory at {at}")]
    Io {
        /// The first byte wanted.
        at: Physical,
        /// The cause.
        source: io::Error,
    },
}

/// A guest's memory, as bytes that may change between any two reads.
pub trait Ram: Send + Sync {
    /// The blocks there are.
    fn layout(&self) -> &Layout;

    /// Fills `into` from `at` on; the range may cross blocks that touch.
    ///
    /// # Errors
    /// [`RamError::Hole`] when a part of the range is no memory; [`RamError::Io`] when it cannot be read.
    fn read(&self, at: Physical, into: &mut [u8]) -> Result<(), RamError>;

    /// `len` bytes from `at` on, where they need not be copied to be read; `None` says nothing.
    fn bytes(&self, _at: Physical, _len: usize) -> Option<&[u8]> {
        None
    }

    /// Whether `len` bytes from `at` on are surely zeros, because nobody ever wrote them; `false` says nothing.
    fn is_untouched(&self, _at: Physical, _len: u64) -> bool {
        false
    }

    /// As many bytes as `buffer` has from `at` on, copied there only where they must be.
    ///
    /// # Errors
    /// As [`Ram::read`].
    fn view<'a>(&'a self, at: Physical, buffer: &'a mut [u8]) -> Result<&'a [u8], RamError> {
        match self.bytes(at, buffer.len()) {
            Some(bytes) => Ok(bytes),
            None => {
                self.read(at, buffer)?;
                Ok(buffer)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(start: u64, len: u64, file_offset: u64) -> Block {
        Block { start: Physical::new(start), len, file_offset }
    }

    #[test]
    fn blocks_are_sorted_and_must_not_overlap() {
        let layout = Layout::new(vec![block(0x8000, 0x1000, 0x2000), block(0, 0x2000, 0)]).unwrap();
        assert_eq!(layout.blocks()[0].start, Physical::new(0));
        assert_eq!((layout.frames(), layout.bytes()), (9, 0x3000));
        assert!(layout.holds(Frame::new(8)) && !layout.holds(Frame::new(2)));
        let overlap = Layout::new(vec![block(0, 0x2000, 0), block(0x1000, 0x1000, 0)]);
        assert_eq!(overlap, Err(LayoutError::Overlap(Physical::new(0x1000))));
        assert_eq!(Layout::new(vec![]), Err(LayoutError::Empty));
        for wrong in
            [block(0, 0, 0), block(1, 0x1000, 0), block(!0xfff, 0x1000, 0), block(0, 1 << 63, 0x1000)]
        {
            assert_eq!(Layout::new(vec![wrong]), Err(LayoutError::Shape(wrong.start)));
        }
    }

    #[test]
    fn memory_above_the_hole_follows_in_the_file() {
        let layout = Layout::split_at_4g(6 << 30, 2 << 30).unwrap();
        assert_eq!(layout.find(Physical::new(1 << 32)), Some((2 << 30, 4 << 30)));
        assert_eq!(layout.find(Physical::new(3 << 30)), None);
        assert_eq!(Layout::split_at_4g(1 << 30, 2 << 30).unwrap().blocks().len(), 1);
        let below = |layout: Result<Layout, LayoutError>| layout.unwrap().blocks()[0].len;
        assert_eq!([2 << 30, 0xb000_0000, 8 << 30].map(|bytes| below(Layout::q35(bytes))), [2 << 30; 3]);
        assert_eq!([3 << 30, 0xe000_0000, 8 << 30].map(|bytes| below(Layout::pc(bytes))), [3 << 30; 3]);
    }
}
