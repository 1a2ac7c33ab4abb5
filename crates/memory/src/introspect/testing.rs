//! Guests made up for tests: memory, page tables and types, byte by byte.

pub(crate) mod kernel;
mod structures;
mod types;

pub(crate) use kernel::{Kernel, Page};
pub(crate) use types::Types;

use super::view::Tables;
use crate::address::{Frame, PAGE_BITS, Physical, Virtual};
use crate::ram::{Block, Layout, Ram, RamError};

/// Memory from address 0 up, zero where nothing was written.
pub(crate) struct Memory {
    layout: Layout,
    /// `[byte]`.
    bytes: Vec<u8>,
    /// The next page that [`Memory::allocate`] gives away.
    next: u64,
    /// The table at the root of [`Memory::map`].
    pub tables: Tables,
    /// Whether it can be read without being copied.
    pub is_direct: bool,
}

impl Memory {
    /// `frames` pages; tables of `levels` levels are made in the first ones.
    pub(crate) fn new(frames: u64, levels: u32) -> Self {
        let len = frames << PAGE_BITS;
        let layout = Layout::new(vec![Block { start: Physical::new(0), len, file_offset: 0 }]).unwrap();
        let tables = Tables { root: Physical::new(0x1000), levels };
        Self { layout, bytes: vec![0; usize::try_from(len).unwrap()], next: 2, tables, is_direct: false }
    }

    /// So many pages that nobody has, in one piece.
    pub(crate) fn allocate(&mut self, pages: u64) -> Physical {
        self.next += pages;
        Frame::new(self.next - pages).start().unwrap()
    }

    pub(crate) fn write(&mut self, at: Physical, bytes: &[u8]) {
        let start = usize::try_from(at.get()).unwrap();
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn read_u64(&self, at: Physical) -> u64 {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Maps `pages` pages of 2^`bits` bytes (12, 21 or 30) from `from` on to `to`, to be written too.
    pub(crate) fn map(&mut self, from: Virtual, to: Physical, pages: u64, bits: u32) {
        for page in 0..pages {
            let from = from.checked_add(page << bits).unwrap();
            let huge = if bits > PAGE_BITS { 1 << 7 } else { 0 };
            let entry = self.entry(from, bits);
            self.write(entry, &((to.get() + (page << bits)) | huge | 3).to_le_bytes());
        }
    }

    /// Where the entry for `at` in a table of pages of 2^`bits` bytes lies; the tables above it are made.
    pub(crate) fn entry(&mut self, at: Virtual, bits: u32) -> Physical {
        let mut table = self.tables.root;
        let mut level = PAGE_BITS + 9 * (self.tables.levels - 1);
        loop {
            let entry = table.checked_add((at.get() >> level) % 512 * 8).unwrap();
            if level == bits {
                return entry;
            }
            if self.read_u64(entry) == 0 {
                let made = self.allocate(1);
                self.write(entry, &(made.get() | 1).to_le_bytes());
            }
            table = Physical::new(self.read_u64(entry) & !0xfff);
            level -= 9;
        }
    }
}

impl Ram for Memory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, at: Physical, into: &mut [u8]) -> Result<(), RamError> {
        let len = into.len();
        let start = usize::try_from(at.get()).unwrap();
        let there = start.checked_add(len).and_then(|end| self.bytes.get(start..end));
        into.copy_from_slice(there.ok_or(RamError::Hole { at, len })?);
        Ok(())
    }

    fn bytes(&self, at: Physical, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(at.get()).ok().filter(|_| self.is_direct)?;
        self.bytes.get(start..start.checked_add(len)?)
    }
}
