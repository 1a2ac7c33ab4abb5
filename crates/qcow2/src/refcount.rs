//! Refcounts: how wide they are, where they lie in a block, and the table of blocks.
//!
//! A refcount block is one cluster of entries of 1 to 64 bits each; the refcount table lists the blocks. The
//! allocator in `vmstrata-disk` works on blocks it has in memory through [`RefcountOrder::get`] and
//! [`RefcountOrder::set`].
//!
//! Source: the specification, "Host cluster management".

use thiserror::Error;
use vmstrata_types::{ClusterBits, HostOffset};

use crate::entry::EntryError;

/// Bits of a refcount table entry that must be zero.
pub const TABLE_RESERVED: u64 = 0x1ff;

/// Base-2 logarithm of the width of a refcount in bits: 0 (1 bit) to 6 (64 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefcountOrder(u8);

/// A refcount that its width cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("refcount {value} does not fit in {width_bits} bits")]
pub struct Overflow {
    /// The refcount.
    pub value: u64,
    /// The width.
    pub width_bits: u32,
}

impl RefcountOrder {
    /// 16 bits: the only width of version 2 and the default everywhere.
    pub const DEFAULT: Self = Self(4);
    /// 64 bits.
    pub const MAX: Self = Self(6);

    /// The width `1 << order` bits, or `None` above 64.
    pub const fn new(order: u32) -> Option<Self> {
        if order <= 6 { Some(Self(order as u8)) } else { None }
    }

    /// From a width in bits; `None` unless it is a power of two up to 64.
    pub const fn from_width_bits(width: u32) -> Option<Self> {
        if width.is_power_of_two() { Self::new(width.trailing_zeros()) } else { None }
    }

    /// The logarithm itself.
    pub const fn order(self) -> u32 {
        self.0 as u32
    }

    /// Bits in a refcount.
    pub const fn width_bits(self) -> u32 {
        1 << self.0
    }

    /// The highest refcount this width holds.
    pub const fn max(self) -> u64 {
        u64::MAX >> (64 - self.width_bits())
    }

    /// Refcounts in a block.
    pub const fn entries_per_block(self, cluster_bits: ClusterBits) -> usize {
        1 << self.entries_per_block_bits(cluster_bits)
    }

    /// Base-2 logarithm of [`RefcountOrder::entries_per_block`].
    pub const fn entries_per_block_bits(self, cluster_bits: ClusterBits) -> u32 {
        cluster_bits.get() + 3 - self.0 as u32
    }

    /// The refcount at `index` of a block.
    ///
    /// # Panics
    /// When the block ends before it.
    #[inline]
    pub fn get(self, block: &[u8], index: usize) -> u64 {
        match self.0 {
            0..=2 => {
                let (at, shift) = self.within_byte(index);
                u64::from(block[at] >> shift) & self.max()
            }
            3 => u64::from(block[index]),
            4 => u64::from(u16::from_be_bytes(chunk(block, index))),
            5 => u64::from(u32::from_be_bytes(chunk(block, index))),
            _ => u64::from_be_bytes(chunk(block, index)),
        }
    }

    /// Sets the refcount at `index` of a block.
    ///
    /// # Errors
    /// When the width cannot hold `value`; the block is as before.
    ///
    /// # Panics
    /// When the block ends before the entry.
    #[inline]
    pub fn set(self, block: &mut [u8], index: usize, value: u64) -> Result<(), Overflow> {
        if value > self.max() {
            return Err(Overflow { value, width_bits: self.width_bits() });
        }
        match self.0 {
            0..=2 => {
                let (at, shift) = self.within_byte(index);
                let mask = (self.max() as u8) << shift;
                block[at] = block[at] & !mask | (value as u8) << shift;
            }
            3 => block[index] = value as u8,
            4 => *chunk_mut(block, index) = (value as u16).to_be_bytes(),
            5 => *chunk_mut(block, index) = (value as u32).to_be_bytes(),
            _ => *chunk_mut(block, index) = value.to_be_bytes(),
        }
        Ok(())
    }

    /// Byte and shift of a refcount narrower than a byte: the first one is in the lowest bits.
    const fn within_byte(self, index: usize) -> (usize, u32) {
        let per_byte_bits = 3 - self.0 as u32;
        let slot = index & ((1 << per_byte_bits) - 1);
        (index >> per_byte_bits, (slot as u32) << self.0)
    }
}

fn chunk<const N: usize>(block: &[u8], index: usize) -> [u8; N] {
    block.as_chunks().0[index]
}

fn chunk_mut<const N: usize>(block: &mut [u8], index: usize) -> &mut [u8; N] {
    &mut block.as_chunks_mut().0[index]
}

/// Decodes a refcount table entry: where its block lies, `None` when all its refcounts are 0.
///
/// # Errors
/// Reserved bits or an offset off a cluster boundary.
pub const fn decode_table_entry(
    raw: u64,
    cluster_bits: ClusterBits,
) -> Result<Option<HostOffset>, EntryError> {
    if raw & TABLE_RESERVED != 0 {
        return Err(EntryError::Reserved { raw, bits: raw & TABLE_RESERVED });
    }
    let offset = HostOffset::new(raw);
    if !offset.is_aligned(cluster_bits) {
        return Err(EntryError::Misaligned { raw, offset });
    }
    Ok(if raw == 0 { None } else { Some(offset) })
}

/// The 64 bits of a refcount table entry.
///
/// # Panics
/// When the block is not on a cluster boundary.
pub const fn encode_table_entry(block: Option<HostOffset>, cluster_bits: ClusterBits) -> u64 {
    match block {
        Some(block) => {
            assert!(block.is_aligned(cluster_bits), "refcount block off a cluster boundary");
            block.get()
        }
        None => 0,
    }
}

#[cfg(test)]
mod tests;
